"""Hybrids of attention and Mamba, and pure Mamba models."""

from __future__ import annotations

from kvfactory.huggingface.attention import Heads, Keys, Rule, check_shared, read_kv_heads
from kvfactory.huggingface.families.dense import multiplier
from kvfactory.huggingface.family import Family, Geometry
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.groups import Group, collect
from kvfactory.huggingface.layertypes import FULL, HYBRID, LINEAR, always, num_layers
from kvfactory.huggingface.state import mamba1, mamba2, read_hybrid, with_both

_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}


# ---- Nemotron-H ----------------------------------------------------------------------------


def _nemotron_h(config: Fields) -> Geometry:
    """Nemotron-H and Nemotron-3: ``hybrid_override_pattern`` or ``layers_block_type``."""
    key = config.given(("layers_block_type", "layer_types", "hybrid_override_pattern"))
    types = _spelled(config, key) if key == "hybrid_override_pattern" else config.strings(key)
    if types is None:
        config.wrong(key, "a list of layer types, or hybrid_override_pattern")
    elif config.has("num_hidden_layers") and num_layers(config) != len(types):
        config.clash(["num_hidden_layers", key], f"the {len(types)} layers of {key}")
    found = list(types or [FULL])
    names = ("head_dim", "attention_head_dim")
    rule = Rule(keys=Keys(dim=names))
    if not config.has(config.given(names)):
        config = config.merged({"head_dim": 128})
    listed = "layer_types" if key == "hybrid_override_pattern" else key
    states = {LINEAR: _nemotron_state}
    return read_hybrid(config, lambda *_: found, states, rule, listed, len(found))


def _spelled(config: Fields, key: str) -> list[str]:
    pattern = config.text(key)
    if not pattern or {*pattern} - {*_LETTERS}:
        config.wrong(key, "a letter a layer: M (mamba), * (attention), - (mlp), E (experts)")
        return [FULL]
    return [_LETTERS[letter] for letter in pattern]


def _nemotron_state(config: Fields) -> Group:
    return mamba2(
        config,
        config.integer("mamba_num_heads"),
        config.integer("mamba_head_dim"),
        config.integer("n_groups", "mamba_n_groups", default=8),
        config.integer("ssm_state_size", default=128),
        config.integer("conv_kernel", "mamba_d_conv", default=4),
    )


# ---- the mamba_d_* keys --------------------------------------------------------------------


def _state(config: Fields) -> Group:
    """Bamba, Falcon-H1 and Granite-4: Mamba-2 under ``mamba_n_heads``, ``mamba_d_state`` ..."""
    heads = config.integer("mamba_n_heads")
    inner = config.optional("mamba_d_ssm") or _inner(config)
    if config.values.get("mamba_d_head", "auto") == "auto":
        dim = max(inner // heads, 1)
    else:
        dim = config.integer("mamba_d_head")
    if heads * dim != inner:
        width = config.given(("mamba_d_ssm", "mamba_expand", "hidden_size"))
        config.clash(["mamba_n_heads", width], "heads that fill the inner width")
    return mamba2(
        config,
        heads,
        dim,
        config.integer("mamba_n_groups", default=1),
        config.integer("mamba_d_state"),
        config.integer("mamba_d_conv", default=4),
    )


def _inner(config: Fields, expand: str = "mamba_expand") -> int:
    return config.integer(expand, default=2) * config.integer("hidden_size")


def _bamba(config: Fields) -> Geometry:
    return read_hybrid(config, _indexed_attention, with_both(_state), key="layers_block_type")


def _indexed_attention(config: Fields, layers: int) -> list[str]:
    chosen = {*(config.integers("attn_layer_indices") or ())}
    if chosen and max(chosen) >= layers:
        config.clash(["attn_layer_indices", "num_hidden_layers"], "layers that the model has")
    return [FULL if layer in chosen else LINEAR for layer in range(layers)]


def _falcon_h1(config: Fields) -> Geometry:
    """Every layer attends and keeps a state, side by side."""
    return read_hybrid(config, always(HYBRID), with_both(_state), key="layers_block_type")


def _granite(config: Fields) -> Geometry:
    key = config.given(("layer_types", "layers_block_type"))
    rule = Rule(scale=multiplier)
    return read_hybrid(config, always(LINEAR), with_both(_state), rule, key)


# ---- Zamba ---------------------------------------------------------------------------------


def _doubled(config: Fields) -> Rule:
    """Shared attention over the states and the embeddings, hence heads twice as wide."""
    q = config.integer("num_attention_heads")
    kv = read_kv_heads(config, q)
    check_shared(config, q, kv, "num_attention_heads", "num_key_value_heads")
    wide = 2 * config.integer("hidden_size")
    if wide % q:
        config.clash(["hidden_size", "num_attention_heads"], "heads that divide twice the width")
    heads = Heads(q, kv, config.optional("attention_head_dim") or max(wide // q, 1))
    scale = (heads.dim / 2) ** -0.5
    return Rule(heads=lambda *_: heads, scale=lambda *_: scale)


def _zamba2(config: Fields) -> Geometry:
    states = with_both(_zamba2_state)
    return read_hybrid(config, _zamba2_types, states, _doubled(config), "layers_block_type")


def _zamba2_types(config: Fields, layers: int) -> list[str]:
    listed = config.integers("hybrid_layer_ids")
    if listed is None:
        config.wrong("layers_block_type", "a list of mamba and hybrid, or hybrid_layer_ids")
    chosen = {*(listed or ())}
    if chosen and max(chosen) >= layers:
        config.clash(["hybrid_layer_ids", "num_hidden_layers"], "layers that the model has")
    return [HYBRID if layer in chosen else LINEAR for layer in range(layers)]


def _zamba2_state(config: Fields) -> Group:
    heads, inner = config.integer("n_mamba_heads"), _inner(config)
    if inner % heads:
        config.clash(["n_mamba_heads", "hidden_size"], "heads that divide the inner width")
    groups = config.integer("mamba_ngroups", default=1)
    state, taps = config.integer("mamba_d_state"), config.integer("mamba_d_conv", default=4)
    return mamba2(config, heads, max(inner // heads, 1), groups, state, taps)


def _zamba(config: Fields) -> Geometry:
    states = with_both(_jamba_state)
    return read_hybrid(config, _zamba_types, states, _doubled(config), "layers_block_type")


def _zamba_types(config: Fields, layers: int) -> list[str]:
    period = config.integer("attn_layer_period", default=6)
    offset = config.integer("attn_layer_offset", default=4, least=0)
    rest = [HYBRID if n % period == offset else LINEAR for n in range(max(layers - 3, 0))]
    return [LINEAR, LINEAR, HYBRID, *rest][:layers]


# ---- Mamba-1, and pure models --------------------------------------------------------------


def _jamba(config: Fields) -> Geometry:
    return read_hybrid(config, _jamba_types, with_both(_jamba_state), key="layers_block_type")


def _jamba_types(config: Fields, layers: int) -> list[str]:
    period = config.integer("attn_layer_period", default=8)
    offset = config.integer("attn_layer_offset", default=4, least=0)
    if offset >= period:
        config.clash(["attn_layer_offset", "attn_layer_period"], "an offset below the period")
    return [FULL if layer % period == offset else LINEAR for layer in range(layers)]


def _jamba_state(config: Fields) -> Group:
    state, taps = config.integer("mamba_d_state"), config.integer("mamba_d_conv", default=4)
    return mamba1(config, _inner(config), state, taps)


def _mamba(config: Fields) -> Geometry:
    inner = config.optional("intermediate_size") or _inner(config, "expand")
    state, taps = config.integer("state_size"), config.integer("conv_kernel", default=4)
    return _pure(config, mamba1(config, inner, state, taps))


def _mamba2(config: Fields) -> Geometry:
    heads, dim = config.integer("num_heads"), config.integer("head_dim")
    if heads * dim != _inner(config, "expand"):
        config.clash(["num_heads", "hidden_size"], "heads that fill expand x hidden_size")
    groups, state = config.integer("n_groups", default=8), config.integer("state_size")
    return _pure(
        config, mamba2(config, heads, dim, groups, state, config.integer("conv_kernel", default=4))
    )


def _pure(config: Fields, state: Group) -> Geometry:
    layers = num_layers(config)
    return Geometry(layers, collect(layers, ((layer, "state", state) for layer in range(layers))))


PLUGINS = (
    Family("nemotron_h", ("nemotron_h",), _nemotron_h),
    Family("bamba", ("bamba",), _bamba),
    Family("falcon_h1", ("falcon_h1",), _falcon_h1),
    Family("granite_hybrid", ("granitemoehybrid",), _granite),
    Family("zamba2", ("zamba2",), _zamba2),
    Family("zamba", ("zamba",), _zamba),
    Family("jamba", ("jamba",), _jamba),
    Family("mamba", ("mamba", "falcon_mamba"), _mamba),
    Family("mamba2", ("mamba2",), _mamba2),
)
