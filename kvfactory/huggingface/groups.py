"""The pieces of a model's groups, as the spec writes them: plain dicts, defaults left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvfactory.spec.layers import layer_set

Group = dict[str, Any]
Kept = tuple[int, str, Group]
"""A layer id, the name of the group it wants to be in, and the group's fields without layers."""

_ORDER = ("full", "swa", "chunked", "cross", "sparse_index", "linear")


def gqa(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> Group:
    """Grouped-query geometry; what equals the spec's default is left out."""
    group: Group = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    if v_head_dim is not None and v_head_dim != head_dim:
        group["v_head_dim"] = v_head_dim
    if scale is not None and abs(scale * head_dim**0.5 - 1) > 1e-12:
        group["scale"] = scale
    return group | _extras(soft_cap, sinks)


def mla(
    q_heads: int, kv_lora_rank: int, qk_rope_head_dim: int, scale: float, *, sinks: bool = False
) -> Group:
    """Latent geometry."""
    group: Group = {
        "geometry": "mla",
        "q_heads": q_heads,
        "kv_lora_rank": kv_lora_rank,
        "qk_rope_head_dim": qk_rope_head_dim,
        "scale": scale,
    }
    return group | _extras(None, sinks)


def _extras(soft_cap: float | None, sinks: bool) -> Group:
    extras: Group = {} if soft_cap is None else {"soft_cap": soft_cap}
    return extras | ({"sinks": True} if sinks else {})


def full(geometry: Group) -> Group:
    """All earlier tokens."""
    return {"kind": "full", **geometry}


def window(tokens: int, geometry: Group) -> Group:
    """The last ``tokens`` keys, the query's own included."""
    return {"kind": "swa", "window_tokens": tokens, **geometry}


def chunked(tokens: int, geometry: Group) -> Group:
    """The keys of the query's own chunk of ``tokens``."""
    return {"kind": "chunked", "chunk_tokens": tokens, **geometry}


def cross(tokens: int, geometry: Group) -> Group:
    """``tokens`` keys of an encoder, all visible to every query."""
    return {"kind": "cross", "encoder_tokens": tokens, "causal": False, **geometry}


def linear(
    recurrence: str,
    *,
    conv: Sequence[tuple[int, int]] = (),
    recurrent: Mapping[str, int] | None = None,
    state_dtype: str = "float32",
) -> Group:
    """A state per request; ``conv`` lists (channels, taps), of which taps - 1 columns are kept."""
    group: Group = {"kind": "linear", "recurrence": recurrence}
    kept = [[channels, taps - 1] for channels, taps in conv if taps > 1]
    if kept:
        group["conv"] = kept
    if recurrent is not None:
        group["recurrent"] = dict(recurrent)
    if state_dtype != "float32":
        group["state_dtype"] = state_dtype
    return group


def index(
    selects: str,
    index_heads: int,
    head_dim: int,
    topk: int,
    *,
    v_head_dim: int = 0,
    block_tokens: int = 1,
    tokens_per_entry: int = 1,
) -> Group:
    """Keys of a sparse indexer over the group ``selects``."""
    group: Group = {
        "kind": "sparse_index",
        "selects": selects,
        "index_heads": index_heads,
        "head_dim": head_dim,
        "topk": topk,
    }
    if v_head_dim:
        group["v_head_dim"] = v_head_dim
    if block_tokens > 1:
        group["block_tokens"] = block_tokens
    if tokens_per_entry > 1:
        group["tokens_per_entry"] = tokens_per_entry
    return group


# ---- from layers to groups -----------------------------------------------------------------


def collect(num_layers: int, kept: Iterable[Kept]) -> dict[str, Group]:
    """One group per distinct (name, fields); a second one of a name is called ``full_2``."""
    layers: dict[tuple[str, str], list[int]] = {}
    fields: dict[tuple[str, str], Group] = {}
    for layer, name, group in kept:
        key = name, repr(sorted(group.items()))
        layers.setdefault(key, []).append(layer)
        fields[key] = group
    order = sorted(layers, key=lambda key: (_ORDER.index(fields[key]["kind"]), layers[key][0]))
    found: dict[str, Group] = {}
    for key in order:
        group = {"kind": fields[key]["kind"], "layers": layer_set(layers[key], num_layers)}
        found[_unused(key[0], found)] = group | fields[key]
    return found


def _unused(name: str, taken: Mapping[str, Group]) -> str:
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
