"""Transfers between unequal tensor-parallel sizes: every rank gets its heads and channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool_cells import GQA
from torch import Tensor

from kvfactory.errors import SpecError
from kvfactory.planner import plan
from kvfactory.pools import Pool, Region, Slicing, copies
from kvfactory.spec import Spec

SCALED = {"k": "int8_token_head", "v": "mxfp8"}


def make(group: dict[str, Any], layout: str, quant: dict[str, str] | None = None) -> Pool:
    granularity = "state" if group["kind"] == "linear" else "tokens"
    laid = plan(
        Spec.parse(
            {
                "model": {"name": "m", "num_layers": 4, "groups": {"main": group}},
                "kv": {
                    "page_tokens": 32,
                    "layout": {granularity: layout},
                    "quant": quant or {},
                },
                "workload": {"requests": 3, "tokens": 32},
                "engine": {"prefill_chunk_tokens": 1},
            }
        )
    )
    return Pool(laid.groups[0], torch.zeros(laid.bytes, dtype=torch.uint8))


def gqa(heads: int) -> dict[str, Any]:
    return GQA | {"q_heads": heads, "kv_heads": heads, "head_dim": 64, "v_head_dim": 32}


def send(src: Pool, dst: Pool, sent: tuple[Region, ...], got: tuple[Region, ...]) -> None:
    assert len(sent) == len(got)
    assert [(a.num_bytes, a.planes, a.layers) for a in sent] == [
        (b.num_bytes, b.planes, b.layers) for b in got
    ]
    for a, b, size in copies(sent, got):
        dst.bound.arena[b : b + size] = src.bound.arena[a : a + size]


def share(x: Tensor, dim: int, blocks: tuple[int, ...], part: int, parts: int) -> Tensor:
    """A rank's share of every block along ``dim``, in plain torch."""
    return torch.cat([piece.chunk(parts, dim)[part] for piece in x.split(blocks, dim)], dim)


LAYOUTS = ["nhd", "hnd", "paged_kv", "page_major", "token_major", "record", "vectorized"]


@pytest.mark.parametrize("layout", [*LAYOUTS, "page head plane layer slot ..."])
@pytest.mark.parametrize("parts", [2, 4])
def test_heads_go_to_their_ranks_and_come_back(layout: str, parts: int) -> None:
    full, slots = make(gqa(4), layout, SCALED), torch.arange(32, 64)
    rows = {"k": torch.randn(32, 4, 64), "v": torch.randn(32, 4, 32)}
    for layer in (0, 1):
        full.write(layer, slots, **{name: x + layer for name, x in rows.items()})
    back = make(gqa(4), layout, SCALED)
    for part in range(parts):
        rank = make(gqa(4 // parts), layout, SCALED)
        send(full, rank, full.slice_regions([1], part, parts), rank.slice_regions([2], 0, 1))
        for layer in (0, 1):
            whole, ours = full.read(layer, slots), rank.read(layer, slots + 32)
            for name, x in ours.items():
                wanted = share(whole[name], 1, (4,), part, parts)
                assert wanted.any()
                assert torch.equal(x, wanted)
        send(rank, back, rank.slice_regions([2], 0, 1), back.slice_regions([3], part, parts))
    for layer in (0, 1):
        again, whole = back.read(layer, slots + 64), full.read(layer, slots)
        assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_four_ranks_to_two() -> None:
    """Rank 3 of 4 is the second half of what rank 1 of 2 holds."""
    src, dst, slots = make(gqa(1), "nhd"), make(gqa(2), "nhd"), torch.arange(32, 64)
    rows = {"k": torch.randn(32, 1, 64), "v": torch.randn(32, 1, 32)}
    src.write(1, slots, **rows)
    send(src, dst, src.slice_regions([1], 0, 1), dst.slice_regions([1], 3 - 2 * 1, 2))
    found = dst.read(1, slots)
    assert torch.equal(found["k"][:, 1:], rows["k"].bfloat16())
    assert not found["k"][:, :1].any()


def state(rule: str, heads: int, window_first: bool = False) -> dict[str, Any]:
    """Two key heads for every four value heads in gdn; a group of B and C in mamba2."""
    inner = heads * 8
    shapes = {
        "mamba1": ([[inner, 3]], {"channel": inner, "state": 4}),
        "mamba2": ([[inner + 2 * heads * 2, 3]], {"head": heads, "value": 8, "key": 4}),
        "gdn": ([[inner + 2 * heads * 2, 3]], {"head": heads, "key": 4, "value": 8}),
        "kda": ([[3 * inner, 3]], {"head": heads, "key": 8, "value": 8}),
    }
    conv, recurrent = shapes[rule]
    group = {"kind": "linear", "layers": [0, 2], "recurrence": rule, "conv": conv}
    return group | {"recurrent": recurrent, "conv_window_first": window_first}


BLOCKS = {
    "mamba1": (32,),
    "mamba2": (32, 8, 8),
    "gdn": (8, 8, 32),
    "kda": (32, 32, 32),
}


@pytest.mark.parametrize("layout", ["state_split", "slot_major"])
@pytest.mark.parametrize("window_first", [False, True])
@pytest.mark.parametrize("rule", BLOCKS)
def test_states_are_shared_by_head_and_windows_by_block(
    rule: str, window_first: bool, layout: str
) -> None:
    full = make(state(rule, 4, window_first), layout)
    slots = torch.tensor([1, 2])
    conv, recurrent = full.group.tensor("conv0").logical, full.group.tensor("recurrent").logical
    rows = {t.name: torch.randn(2, *(n for _, n in t.axes)) for t in (conv, recurrent)}
    full.write(1, slots, **rows)
    dim = 2 if window_first else 1
    for part in range(2):
        rank = make(state(rule, 2, window_first), layout)
        send(full, rank, full.slice_regions([1, 2], part, 2), rank.slice_regions([3, 1], 0, 1))
        found = rank.read(1, torch.tensor([3, 1]), torch.float32)
        wanted = share(rows["conv0"].bfloat16().float(), dim, BLOCKS[rule], part, 2)
        assert torch.equal(found["conv0"], wanted)
        assert torch.equal(found["recurrent"], rows["recurrent"].chunk(2, 1)[part])


def test_what_a_record_says() -> None:
    pool = make(state("gdn", 4, window_first=True), "state_split")
    assert pool.slicings() == (
        Slicing("conv0", "channel", (8, 8, 32), 3, (2, 2, 4)),
        Slicing("recurrent", "head", (4,), 1, (4,)),
    )
    assert make(gqa(4), "nhd").slicings()[0] == Slicing("k", "head", (4,), 32, (4,))
    assert make(gqa(4), "hnd").slicings()[0] == Slicing("k", "head", (4,), 1, (4,))


@pytest.mark.parametrize("layout", ["state_split", "slot_major"])
def test_ranks_beyond_the_key_heads_share_them(layout: str) -> None:
    """Eight value heads and two groups of B and C on four ranks: two ranks have the same group."""
    shapes = {"recurrence": "mamba2", "kind": "linear", "layers": [0]}
    whole = {"conv": [[8 * 8 + 2 * 2 * 4, 3]], "recurrent": {"head": 8, "value": 8, "key": 4}}
    mine = {"conv": [[2 * 8 + 2 * 4, 3]], "recurrent": {"head": 2, "value": 8, "key": 4}}
    full, slots = make({**shapes, **whole}, layout), torch.tensor([1])
    x = {"conv0": torch.randn(1, 80, 3), "recurrent": torch.randn(1, 8, 8, 4)}
    full.write(0, slots, **x)
    for part in range(4):
        rank = make({**shapes, **mine}, layout)
        send(full, rank, full.slice_regions([1], part, 4), rank.slice_regions([1], 0, 1))
        values, b, c = x["conv0"].bfloat16().split((64, 8, 8), 1)
        group = slice(4 * (part // 2), 4 * (part // 2) + 4)
        wanted = torch.cat([values.chunk(4, 1)[part], b[:, group], c[:, group]], 1)
        found = rank.read(0, slots, torch.float32)
        assert torch.equal(found["conv0"], wanted.float())
        assert torch.equal(found["recurrent"], x["recurrent"].chunk(4, 1)[part])


def test_key_and_value_heads_beyond_the_ranks_are_replicated() -> None:
    full, slots = make(gqa(2), "hnd"), torch.arange(32, 64)
    full.write(0, slots, k=torch.randn(32, 2, 64), v=torch.randn(32, 2, 32))
    for part in range(4):
        rank = make(gqa(1), "hnd")
        send(full, rank, full.slice_regions([1], part, 4), rank.slice_regions([1], 0, 1))
        assert torch.equal(rank.read(0, slots)["k"][:, 0], full.read(0, slots)["k"][:, part // 2])


def test_latents_are_replicated() -> None:
    mla = GQA | {"geometry": "mla", "q_heads": 8, "kv_lora_rank": 128, "scale": 1.0}
    pool = make(mla | {"qk_rope_head_dim": 64}, "record")
    assert pool.slice_regions([1], 0, 2) == pool.slice_regions([1], 1, 2)
    assert sum(run.num_bytes for run in pool.slice_regions([1], 0, 2)) == 2 * 32 * 192 * 2


@pytest.mark.parametrize(("part", "parts", "path"), [(0, 3, "head of k"), (2, 2, "part")])
def test_shares_that_do_not_exist(part: int, parts: int, path: str) -> None:
    with pytest.raises(SpecError) as caught:
        make(gqa(4), "nhd").slice_regions([1], part, parts)
    assert caught.value.problems[0].path == path


def test_a_layout_that_splits_heads_cannot_share_them() -> None:
    pool = make(gqa(4), "plane layer page head/2 slot head%2 dim")
    with pytest.raises(SpecError, match="keeps head whole"):
        pool.slicings()
