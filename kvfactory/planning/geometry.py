"""From a group of the spec to its logical tensors and to what it computes."""

from __future__ import annotations

from typing import NamedTuple

from kvfactory.planning.cacheplan import Attention, Recurrence, Select
from kvfactory.quant.codec import Logical
from kvfactory.spec import GqaGroup, Group, IndexGroup, LinearGroup, MlaGroup


def logical_tensors(group: Group, dtype: str) -> tuple[Logical, ...]:
    """What a layer of ``group`` keeps per entry, or per request; ``dtype`` is the model's."""
    match group:
        case GqaGroup():
            v_dim = group.head_dim if group.v_head_dim is None else group.v_head_dim
            return _rows(dtype, k=(group.kv_heads, group.head_dim), v=(group.kv_heads, v_dim))
        case MlaGroup():
            return _rows(dtype, latent=(1, group.kv_lora_rank), rope=(1, group.qk_rope_head_dim))
        case IndexGroup():
            return _rows(dtype, index_k=(1, group.head_dim), index_v=(1, group.v_head_dim))
        case LinearGroup():
            return _states(group, dtype)


def work(group: Group) -> Attention | Select | Recurrence:
    """What a layer of ``group`` computes over what it keeps."""
    match group:
        case GqaGroup() | MlaGroup():
            scale = group.scale
            if scale is None:
                assert isinstance(group, GqaGroup)
                scale = group.head_dim**-0.5
            return Attention(
                geometry=group.geometry,
                q_heads=group.q_heads,
                scale=scale,
                soft_cap=group.soft_cap,
                sinks=group.sinks,
                causal=group.causal and group.kind != "cross",
                window_tokens=group.window_tokens,
                chunk_tokens=group.chunk_tokens,
            )
        case IndexGroup():
            return Select(group.selects, group.index_heads, group.topk, group.block_tokens)
        case LinearGroup():
            return Recurrence(group.recurrence, group.conv_window_first)


class Heads(NamedTuple):
    """A recurrent state [heads, key, value] and the heads of its keys, each shared by some."""

    heads: int
    key_heads: int
    key: int
    value: int


def heads_of(group: LinearGroup) -> Heads | None:
    """The heads of ``group``; None where its state has none (Mamba-1, convolutions alone).

    Where the first convolution runs over keys, queries and values (Mamba-2: B, C and x), its
    channels say how many heads the keys have.
    """
    if group.recurrent is None or set(group.recurrent) != {"head", "key", "value"}:
        return None
    heads, key, value = (group.recurrent[axis] for axis in ("head", "key", "value"))
    rest = group.conv[0][0] - heads * value if group.conv else 0
    stacked = rest > 0 and rest % (2 * key) == 0
    return Heads(heads, rest // (2 * key) if stacked else heads, key, value)


def _rows(dtype: str, **shapes: tuple[int, int]) -> tuple[Logical, ...]:
    return tuple(
        Logical(role, role, (("head", heads), ("dim", dim)), dtype)
        for role, (heads, dim) in shapes.items()
        if dim
    )


def _states(group: LinearGroup, dtype: str) -> tuple[Logical, ...]:
    tensors = []
    for number, (channels, taps) in enumerate(group.conv):
        axes = (("channel", channels), ("tap", taps))
        if group.conv_window_first:
            axes = (axes[1], axes[0])
        tensors.append(Logical(f"conv{number}", "state", axes, group.conv_dtype or dtype))
    if group.recurrent is not None:
        axes_of = tuple(group.recurrent.items())
        tensors.append(Logical("recurrent", "state", axes_of, group.state_dtype))
    return tuple(tensors)
