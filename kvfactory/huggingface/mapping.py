"""From a Hugging Face config.json to the ``model`` mapping of a spec."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvfactory.errors import Problem, SpecError, did_you_mean
from kvfactory.huggingface.family import Family, Geometry, find_family
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.omitted import HEAD_DIM
from kvfactory.huggingface.source import PATH, read_source
from kvfactory.huggingface.text import text_part
from kvfactory.huggingface.unknown import read_unknown
from kvfactory.spec import Model
from kvfactory.spec.validation import from_validation

_LOG = logging.getLogger(__name__)
_DTYPES = ("bfloat16", "float16", "float32")
_SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")


def model_from_config(path: str | Path) -> dict[str, Any]:
    """The ``model`` mapping of the spec for a Hugging Face ``config.json``.

    ``path`` is the file or a folder that holds it. The JSON is read as data: no download, no code
    of the model, no transformers. Quantization of weights is ignored; layers of multi-token
    prediction are not counted.

    Raises:
        SpecError: no such file, broken JSON, missing, contradictory or absurd numbers, and every
            key that the mapping cannot express, all together, each with its place in the config.
    """
    source = read_source(path)
    return model_from_values(source.values, source.name)


def model_from_values(values: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """The same from the content of a config, for instance ``model.config.to_dict()``.

    ``name`` is the model's name, its type by default.

    Raises:
        SpecError: as ``model_from_config``.
    """
    config = text_part(values)
    geometry = _read(config, _family(config))
    dtype = _dtype(config)
    if not geometry.groups and not config.ledger.problems:
        config.wrong("num_hidden_layers", "a layer that keeps a cache")
    if config.ledger.problems:
        raise SpecError(*config.ledger.problems)
    for note in config.ledger.notes:
        _LOG.warning("%s: %s", name or config.text("model_type"), note)
    return _checked(
        {
            "name": name or config.text("model_type"),
            "num_layers": geometry.num_layers,
            "dtype": dtype,
            "max_context": geometry.max_context,
            "groups": {name: dict(group) for name, group in geometry.groups.items()},
            "aliases": [list(pair) for pair in geometry.aliases],
        }
    )


def _family(config: Fields) -> Family | None:
    model_type = config.text("model_type")
    return find_family(model_type) if model_type else None


def _read(config: Fields, family: Family | None) -> Geometry:
    if family is None:
        return read_unknown(config)
    model_type = config.text("model_type")
    defaults = dict(family.defaults.get(model_type, {}))
    if model_type in HEAD_DIM:
        defaults["head_dim"] = HEAD_DIM[model_type]
    if config.outer is config:  # a whole model states its own shape
        defaults = {key: value for key, value in defaults.items() if key not in _SHAPE}
    config.values = {**defaults, **config.values}
    for key in _SHAPE[1:]:
        config.optional(key)  # absurd numbers are told even where the family needs none of them
    return family.read(config)


def _dtype(config: Fields) -> str:
    """The type in which K and V arrive; that of stored weights says nothing when below 16 bits."""
    for place in (config, config.outer):
        named = place.text(place.given(("dtype", "torch_dtype"))).removeprefix("torch.")
        if named in _DTYPES:
            return named
        if named and named != "auto" and not named.startswith(("float8", "int", "uint")):
            close = did_you_mean(named, _DTYPES)
            place.wrong(
                place.given(("dtype", "torch_dtype")), f"one of {', '.join(_DTYPES)}", fix=close
            )
    return "bfloat16"


def _checked(model: dict[str, Any]) -> dict[str, Any]:
    """``model``, once the spec's own schema has accepted it."""
    try:
        Model.model_validate_json(json.dumps(model))
    except ValidationError as error:
        found = from_validation(error, Model, "model")
        raise SpecError(*(Problem(PATH, f"{p.path}={p.got}", p.need) for p in found)) from None
    return model
