"""Gemma 2, 3, 3n and 4: windows and full layers, fixed logit scales, layers that share K/V."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from kvfactory.huggingface.attention import Heads, Rule, keep_attention, read_heads
from kvfactory.huggingface.family import Family, Geometry
from kvfactory.huggingface.fields import MAX_LAYERS, Fields
from kvfactory.huggingface.groups import collect
from kvfactory.huggingface.layertypes import (
    FULL,
    alternating,
    layer_types,
    num_layers,
    spaced,
)


def _pre_attention(config: Fields, heads: Heads) -> float:
    return math.pow(config.number("query_pre_attn_scalar", default=256), -0.5)


def _unit(config: Fields, heads: Heads) -> float:
    return 1.0


def _cap(config: Fields) -> float | None:
    key = "attn_logit_softcapping"
    return config.number(key) if config.has(key) else None


def _gemma4_heads(config: Fields, kind: str) -> Heads:
    """Full layers have a head_dim of their own, and kv heads where keys serve as values."""
    if kind != FULL or config.has("per_layer_config"):
        return read_heads(config)
    wide: dict[str, object] = {"head_dim": config.integer("global_head_dim", default=512)}
    if config.flag("attention_k_eq_v") and config.has("num_global_key_value_heads"):
        wide["num_key_value_heads"] = config.values["num_global_key_value_heads"]
    return read_heads(config.merged(wide))


def _read(config: Fields, rule: Rule, last_full: bool = False) -> Geometry:
    """``last_full``: the last layer attends over everything, whatever the list says."""
    _refuse_bidirectional(config)
    layers = num_layers(config)
    types = layer_types(config, layers, rule.types)
    types = (*types[:-1], FULL) if last_full else types
    aliases = shared_layers(config, types)
    readers = {layer for layer, _ in aliases}
    own = {layer: kind for layer, kind in enumerate(types) if layer not in readers}
    kept = collect(layers, keep_attention(config, own, layers, rule))
    return Geometry(layers, kept, config.tokens("max_position_embeddings"), aliases)


def shared_layers(config: Fields, types: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """(layer, owner) of the last ``num_kv_shared_layers``; owners are the last of their type."""
    key = "num_kv_shared_layers"
    shared = config.integer(key, default=0, least=0, most=MAX_LAYERS)
    first = len(types) - shared
    owners = {kind: layer for layer, kind in enumerate(types[: max(first, 0)])}
    if not {*types[max(first, 0) :]} <= {*owners}:
        config.clash([key, "num_hidden_layers"], "a layer of each type before the sharing ones")
        return ()
    return tuple((layer, owners[types[layer]]) for layer in range(first, len(types)))


def _refuse_bidirectional(config: Fields) -> None:
    key = "use_bidirectional_attention"
    if config.values.get(key) not in (None, False, "vision"):
        config.wrong(key, "causal attention: a model that sees all tokens at once keeps no cache")


_SMALL: Mapping[str, object] = {
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
_GEMMA2 = {**_SMALL, "attn_logit_softcapping": 50.0, "max_position_embeddings": 8192}
_GEMMA3 = {**_SMALL, "max_position_embeddings": 131072}
_GEMMA3N = {
    **_SMALL,
    "num_hidden_layers": 35,
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "sliding_window": 512,
    "num_kv_shared_layers": 15,
    "max_position_embeddings": 32768,
}
_GEMMA4 = {**_GEMMA3, "num_hidden_layers": 30, "sliding_window": 512}
_UNIFIED = {**_GEMMA4, "sliding_window": 1024}

_RULE2 = Rule(alternating, scale=_pre_attention, soft_cap=_cap)
_RULE3 = Rule(
    spaced(6, key="sliding_window_pattern"),
    scale=_pre_attention,
    soft_cap=_cap,
)
_RULE3N = Rule(spaced(5), scale=_unit)
_RULE4 = Rule(spaced(6), heads=_gemma4_heads, scale=_unit)


def _family(
    name: str, types: str, rule: Rule, defaults: Mapping[str, object], last_full: bool = False
) -> Family:
    names = tuple(types.split())
    read = partial(_read, rule=rule, last_full=last_full)
    return Family(name, names, read, dict.fromkeys(names, defaults))


PLUGINS = (
    _family("gemma2", "gemma2 vaultgemma", _RULE2, _GEMMA2),
    _family("gemma3", "gemma3_text gemma3", _RULE3, _GEMMA3),
    _family("gemma3n", "gemma3n_text gemma3n", _RULE3N, _GEMMA3N),
    _family("gemma4", "gemma4_text gemma4", _RULE4, _GEMMA4, last_full=True),
    _family("gemma4_unified", "gemma4_unified_text", _RULE4, _UNIFIED, last_full=True),
)
