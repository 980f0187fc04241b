"""Sparse indexers over grouped-query attention: MiniMax-M3 and Qwen4."""

from __future__ import annotations

from kvfactory.huggingface.attention import read_heads
from kvfactory.huggingface.family import Family, Geometry
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.groups import Group, Kept, collect, full, gqa, index
from kvfactory.huggingface.layertypes import (
    BLOCK_SPARSE,
    FULL,
    INDEXED,
    LINEAR,
    layer_types,
    num_layers,
    spaced,
)
from kvfactory.huggingface.state import gated_delta

_OLD_KEYS = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
}


def _full(config: Fields) -> Group:
    heads = read_heads(config)
    return full(gqa(heads.q, heads.kv, heads.dim))


def _minimax_m3(config: Fields) -> Geometry:
    """MiniMax-M3: sparse layers select blocks of tokens by one shared index key head."""
    layers = num_layers(config)
    nested = config.part("sparse_attention_config")
    types = layer_types(config, layers, _m3_types, (FULL, BLOCK_SPARSE))
    group = _full(config)
    kept: list[Kept] = []
    for layer, kind in enumerate(types):
        kept.append((layer, "full" if kind == FULL else "sparse", group))
    if BLOCK_SPARSE in types:
        keys = _m3_index(config, nested)
        kept += [(n, "index", k) for n, k in enumerate(_m3_values(nested, types, keys)) if k]
    return Geometry(layers, collect(layers, kept), config.tokens("max_position_embeddings"))


def _m3_types(config: Fields, layers: int) -> list[str]:
    nested = config.part("sparse_attention_config")
    if not nested.flag("use_sparse_attention", default=True):
        return [FULL] * layers
    listed = _per_layer(nested, "sparse_attention_freq", layers)
    return [BLOCK_SPARSE if on else FULL for on in listed or [0] * layers]


def _per_layer(nested: Fields, key: str, layers: int) -> list[int] | None:
    listed = nested.integers(key)
    if listed is not None and len(listed) != layers:
        nested.wrong(key, f"one entry for each of the {layers} layers", f"{len(listed)} entries")
        return None
    return None if listed is None else list(listed)


def _m3_index(config: Fields, nested: Fields) -> dict[str, int]:
    """The indexer's numbers, from ``sparse_attention_config`` or flat keys."""
    return {
        new: nested.integer(old) if nested.values else config.integer(new)
        for new, old in _OLD_KEYS.items()
    }


def _m3_values(
    nested: Fields, types: tuple[str, ...], numbers: dict[str, int]
) -> list[Group | None]:
    """An index group a sparse layer; with values where they are not disabled."""
    disabled = _per_layer(nested, "sparse_disable_index_value", len(types)) or [1] * len(types)
    plain, valued = (
        index(
            "sparse",
            numbers["index_n_heads"],
            numbers["index_head_dim"],
            numbers["index_topk_blocks"],
            v_head_dim=width,
            block_tokens=numbers["index_block_size"],
        )
        for width in (0, numbers["index_head_dim"])
    )
    sparse = [kind == BLOCK_SPARSE for kind in types]
    return [
        (plain if off else valued) if on else None for on, off in zip(sparse, disabled, strict=True)
    ]


# ---- Qwen4 ---------------------------------------------------------------------------------


def _qwen4(config: Fields) -> Geometry:
    """Qwen4-Exp: gated delta states; attending layers select blocks by mean index keys."""
    layers = num_layers(config)
    rule = spaced(4, INDEXED, LINEAR, key="full_attention_interval")
    types = layer_types(config, layers, rule, (FULL, INDEXED, LINEAR))
    if config.values.get("ple_layer_ids"):
        need = "no per-layer embeddings: their convolution and n-gram states are unknown here"
        config.wrong("ple_layer_ids", need)
    group, state = _full(config), gated_delta(config)
    attending = [layer for layer, kind in enumerate(types) if kind != LINEAR]
    kept: list[Kept] = [(layer, "full", group) for layer in attending]
    if attending:
        keys = _qwen4_index(config)
        kept += [(layer, "index", keys) for layer in attending]
    kept += [(layer, "state", state) for layer, kind in enumerate(types) if kind == LINEAR]
    return Geometry(layers, collect(layers, kept), config.tokens("max_position_embeddings"))


def _qwen4_index(config: Fields) -> Group:
    """One raw key a token; blocks of ``indexer_compress_ratio`` tokens are pooled when read."""
    block, budget = config.integer("indexer_compress_ratio"), config.integer("indexer_budget")
    if budget % block:
        config.clash(["indexer_budget", "indexer_compress_ratio"], "a budget of whole blocks")
    if config.integer("indexer_kv_heads", default=1) != 1:
        config.wrong("indexer_kv_heads", "1: one index key a token")
    return index(
        "full",
        config.integer("indexer_n_heads"),
        config.integer("indexer_head_dim"),
        max(budget // block, 1),
        block_tokens=block,
    )


PLUGINS = (
    Family("minimax_m3", ("minimax_m3", "minimax_m3_vl_text", "minimax_m3_vl"), _minimax_m3),
    Family("qwen4_exp", ("qwen4_exp_text", "qwen4_exp"), _qwen4),
)
