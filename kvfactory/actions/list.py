"""``action=list``: what there is to choose from, and who brings it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from kvfactory.backends import BACKENDS
from kvfactory.config.confdirs import conf_dirs
from kvfactory.layouts import LAYOUTS
from kvfactory.memory import MEMORIES
from kvfactory.quant import SCHEMES
from kvfactory.spec import Spec

_HEAD = ("use", "what", "origin")
_REGISTRIES = (LAYOUTS, SCHEMES, BACKENDS, MEMORIES)


def run(spec: Spec, output: str) -> int:
    """Print every choice of every config group, and every plugin, with its origin."""
    entries = [*_choices(), *_plugins()]
    if output == "json":
        print(json.dumps([dict(zip(_HEAD, entry, strict=True)) for entry in entries], indent=2))
    else:
        from kvfactory.report.tables import columns

        print(columns(_HEAD, entries))
    return 0


def _choices() -> Iterator[tuple[str, str, str]]:
    for found in conf_dirs():
        for group in found.groups():
            for option in found.options(group):
                yield f"{group}={option}", _summary(found.path / group / option), found.origin


def _summary(option: Path) -> str:
    """The first comment of a YAML file."""
    lines = option.with_suffix(".yaml").read_text(encoding="utf-8").splitlines()
    comments = [line[1:].strip() for line in lines if line.startswith("#")]
    return next((text for text in comments if not text.startswith("@package")), "")


def _plugins() -> Iterator[tuple[str, str, str]]:
    for registry in _REGISTRIES:
        for name in registry.names():
            yield name, f"{registry.axis} plugin", registry.origin(name)
