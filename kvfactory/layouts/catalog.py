"""The catalog: names for patterns, a YAML line each."""

from __future__ import annotations

from pathlib import Path

import yaml

from kvfactory.layouts.pattern import Layout


def _read() -> tuple[Layout, ...]:
    entries = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return tuple(
        Layout(name, **value) if isinstance(value, dict) else Layout(name, value)
        for name, value in entries.items()
    )


PLUGINS = _read()
