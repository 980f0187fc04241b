"""Folders of YAML: ours, those of installed packages and those named on the command line.

Ours come first, so others add names and never replace one. Foreign files are scanned as tokens
before any YAML loader sees them: aliases can expand without end, keys that begin with an
underscore ask Hydra to import and call code, and YAML 1.1 reads ``off``, ``010`` and ``1:30`` as
false, 8 and 90.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvfactory.errors import Problem, SpecError

ENTRY_POINTS = "kvfactory.conf"
_SEARCHPATH = "hydra.searchpath"
_MOST_FILES = 2_000
_MISREAD = re.compile(r"[-+]?0[0-9_]+|[-+]?[0-9]+(:[0-9]+)+|(?i:y|n|yes|no|on|off)")


@dataclass(frozen=True)
class ConfDir:
    """A folder of YAML and who brings it: ``built-in``, a distribution, or the command line.

    ``by_hand`` tells that it was named on the command line, not installed.
    """

    path: Path
    origin: str
    by_hand: bool = False

    def options(self, group: str) -> tuple[str, ...]:
        """Names of the choices of a config group, sorted."""
        return tuple(sorted(file.stem for file in (self.path / group).glob("*.yaml")))

    def files(self) -> tuple[Path, ...]:
        """All YAML files in it and below, sorted.

        Raises:
            SpecError: too many folders or files for a folder of choices, such as ``/``.
        """
        found: list[Path] = []
        for number, (folder, _, names) in enumerate(os.walk(self.path, followlinks=True)):
            found += [Path(folder, name) for name in names if name.endswith(".yaml")]
            if number >= _MOST_FILES or len(found) > _MOST_FILES:
                got = f"{self.path} with more than {_MOST_FILES} folders or YAML files"
                raise SpecError(Problem(_SEARCHPATH, got, "a folder of config groups"))
        return tuple(sorted(found))

    def groups(self) -> tuple[str, ...]:
        """Names of the config groups, sorted."""
        return tuple(sorted(entry.name for entry in self.path.iterdir() if entry.is_dir()))


def conf_dir() -> Path:
    """The folder that ships with kvfactory: in the wheel, or beside the package in a checkout.

    Raises:
        SpecError: neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    for found in (package / "conf", package.parent / "conf"):
        if (found / "config.yaml").is_file():
            return found
    raise SpecError(
        Problem("conf", f"no conf folder at {package}", "an installation with its YAML files")
    )


def conf_dirs(named: Sequence[str] = (), conf: Path | None = None) -> tuple[ConfDir, ...]:
    """All folders in search order: the primary one (``conf``, else ours), packages', ``named``.

    A folder that several of them name counts once: the jobs of a sweep get all of them named.

    Raises:
        SpecError: a folder that is missing, an unsafe file, or one option brought twice.
    """
    primary = ConfDir(conf.absolute(), str(conf)) if conf else ConfDir(conf_dir(), "built-in")
    installed = tuple(_installed(entry) for entry in entry_points(group=ENTRY_POINTS))
    foreign = _once((*installed, *(_named(text) for text in named)))
    missing = [found for found in (primary, *foreign) if not found.path.is_dir()]
    if missing:
        raise SpecError(*(_no_folder(found) for found in missing))
    scanned = (primary, *foreign) if conf else foreign
    problems = [problem for found in scanned for problem in _unsafe(found)]
    problems += _twice(foreign)
    if problems:
        raise SpecError(*problems)
    return (primary, *foreign)


def _once(folders: Sequence[ConfDir]) -> tuple[ConfDir, ...]:
    """``folders`` without those that an earlier one is already."""
    first: dict[Path, ConfDir] = {}
    for found in folders:
        first.setdefault(found.path.resolve(), found)
    return tuple(first.values())


def _installed(entry: EntryPoint) -> ConfDir:
    """``acme_kv:conf`` is the folder ``conf`` of the package ``acme_kv``; nothing is imported."""
    owner = entry.dist.name if entry.dist else entry.value
    try:
        spec = find_spec(entry.module)
    except (ImportError, ValueError):
        spec = None
    roots = (spec.submodule_search_locations if spec else None) or ()
    folder = Path(next(iter(roots), entry.module), *entry.attr.split("."))
    return ConfDir(folder, owner)


def _named(text: str) -> ConfDir:
    return ConfDir(Path(text.removeprefix("file://")).expanduser().absolute(), text, by_hand=True)


def _no_folder(found: ConfDir) -> Problem:
    return Problem(
        _SEARCHPATH,
        f"{found.path} from {found.origin}",
        "a folder of YAML files that exists",
    )


def _twice(foreign: Sequence[ConfDir]) -> Iterator[Problem]:
    seen: dict[str, ConfDir] = {}
    for found in foreign:
        for file in found.files():
            if file.parent == found.path:
                continue
            option = str(file.relative_to(found.path).with_suffix(""))
            first = seen.setdefault(option, found)
            if first is not found:
                got = f"two files, of {first.origin} and {found.origin}"
                fix = f"renaming {file}" if found.by_hand else f"pip uninstall {found.origin}"
                yield Problem(option, got, "one file of that name", fix)


def _unsafe(found: ConfDir) -> Iterator[Problem]:
    need = "plain YAML: no references, tags or code, odd words in quotes"
    for file in found.files():
        got = unsafe_yaml(file)
        if got:
            yield Problem(str(file), got, need)


def unsafe_yaml(file: Path) -> str:
    """The first thing in a YAML file that must not reach a loader; empty if there is none."""
    import yaml

    after_key = False
    try:
        for token in yaml.scan(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader):
            found = _unsafe_token(token, after_key)
            if found:
                return f"{found} at line {token.start_mark.line + 1}"
            after_key = isinstance(token, yaml.KeyToken)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return " ".join(str(error).split())
    return ""


def _unsafe_token(token: Any, is_key: bool) -> str:
    import yaml

    if isinstance(token, yaml.AliasToken | yaml.AnchorToken):
        return f"the reference {token.value!r}"
    if isinstance(token, yaml.TagToken):
        return f"the tag {token.value!r}"
    if isinstance(token, yaml.ScalarToken) and is_key and token.value.startswith("_"):
        return f"the key {token.value!r}"
    if isinstance(token, yaml.ScalarToken) and token.plain and _MISREAD.fullmatch(token.value):
        return f"{token.value!r} without quotes, which YAML reads as another value,"
    return ""
