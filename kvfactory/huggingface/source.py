"""A config.json from the disk: read as data, refused with its place when it is none."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfactory.errors import Problem, SpecError

PATH = "model.path"
_NEED = "a config.json, or a folder that holds one; nothing is downloaded"
_MAX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Source:
    """The content of a config file, and the name that its place suggests for the model."""

    name: str
    values: dict[str, Any]


def read_source(path: str | Path) -> Source:
    """The config at ``path``, a file or a folder that holds ``config.json``.

    Raises:
        SpecError: no such file, not readable, not JSON, not an object, or a key given twice.
    """
    file = _locate(path)
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise _refusal(file, "a file above 64 MiB", _NEED)
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refusal(file, f"bytes that are not UTF-8 at {error.start}", "a JSON text") from None
    except OSError as error:
        raise _refusal(file, f"a file that cannot be read: {error.strerror}", _NEED) from None
    return Source(_name(file), _parse(text, file))


def _locate(path: str | Path) -> Path:
    try:
        given = Path(path).expanduser()
        file = given / "config.json" if given.is_dir() else given
        found = file.is_file()
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        raise SpecError(Problem(PATH, f"{path!r}, which is no path: {error}", _NEED)) from None
    if not found:
        lack = (
            f"the folder {str(path)!r} without a config.json" if file != given else repr(str(path))
        )
        got = lack if file != given else f"{lack}, which does not exist"
        raise SpecError(Problem(PATH, got, _NEED))
    return file


def _parse(text: str, file: Path) -> dict[str, Any]:
    try:
        values = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        got = (
            f"JSON that breaks off or errs at line {error.lineno} column {error.colno}: {error.msg}"
        )
        raise _refusal(file, got, "a complete JSON object") from None
    except RecursionError:
        raise _refusal(file, "JSON nested beyond any config", "a model's config.json") from None
    except ValueError as error:
        raise _refusal(file, str(error), "a model's config.json") from None
    if not isinstance(values, dict):
        raise _refusal(file, f"JSON of type {type(values).__name__}", "a JSON object") from None
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} twice in one object")
    return values


def _refusal(file: Path, got: str, need: str) -> SpecError:
    return SpecError(Problem(PATH, f"{str(file)!r}: {got}", need))


def _name(file: Path) -> str:
    """``Qwen3-8B`` from a snapshot folder, a folder, or a file ``org--Qwen3-8B_config.json``."""
    cached = re.search(r"models--(?:[^/\\]+--)?([^/\\]+?)[/\\]snapshots[/\\]", str(file))
    if cached:
        return cached[1]
    if file.name == "config.json":
        return file.absolute().parent.name
    return file.stem.removesuffix("config").rstrip("_-.").rpartition("--")[2]
