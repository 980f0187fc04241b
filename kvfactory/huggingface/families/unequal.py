"""Models whose layers differ in heads or widths: MiMo, Step, Llama-4, OpenELM, pruned Nemotrons."""

from __future__ import annotations

from kvfactory.huggingface.attention import (
    Heads,
    Rule,
    check_shared,
    read_attention,
    read_head_dim,
    read_heads,
    read_kv_heads,
)
from kvfactory.huggingface.family import Family, Geometry
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.groups import Kept, collect, full, gqa
from kvfactory.huggingface.layertypes import CHUNKED, FULL, LOCAL, num_layers

# ---- MiMo ----------------------------------------------------------------------------------


def _mimo(config: Fields) -> Geometry:
    """MiMo-V2: windowed layers have kv heads, widths and sinks of their own."""
    rule = Rule(_mimo_types, heads=_mimo_heads, sinks=_mimo_sinks, window=_mimo_window)
    return read_attention(config, rule)


def _mimo_types(config: Fields, layers: int) -> list[str]:
    listed = config.integers("hybrid_layer_pattern")
    if listed is None:
        return [FULL if layer == 0 or (layer + 1) % 6 == 0 else LOCAL for layer in range(layers)]
    if len(listed) != layers:
        config.clash(["hybrid_layer_pattern", "num_hidden_layers"], "one entry a layer")
    return [LOCAL if kind else FULL for kind in (*listed, *[0] * layers)][:layers]


def _mimo_heads(config: Fields, kind: str) -> Heads:
    heads = read_heads(config)
    v_dim = config.integer("v_head_dim", default=heads.dim)
    if kind != LOCAL:
        return Heads(heads.q, heads.kv, heads.dim, v_dim)
    q = config.integer("swa_num_attention_heads", default=heads.q)
    kv = config.integer("swa_num_key_value_heads", default=2 * heads.kv)
    check_shared(config, q, kv, "swa_num_attention_heads", "swa_num_key_value_heads")
    dim = config.integer("swa_head_dim", default=heads.dim)
    return Heads(q, kv, dim, config.integer("swa_v_head_dim", default=v_dim))


def _mimo_sinks(config: Fields, kind: str) -> bool:
    if kind == LOCAL:
        return config.flag("add_swa_attention_sink_bias", default=True)
    return config.flag("add_full_attention_sink_bias")


def _mimo_window(config: Fields) -> int:
    """The hub's window, beside a ``hybrid_layer_pattern`` or as ``sliding_window_size``, leaves
    the query out; that of transformers counts it.
    """
    tokens = config.tokens("sliding_window_size", "sliding_window")
    if tokens is None:
        config.wrong("sliding_window", "a number of tokens, for windowed layers")
        return 1
    hub = config.has("hybrid_layer_pattern") or config.has("sliding_window_size")
    return tokens + 1 if hub else tokens


# ---- Step ----------------------------------------------------------------------------------


def _step(config: Fields) -> Geometry:
    """Step-3.5 and 3.7: windowed layers may have more query heads."""
    rule = Rule(heads=_step_heads, scale=_step_scale)
    return read_attention(config, rule)


def _step_heads(config: Fields, kind: str) -> Heads:
    q = config.integer("num_attention_heads")
    names = ("num_attention_groups", "num_key_value_heads")
    kv = read_kv_heads(config, q, names)
    dim = read_head_dim(config, q)
    other = config.part("attention_other_setting")
    if kind == LOCAL and not config.has("per_layer_config"):
        stated = config.optional("num_sliding_attention_heads")
        q = stated or other.integer("num_attention_heads", default=q)
        kv = other.integer(*names, default=kv)
        dim = other.integer("head_dim", default=dim)
    check_shared(config, q, kv, "num_attention_heads", config.given(names))
    return Heads(q, kv, dim)


def _step_scale(config: Fields, heads: Heads) -> float | None:
    key = "query_pre_attn_scalar"
    return config.number(key) ** -0.5 if config.has(key) else None


# ---- Llama-4 -------------------------------------------------------------------------------


def _llama4_types(config: Fields, layers: int) -> list[str]:
    """Layers with rotary embedding see their own chunk, the others everything."""
    step = config.integer("no_rope_layer_interval", default=4)
    rotary = config.integers("no_rope_layers") or [int((n + 1) % step != 0) for n in range(layers)]
    if len(rotary) < layers:
        config.clash(["no_rope_layers", "num_hidden_layers"], "one entry a layer")
        rotary = [*rotary, *[0] * layers]
    chunks = config.has("attention_chunk_size")
    return [CHUNKED if chunks and rotary[layer] else FULL for layer in range(layers)]


def _llama4(config: Fields) -> Geometry:
    return read_attention(config, Rule(_llama4_types))


# ---- one geometry a layer ------------------------------------------------------------------


def _openelm(config: Fields) -> Geometry:
    """OpenELM grows its heads from layer to layer."""
    layers, dim = num_layers(config, "num_transformer_layers"), config.integer("head_dim")
    q = config.integers("num_query_heads") or ()
    kv = config.integers("num_kv_heads") or ()
    for key, values in (("num_query_heads", q), ("num_kv_heads", kv)):
        if len(values) != layers or 0 in values:
            config.wrong(key, f"a number of heads for each of the {layers} layers")
    pairs = list(zip(q, kv, strict=False))[:layers]
    if any(heads % max(shared, 1) for heads, shared in pairs):
        config.clash(["num_query_heads", "num_kv_heads"], "query heads a multiple of kv heads")
    kept = [(n, "full", full(gqa(heads, shared, dim))) for n, (heads, shared) in enumerate(pairs)]
    return Geometry(layers, collect(layers, kept), config.tokens("max_context_length"))


def _deci(config: Fields) -> Geometry:
    """DeciLM and pruned Nemotrons: ``block_configs`` thin heads out, or leave attention out."""
    layers, q = num_layers(config), config.integer("num_attention_heads")
    dim = read_head_dim(config, q)
    kept: list[Kept] = []
    for layer, kv in enumerate(_deci_kv_heads(config, layers, q)):
        if kv:
            kept.append((layer, "full", full(gqa(q, kv, dim))))
    return Geometry(layers, collect(layers, kept), config.tokens("max_position_embeddings"))


def _deci_kv_heads(config: Fields, layers: int, q: int) -> list[int]:
    """KV heads a layer, 0 where there is no attention."""
    key = config.given(("block_configs", "num_key_value_heads_per_layer"))
    blocks, flat = config.objects("block_configs"), config.integers("num_key_value_heads_per_layer")
    if blocks is None and flat is None:
        config.wrong(key, "a list with an entry for each layer")
        return [1] * layers
    found = list(flat or ()) if blocks is None else [_block_kv_heads(b, q) for b in blocks]
    if len(found) != layers:
        config.clash([key, "num_hidden_layers"], "one entry a layer")
    if any(kv and q % kv for kv in found):
        config.clash([key, "num_attention_heads"], "query heads a multiple of kv heads")
    return found[:layers]


def _block_kv_heads(block: Fields, q: int) -> int:
    attention = block.part("attention")
    if not attention.values or attention.flag("no_op") or attention.flag("replace_with_linear"):
        return 0
    for key in ("window_length", "num_sink_tokens", "mamba", "llama4"):
        if attention.values.get(key):
            attention.wrong(key, "attention over all tokens: the mapping knows no such block")
    stated = attention.optional("num_key_value_heads")
    group = attention.integer("n_heads_in_group", default=max(q // stated, 1) if stated else None)
    return stated or max(q // group, 1)


_LLAMA4 = {
    "num_hidden_layers": 48,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "attention_chunk_size": 8192,
}

PLUGINS = (
    Family("mimo", ("mimo_v2_flash",), _mimo, {"mimo_v2_flash": {"v_head_dim": 128}}),
    Family("step3p5", ("step3p5", "step3p7", "step3p5_text"), _step),
    Family(
        "llama4",
        ("llama4_text", "llama4"),
        _llama4,
        dict.fromkeys(("llama4_text", "llama4"), _LLAMA4),
    ),
    Family("openelm", ("openelm",), _openelm),
    Family("deci", ("deci", "nemotron-nas"), _deci),
)
