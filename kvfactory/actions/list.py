"""``action=list``: what there is to choose from, and who brings it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvfactory.backends import BACKENDS
from kvfactory.config.confdirs import conf_dirs
from kvfactory.layouts import LAYOUTS, Layout
from kvfactory.layouts.pattern import REST
from kvfactory.memory import MEMORIES
from kvfactory.quant import SCHEMES, Scheme
from kvfactory.registry import BUILT_IN, Registry
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
    """The first comment of a YAML file, else the keys that it sets."""
    lines = option.with_suffix(".yaml").read_text(encoding="utf-8").splitlines()
    comments = [line[1:].strip() for line in lines if line.startswith("#")]
    keys = [line.partition(":")[0] for line in lines if line[:1].isalpha()]
    said = (text for text in comments if text and not text.startswith("@package"))
    return next(said, f"sets {', '.join(keys)}")


def _key(name: str, registry: Registry[Any]) -> str:
    """The key that takes the plugin; what a third party's fits is known only once it is loaded."""
    if registry is LAYOUTS:
        is_state = _is_builtin(name, registry) and REST in LAYOUTS.get(name, registry.axis).k
        return f"kv.layout.{'state' if is_state else 'tokens'}"
    if registry is SCHEMES:
        if not _is_builtin(name, registry):
            return "kv.quant.ROLE"
        return f"kv.quant.{'k' if 'k' in SCHEMES.get(name, registry.axis).roles else 'state'}"
    return f"{registry.axis}.name"


def _is_builtin(name: str, registry: Registry[Any]) -> bool:
    return registry.origin(name) == BUILT_IN


def _said(name: str, registry: Registry[Any]) -> str:
    """What a built-in layout or format is, in a line; presets say it of the others."""
    match registry.get(name, registry.axis):
        case Layout() as layout:
            return f": {layout.k}"
        case Scheme() as scheme:
            return f": {scheme.summary}"
    return ""


def _plugins() -> Iterator[tuple[str, str, str]]:
    """Third-party plugins by name alone: listing loads none of them."""
    for registry in _REGISTRIES:
        for name in registry.names():
            said = _said(name, registry) if _is_builtin(name, registry) else ""
            use = f"{_key(name, registry)}={name}"
            yield use, f"{registry.axis} plugin{said}", registry.origin(name)
