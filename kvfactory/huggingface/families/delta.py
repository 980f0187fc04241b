"""Hybrids of attention and linear attention: gated delta rules, lightning, short convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from kvfactory.huggingface.attention import Keys, read_head_dim
from kvfactory.huggingface.family import Family, Geometry
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.groups import Group, Kept, collect, linear
from kvfactory.huggingface.latent import indexed_layers, read_index, read_latent
from kvfactory.huggingface.layertypes import (
    CONV,
    FULL,
    INDEXED,
    LINEAR,
    LOCAL,
    TypesRule,
    layer_types,
    num_layers,
    spaced,
)
from kvfactory.huggingface.state import gated_delta, kimi_delta, lightning, read_hybrid

_INTERVAL = spaced(4, common=LINEAR, key="full_attention_interval")


def _gated_delta(config: Fields) -> Geometry:
    return read_hybrid(config, _INTERVAL, {LINEAR: gated_delta})


def _olmo_hybrid(config: Fields) -> Geometry:
    """OLMo-Hybrid derives the linear heads from the attention's where it does not state them."""
    heads = config.integer("num_attention_heads")
    key_heads = config.integer("linear_num_key_heads", default=heads)
    derived = max(config.integer("hidden_size") * 3 // (4 * key_heads), 1)
    key = config.integer("linear_key_head_dim", default=derived)
    stated = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": config.integer("linear_num_value_heads", default=heads),
        "linear_key_head_dim": key,
        "linear_value_head_dim": config.integer("linear_value_head_dim", default=2 * key),
    }
    return read_hybrid(config.merged(stated), spaced(4, common=LINEAR), {LINEAR: gated_delta})


def _lara(config: Fields, layers: int) -> list[str]:
    period = (LINEAR, LOCAL, LINEAR, FULL, LOCAL)
    return [period[layer % len(period)] for layer in range(layers)]


def _lara_mini(config: Fields) -> Geometry:
    return read_hybrid(config, _lara, {LINEAR: gated_delta})


# ---- Kimi Delta Attention with latents -----------------------------------------------------


def _kimi(config: Fields) -> Geometry:
    """Kimi-Linear and K3: latents without rotary embedding; the hub counts layers from 1."""
    nested = config.part("linear_attn_config")
    layers = num_layers(config)
    types = _counted_from_one(nested, layers) or layer_types(
        config, layers, _kimi_default, (FULL, LINEAR)
    )
    state = kimi_delta(config, *_delta_sizes(config, nested))
    latent = read_latent(config, rope_scaled=False)
    return _latents_and_states(config, types, latent, state)


def _delta_sizes(config: Fields, nested: Fields) -> tuple[int, int, int]:
    """Heads, width and taps, from ``linear_attn_config`` or flat keys."""
    if nested.values:
        return (
            nested.integer("num_heads"),
            nested.integer("head_dim"),
            nested.integer("short_conv_kernel_size", default=4),
        )
    return (
        config.integer("linear_num_heads"),
        config.integer("linear_head_dim"),
        config.integer("linear_conv_kernel_dim", default=4),
    )


def _counted_from_one(nested: Fields, layers: int) -> tuple[str, ...] | None:
    attending, recurrent = nested.integers("full_attn_layers"), nested.integers("kda_layers")
    if attending is None or recurrent is None:
        return None
    if sorted((*attending, *recurrent)) != list(range(1, layers + 1)):
        need = f"each of the layers 1 to {layers} once, in full_attn_layers or in kda_layers"
        nested.wrong("full_attn_layers", need, "layers missing, twice or beyond the end")
    chosen = {*attending}
    return tuple(FULL if layer + 1 in chosen else LINEAR for layer in range(layers))


def _kimi_default(config: Fields, layers: int) -> list[str]:
    return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(layers)]


def _latents_and_states(
    config: Fields, types: tuple[str, ...], latent: Group, state: Group
) -> Geometry:
    kept: list[Kept] = [(n, "latent", latent) for n, kind in enumerate(types) if kind != LINEAR]
    kept += [(n, "state", state) for n, kind in enumerate(types) if kind == LINEAR]
    context = config.tokens("max_position_embeddings", "model_max_length")
    return Geometry(len(types), collect(len(types), kept), context)


def _bailing(config: Fields) -> Geometry:
    """Ring hybrids: latents at the last layer of a group; delta rule, or lightning in Ring-2.5."""
    layers = num_layers(config)
    rule = spaced(6, common=LINEAR, key="layer_group_size")
    types = layer_types(config, layers, rule, (FULL, LINEAR))
    heads, dim = config.integer("num_attention_heads"), _linear_dim(config)
    if config.has("group_norm_size") and not config.has("short_conv_kernel_size"):
        state = lightning(config, heads, dim)
    else:
        state = kimi_delta(config, heads, dim, config.integer("short_conv_kernel_size", default=4))
    return _latents_and_states(config, types, read_latent(config), state)


def _linear_dim(config: Fields) -> int:
    keys = Keys(dim=("linear_head_dim",) if config.has("linear_head_dim") else ("head_dim",))
    return read_head_dim(config, config.integer("num_attention_heads"), keys)


def _glm5_next(config: Fields) -> Geometry:
    """GLM-5-Next: latents without rope part, pooled index keys, delta-rule states."""
    layers = num_layers(config)
    types = layer_types(config, layers, spaced(4, INDEXED, LINEAR), (INDEXED, FULL, LINEAR))
    attending = [layer for layer, kind in enumerate(types) if kind != LINEAR]
    indexers = {*indexed_layers(config, layers)}
    latent, keys = read_latent(config, rope_scaled=False), read_index(config)
    state = kimi_delta(config, *_delta_sizes(config, config.part("linear_attn_config")))
    kept = [(layer, "latent", latent) for layer in attending]
    kept += [(layer, "index", keys) for layer in attending if layer in indexers]
    kept += [(layer, "state", state) for layer, kind in enumerate(types) if kind == LINEAR]
    return Geometry(layers, collect(layers, kept), config.tokens("max_position_embeddings"))


# ---- lightning attention -------------------------------------------------------------------


def _minimax(config: Fields) -> Geometry:
    """MiniMax-Text-01 and M1: ``attn_type_list`` has 1 for softmax attention, 0 for lightning."""
    heads = config.integer("num_attention_heads")
    state = lightning(config, heads, read_head_dim(config, heads))
    return read_hybrid(config, _minimax_types, {LINEAR: lambda _: state})


def _minimax_types(config: Fields, layers: int) -> list[str]:
    listed = config.integers("attn_type_list")
    if listed is None:
        return [LINEAR if layer % 2 else FULL for layer in range(layers)]
    if len(listed) != layers:
        config.clash(["attn_type_list", "num_hidden_layers"], "one entry a layer")
    return [FULL if kind else LINEAR for kind in (*listed, *[1] * layers)][:layers]


def _bailing_linear(config: Fields) -> Geometry:
    """Ring-linear: grouped-query attention at the last layer of a group, lightning elsewhere."""
    heads = config.integer("num_attention_heads")
    state = lightning(config, heads, read_head_dim(config, heads))
    config.integer("layer_group_size")
    rule = spaced(1, common=LINEAR, key="layer_group_size", last=False)
    return read_hybrid(config, rule, {LINEAR: lambda _: state})


# ---- short convolutions --------------------------------------------------------------------


def _convolution(config: Fields) -> Group:
    taps = config.integer("conv_L_cache", default=3)
    if taps < 2:
        config.wrong("conv_L_cache", "at least 2 taps, for a window to keep")
    return linear("none", conv=[(config.integer("hidden_size"), max(taps, 2))])


def _lfm(config: Fields, rule: TypesRule) -> Geometry:
    return read_hybrid(config, rule, {CONV: _convolution})


def _listed_attention(config: Fields, layers: int) -> list[str]:
    listed = config.integers("full_attn_idxs")
    if listed is None:
        config.wrong("layer_types", "a list of conv and full_attention, or full_attn_idxs")
    chosen = {*(listed or ())}
    if chosen and max(chosen) >= layers:
        config.clash(["full_attn_idxs", "num_hidden_layers"], "layers that the model has")
    return [FULL if layer in chosen else CONV for layer in range(layers)]


def _lfm3(config: Fields, layers: int) -> list[str]:
    kinds = {2: FULL, 0: LOCAL}
    return [kinds.get(n % 4, CONV) if n else CONV for n in range(layers)]


def _same(names: str, **values: object) -> Mapping[str, Mapping[str, object]]:
    return dict.fromkeys(names.split(), values)


_GDN = """qwen3_next qwen3_5_text qwen3_5_moe_text qwen3_5 qwen3_5_moe"""

PLUGINS = (
    Family("gated_delta", tuple(_GDN.split()), _gated_delta),
    Family("olmo_hybrid", ("olmo_hybrid",), _olmo_hybrid),
    Family(
        "lara_mini",
        ("lara_mini",),
        _lara_mini,
        _same("lara_mini", sliding_window=512),
    ),
    Family("kimi_linear", ("kimi_linear", "kimi_k3"), _kimi),
    Family("bailing_hybrid", ("bailing_hybrid",), _bailing),
    Family(
        "glm5_next",
        ("glm5_next_text", "glm5_next"),
        _glm5_next,
        _same("glm5_next_text glm5_next", index_kpool=16),
    ),
    Family("minimax", ("minimax", "minimax_text_01", "minimax_m1"), _minimax),
    Family("bailing_linear", ("bailing_moe_linear",), _bailing_linear),
    Family("lfm2", ("lfm2", "lfm2_moe"), partial(_lfm, rule=_listed_attention)),
    Family(
        "lfm3",
        ("lfm3",),
        partial(_lfm, rule=_lfm3),
        _same("lfm3", conv_L_cache=7, sliding_window=256),
    ),
)
