"""Folders of YAML: ours, those of installed packages and those named on the command line.

Ours come first, so others add names and never replace one. Every foreign file is looked through
before Hydra sees it, chosen or not; see ``foreign``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

from kvfactory.config.foreign import unsafe_yaml
from kvfactory.errors import Problem, SpecError

ENTRY_POINTS = "kvfactory.conf"
_SEARCHPATH = "hydra.searchpath"
_MOST_FILES = 2_000


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
        _, names, _ = next(os.walk(self.path), ("", [], []))
        return tuple(sorted(names))


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
        SpecError: a folder that is missing, an unsafe file, one option brought twice, or an entry
            point that names no folder.
    """
    primary = ConfDir(conf.absolute(), str(conf)) if conf else ConfDir(conf_dir(), "built-in")
    installed = tuple(_installed(entry) for entry in entry_points(group=ENTRY_POINTS))
    foreign = _once((*installed, *(_named(text) for text in named)))
    missing = [found for found in (primary, *foreign) if not found.path.is_dir()]
    if missing:
        raise SpecError(*(_no_folder(found) for found in missing))
    problems = [problem for found in foreign for problem in _unsafe(found, may_name_hydra=False)]
    if conf:
        problems += _unsafe(primary, may_name_hydra=True)
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
    module, _, inside = (part.strip() for part in entry.value.partition(":"))
    package, *below = module.split(".")
    if not package or not inside:
        got = f"{entry.name} = {entry.value!r} from {owner}"
        raise SpecError(Problem(ENTRY_POINTS, got, "PACKAGE:FOLDER", f"mend or uninstall {owner}"))
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        spec = None
    roots = (spec.submodule_search_locations if spec else None) or ()
    return ConfDir(Path(next(iter(roots), package), *below, *inside.split(".")), owner)


def _named(text: str) -> ConfDir:
    try:
        path = Path(text.removeprefix("file://")).expanduser().absolute()
    except RuntimeError:
        got, need = repr(text), "a folder of a user of this machine"
        raise SpecError(Problem(_SEARCHPATH, got, need)) from None
    except FileNotFoundError:
        got, fix = "one that was removed", "cd to a folder that exists"
        raise SpecError(Problem("working directory", got, "a folder", fix)) from None
    return ConfDir(path, text, by_hand=True)


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


def _unsafe(found: ConfDir, may_name_hydra: bool) -> Iterator[Problem]:
    need = "plain YAML: no references, tags or code, odd words in quotes"
    for file in found.files():
        inside = file.relative_to(found.path)
        if not may_name_hydra and "hydra" in re.split(r"[/\\.]", str(inside)):
            yield Problem(str(file), "a file or folder named hydra", "choices of our own groups")
            continue
        got = unsafe_yaml(file, may_name_hydra)
        if got:
            yield Problem(str(file), got, need)
