"""Inkling: attention, windows, and four short convolutions in every layer."""

from __future__ import annotations

from kvfactory.huggingface.attention import Heads, Rule, check_shared, keep_attention, read_heads
from kvfactory.huggingface.family import Family, Geometry
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.groups import Kept, collect, linear
from kvfactory.huggingface.layertypes import (
    FULL,
    HYBRID,
    HYBRID_LOCAL,
    LOCAL,
    layer_types,
    num_layers,
)

_BIAS = (
    "its attention adds relative-position biases (d_rel), which a spec cannot carry: the geometry "
    "holds, attend() alone does not compute this model"
)


def _inkling(config: Fields) -> Geometry:
    config.note(_BIAS)
    layers = num_layers(config)
    types = layer_types(config, layers, _layers, (HYBRID, HYBRID_LOCAL))
    attend = {n: FULL if kind == HYBRID else LOCAL for n, kind in enumerate(types)}
    rule = Rule(heads=_heads, scale=lambda _, heads: 1 / heads.dim, window=_window)
    kept = [*keep_attention(config, attend, layers, rule)]
    taps = config.integer("conv_kernel_size", "sconv_kernel_size", default=4)
    wide = linear("none", conv=[(config.integer("hidden_size"), taps)] * 2)
    for layer, kind in attend.items():
        heads = _heads(config, kind)
        name = "conv_full" if kind == FULL else "conv_local"
        kept.append((layer, name, linear("none", conv=[(heads.kv * heads.dim, taps)] * 2)))
    hidden: list[Kept] = [(layer, "conv_hidden", wide) for layer in range(layers)]
    context = config.tokens("max_position_embeddings", "model_max_length")
    return Geometry(layers, collect(layers, [*kept, *hidden]), context)


def _layers(config: Fields, layers: int) -> list[str]:
    listed = config.integers("local_layer_ids")
    local = {n for n in range(layers) if (n + 1) % 6} if listed is None else {*listed}
    return [HYBRID_LOCAL if layer in local else HYBRID for layer in range(layers)]


def _heads(config: Fields, kind: str) -> Heads:
    heads = read_heads(config)
    if kind == FULL:
        return heads
    q = config.integer("swa_num_attention_heads", default=heads.q)
    kv = config.integer("swa_num_key_value_heads", default=heads.kv)
    check_shared(config, q, kv, "swa_num_attention_heads", "swa_num_key_value_heads")
    return Heads(q, kv, config.integer("swa_head_dim", default=heads.dim))


def _window(config: Fields) -> int:
    return config.integer("sliding_window_size", "sliding_window", default=512)


_TYPES = ("inkling_text", "inkling_mm_model")
_OMITTED = {"swa_num_key_value_heads": 16}

PLUGINS = (Family("inkling", _TYPES, _inkling, dict.fromkeys(_TYPES, _OMITTED)),)
