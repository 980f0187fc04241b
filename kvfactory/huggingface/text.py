"""The text part of a config: multimodal models nest the language model's keys in an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvfactory.huggingface.fields import Fields

_PARTS = (
    "thinker_config",
    "text_config",
    "llm_config",
    "language_config",
    "language_model_config",
    "llm_cfg",
)
_MAX_DEPTH = 4


def text_part(values: Mapping[str, Any]) -> Fields:
    """The object that describes the language model: the config itself, or one nested in it.

    Its ``model_type`` is the enclosing config's where it has none of its own.
    """
    config = Fields(values)
    for _ in range(_MAX_DEPTH):
        nested = _nested(config)
        if nested is None:
            break
        config = nested
    return config


def _nested(config: Fields) -> Fields | None:
    given = [key for key in _PARTS if config.has(key) and config.values[key] != {}]
    if len(given) > 1:
        config.clash(given, "one text part")
    if not given:
        return None
    part = config.part(given[0])
    if not part.values:  # of a wrong type, which is on record
        return None
    inherited = {"model_type": config.values.get("model_type")}
    found = Fields({**inherited, **part.values}, part.prefix, config.outer)
    if not found.has("model_type"):
        found.values = {**found.values, **inherited}
    return found
