"""Specs for planner tests: shipped models by file, and small ones by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvfactory.spec import Spec

CONF = Path(__file__).parents[2] / "conf"


def read_yaml(path: Path) -> dict[str, Any]:
    """A config file with its single-file parents merged in, as the composer would."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    merged: dict[str, Any] = {}
    for parent in data.pop("defaults", []):
        if parent != "_self_":
            merged |= read_yaml(path.with_name(f"{parent}.yaml"))
    return _merge(merged, data)


def _merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merge(out[key], value) if both else value
    return out


def model_files() -> list[Path]:
    """Every shipped model but the Hugging Face reader."""
    return [path for path in sorted((CONF / "model").glob("*.yaml")) if path.stem != "hf"]


def preset_files() -> list[Path]:
    """Every shipped storage preset."""
    return sorted((CONF / "kv").glob("*.yaml"))


def spec_of(model: dict[str, Any], **parts: Any) -> Spec:
    """A spec of ``model`` with other parts as plain dicts."""
    return Spec.parse({"model": model, **parts})
