"""Where bytes lie: views, arenas inside other buffers, entries of many tokens, wide addresses."""

from __future__ import annotations

import pytest
import torch
from pool_cells import GQA, Bench, Cell

from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.pools import Pool
from kvfactory.spec import Spec

TWO = (("k", "nvfp4"), ("v", "int4_g32"))


def make(laid: CachePlan) -> Pool:
    return Pool(laid.groups[0], torch.zeros(laid.bytes, dtype=torch.uint8))


def test_views_are_the_pool() -> None:
    pool = make(Cell("dim128", TWO, "vectorized").plan())
    given = {name: torch.randn(64, 2, 128) for name in ("k", "v")}
    pool.write(1, torch.arange(64), **given)
    views = pool.views(1)
    assert views["k"].shape == (4, 16, 2, 4, 16)
    assert views["v"].shape == (4, 1, 16, 2, 64)
    assert views["k.scale"].dtype == torch.float8_e4m3fn
    codes = pool.gather(torch.tensor([3 * 16 + 5]), 1)
    assert torch.equal(views["k"][3, 5].reshape(2, 64), codes["k"][0])
    views["v"][3, 0, 5] = 7
    assert pool.gather(torch.tensor([53]), 1)["v"].eq(7).all()


def test_an_arena_inside_a_larger_buffer() -> None:
    laid = Cell("dim128", TWO, "record").plan()
    buffer = torch.zeros(laid.bytes + 512, dtype=torch.uint8)
    inside = Pool(laid.groups[0], buffer[256 : 256 + laid.bytes])
    inside.move_pages([1], [2])
    inside.write(0, torch.tensor([17]), k=torch.ones(1, 2, 128), v=torch.ones(1, 2, 128))
    assert not buffer[:256].any()
    assert not buffer[-256:].any()
    assert inside.read(0, torch.tensor([17]))["v"].eq(1).all()


def test_reads_of_latent_and_rope_apart_in_a_chosen_type() -> None:
    laid = Cell("mla512_64", (("latent", "fp8_tile128"), ("rope", "plain")), "record").plan()
    pool, slots = make(laid), torch.tensor([[20, 21], [33, 16]])
    latent, rope = torch.randn(2, 2, 1, 512), torch.randn(2, 2, 1, 64)
    pool.write(0, slots, latent=latent, rope=rope)
    found = pool.read(0, slots, torch.float32, names=("rope",))
    assert list(found) == ["rope"]
    assert torch.equal(found["rope"], rope.bfloat16().float())
    assert pool.read(0, slots, names=["latent"])["latent"].dtype == torch.bfloat16
    error = (pool.read(0, slots, torch.float32)["latent"] - latent).norm() / latent.norm()
    assert error < 0.03


def test_entries_of_several_tokens_are_entries_to_a_pool() -> None:
    main = GQA | {"q_heads": 1, "kv_heads": 1, "head_dim": 64, "tokens_per_entry": 4}
    laid = plan(
        Spec.parse(
            {
                "model": {"name": "m", "num_layers": 4, "groups": {"main": main}},
                "kv": {"page_tokens": 64},
                "workload": {"requests": 1, "tokens": 128},
                "engine": {"prefill_chunk_tokens": 1},
            }
        )
    )
    pool = make(laid)
    assert pool.num_slots == 3 * 16
    assert pool.views(0)["k"].shape == (3, 16, 1, 64)
    Bench(laid, laid.groups[0]).moves()


# ---- width ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nhd", "page_major", "record"])
def test_addresses_beyond_two_to_the_31(layout: str) -> None:
    """2.3 GB of fp8 records, addressed at both ends; untouched memory costs nothing."""
    mla = {"kind": "full", "geometry": "mla", "layers": "0-1", "q_heads": 1, "scale": 1.0}
    mla |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    laid = plan(
        Spec.parse(
            {
                "model": {"name": "m", "num_layers": 2, "groups": {"main": mla}},
                "kv": {
                    "page_tokens": 64,
                    "quant": {"latent": "fp8_tile128"},
                    "layout": {"tokens": layout},
                },
                "workload": {"requests": 1, "tokens": 1_800_000},
                "engine": {"prefill_chunk_tokens": 1},
            }
        )
    )
    assert laid.bytes > 2**31
    pool = Pool(laid.groups[0], torch.empty(laid.bytes, dtype=torch.uint8))
    last = pool.num_slots - 1
    slots = torch.tensor([64, last])
    latent, rope = torch.randn(2, 1, 512), torch.randn(2, 1, 64).bfloat16()
    pool.write(1, slots, latent=latent, rope=rope)
    assert torch.equal(pool.read(1, slots)["rope"], rope)
    pool.move(torch.tensor([64, last]), torch.tensor([last, 64]))
    assert torch.equal(pool.read(1, slots)["rope"], rope.flip(0))
    end = max(run.offset + run.num_bytes for run in pool.transfer_regions([pool.num_pages - 1]))
    assert 2**31 < end <= laid.bytes
