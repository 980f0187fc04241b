"""Model types that no family knows: the standard dense rule, where nothing speaks against it."""

from __future__ import annotations

import re
from difflib import get_close_matches

from kvfactory.huggingface.attention import Rule, read_attention
from kvfactory.huggingface.doubts import refuse_doubts
from kvfactory.huggingface.family import FAMILIES, Geometry
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.layertypes import FULL
from kvfactory.huggingface.source import PATH

_STANDARD = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
_NO_DECODER = re.compile(r"vision|audio|image|video|encoder|embed|(^|_)vit|bert")
_NOTHING = Geometry(1, {})


def read_unknown(config: Fields) -> Geometry:
    """Every layer attends over all tokens: only with all standard keys and no telling one."""
    if _NO_DECODER.search(config.text("model_type")):
        config.wrong("model_type", "a decoder: a model that sees all tokens at once keeps no cache")
        return _NOTHING
    missing = [key for key in _STANDARD if not config.has(key)]
    if missing and not (missing == ["hidden_size"] and config.has("head_dim")):
        _refuse(config, missing)
        return _NOTHING
    refuse_doubts(config)
    if any(kind not in (FULL, "attention") for kind in config.strings("layer_types") or ()):
        config.wrong("layer_types", "only full_attention for a model type that no family knows")
        return _NOTHING
    return read_attention(config, Rule())


def _refuse(config: Fields, missing: list[str]) -> None:
    types = [t for name in FAMILIES.names() for t in FAMILIES.get(name, PATH).model_types]
    close = get_close_matches(config.text("model_type"), types, n=1, cutoff=0.8)
    need = f"a known model type, or the standard keys {', '.join(missing)}"
    config.wrong("model_type", need, fix=f"model_type={close[0]}" if close else "")
