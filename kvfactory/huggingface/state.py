"""Recurrent states from the keys of a config.

A convolution of K taps keeps K - 1 columns, as engines do (transformers keeps K). The recurrent
state is float32 unless the config names a type: transformers keeps it so in bfloat16 models too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvfactory.huggingface.attention import STANDARD, Rule, keep_attention
from kvfactory.huggingface.family import Geometry
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.groups import Group, Kept, collect, linear
from kvfactory.huggingface.layertypes import (
    FULL,
    HYBRID,
    LINEAR,
    LOCAL,
    NOTHING,
    TypesRule,
    layer_types,
    num_layers,
)

_DTYPE_KEYS = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
_FLOATS = ("float32", "bfloat16", "float16")


def state_dtype(config: Fields) -> str:
    """The type of the recurrent state."""
    key = config.given(_DTYPE_KEYS)
    named = config.text(key, default="float32").removeprefix("torch.")
    if named not in _FLOATS:
        config.wrong(key, f"one of {', '.join(_FLOATS)}")
        return "float32"
    return named


def gated_delta(config: Fields) -> Group:
    """Gated DeltaNet: one convolution over q, k and v; a [value heads, key, value] state."""
    key_heads = config.integer("linear_num_key_heads")
    value_heads = config.integer("linear_num_value_heads")
    key, value = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
    if value_heads % key_heads:
        keys = ["linear_num_value_heads", "linear_num_key_heads"]
        config.clash(keys, "value heads a multiple of key heads")
    channels = 2 * key_heads * key + value_heads * value
    return linear(
        "gdn",
        conv=[(channels, config.integer("linear_conv_kernel_dim", default=4))],
        recurrent={"head": value_heads, "key": key, "value": value},
        state_dtype=state_dtype(config),
    )


def kimi_delta(config: Fields, heads: int, dim: int, taps: int) -> Group:
    """Kimi Delta Attention: one convolution over q, k and v; a [heads, key, value] state."""
    return linear(
        "kda",
        conv=[(3 * heads * dim, taps)],
        recurrent={"head": heads, "key": dim, "value": dim},
        state_dtype=state_dtype(config),
    )


def lightning(config: Fields, heads: int, dim: int) -> Group:
    """Lightning attention: a [heads, key, value] state, no convolution."""
    recurrent = {"head": heads, "key": dim, "value": dim}
    return linear("lightning", recurrent=recurrent, state_dtype=state_dtype(config))


def mamba2(config: Fields, heads: int, dim: int, groups: int, state: int, taps: int) -> Group:
    """Mamba-2: one convolution over x, B and C; a [heads, dim, state] state."""
    return linear(
        "mamba2",
        conv=[(heads * dim + 2 * groups * state, taps)],
        recurrent={"head": heads, "value": dim, "key": state},
        state_dtype=state_dtype(config),
    )


def mamba1(config: Fields, channels: int, state: int, taps: int) -> Group:
    """Mamba: a convolution over x, a [channels, state] state."""
    return linear(
        "mamba1",
        conv=[(channels, taps)],
        recurrent={"channel": channels, "state": state},
        state_dtype=state_dtype(config),
    )


def read_hybrid(
    config: Fields,
    types: TypesRule,
    states: Mapping[str, Callable[[Fields], Group]],
    rule: Rule | None = None,
    key: str = "layer_types",
    layers: int | None = None,
) -> Geometry:
    """Layers that attend and layers with a state; ``states`` reads the state of a layer type.

    Layers of type ``hybrid`` keep both; ``mlp`` and ``moe`` ones nothing.
    """
    count = num_layers(config) if layers is None else layers
    known = (FULL, LOCAL, HYBRID, *NOTHING, *states)
    found = layer_types(config, count, types, known, key)
    attend = {n: FULL if kind == HYBRID else kind for n, kind in enumerate(found)}
    attend = {n: kind for n, kind in attend.items() if kind in (FULL, LOCAL)}
    kept = [*keep_attention(config, attend, count, rule or Rule()), *_states(config, found, states)]
    return Geometry(count, collect(count, kept), config.tokens(*STANDARD.context))


def _states(
    config: Fields, types: tuple[str, ...], states: Mapping[str, Callable[[Fields], Group]]
) -> Iterator[Kept]:
    groups = {kind: states[kind](config) for kind in dict.fromkeys(types) if kind in states}
    for layer, kind in enumerate(types):
        if kind in groups:
            yield layer, "state", groups[kind]


def with_both(read: Callable[[Fields], Group]) -> dict[str, Callable[[Fields], Group]]:
    """States of plain recurrent layers and of hybrid ones, read alike."""
    return {LINEAR: read, HYBRID: read}
