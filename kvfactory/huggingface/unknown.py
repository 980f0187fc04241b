"""Model types that no family knows: the standard rules, where nothing speaks against them.

Without ``layer_types`` every layer attends over all tokens. With them a layer may have the window
or the chunk that transformers' own names, ``sliding_window`` and ``attention_chunk_size``, give it.
"""

from __future__ import annotations

import re
from difflib import get_close_matches

from kvfactory.huggingface.attention import Rule, read_attention
from kvfactory.huggingface.doubts import refuse_doubts
from kvfactory.huggingface.family import FAMILIES, Geometry
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.layertypes import CHUNKED, FULL, LOCAL
from kvfactory.huggingface.source import PATH

_STANDARD = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
_EXPLAINED = {
    LOCAL: ("sliding_window", "use_sliding_window"),
    CHUNKED: ("attention_chunk_size",),
}
"""Keys that layers of a type read."""
_NO_DECODER = re.compile(r"vision|audio|image|video|encoder|embed|(^|_)vit|bert")
_NOTHING = Geometry(1, {})


def read_unknown(config: Fields) -> Geometry:
    """Full, windowed and chunked layers: only with all standard keys and no telling one."""
    if _NO_DECODER.search(config.text("model_type")):
        config.wrong("model_type", "a decoder: a model that sees all tokens at once keeps no cache")
        return _NOTHING
    missing = [key for key in _STANDARD if not config.has(key)]
    if missing and not (missing == ["hidden_size"] and config.has("head_dim")):
        _refuse(config, missing)
        return _NOTHING
    types = set(config.strings("layer_types") or ())
    refuse_doubts(config, [key for kind in types for key in _EXPLAINED.get(kind, ())])
    if types - {FULL, "attention", *_EXPLAINED}:
        kinds = ", ".join((FULL, *_EXPLAINED))
        config.wrong("layer_types", f"only {kinds} for a model type that no family knows")
        return _NOTHING
    return read_attention(config, Rule())


def _refuse(config: Fields, missing: list[str]) -> None:
    types = [t for name in FAMILIES.names() for t in FAMILIES.get(name, PATH).model_types]
    close = get_close_matches(config.text("model_type"), types, n=1, cutoff=0.8)
    need = f"a known model type, or the standard keys {', '.join(missing)}"
    config.wrong("model_type", need, fix=f"model_type={close[0]}" if close else "")
