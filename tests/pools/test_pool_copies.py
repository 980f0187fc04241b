"""Planes that other software forgets: scales, states, indexes; and what transfers must agree on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pool_cells import GQA, INDEX, INDEXES, STATES, Cell
from torch import Tensor

from kvfactory.errors import SpecError
from kvfactory.layouts import LAYOUTS
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.pools import Manifest, Pool, copies
from kvfactory.spec import Spec

TWO = (("k", "nvfp4"), ("v", "int4_g32"))
SCALED = ("k", "k.scale", "v", "v.scale", "v.zero")


def make(laid: CachePlan, group: int = 0) -> Pool:
    return Pool(laid.groups[group], torch.zeros(laid.bytes, dtype=torch.uint8))


def filled(laid: CachePlan, group: int = 0) -> Pool:
    """A pool with random bytes in every plane of every slot of every layer."""
    pool, generator = make(laid, group), torch.Generator().manual_seed(1)
    for view in pool.bound.planes.values():
        size = view.element_size()
        codes = torch.randint(1, 120, (*view.shape, size), dtype=torch.uint8, generator=generator)
        view.copy_(
            codes.view(view.dtype).squeeze(-1) if size > 1 else codes[..., 0].view(view.dtype)
        )
    return pool


def bytes_of(pool: Pool, pages: list[int]) -> dict[str, Tensor]:
    """All bytes of ``pages`` by plane, in order."""
    per = pool.group.page_slots
    slots = torch.tensor([page * per + offset for page in pages for offset in range(per)])
    found = pool.gather(slots)
    return {key: x.contiguous().view(-1).view(torch.uint8) for key, x in found.items()}


def memcpy(src: Pool, dst: Pool, src_pages: list[int], dst_pages: list[int]) -> int:
    """Transfer as an engine would; the number of copies."""
    pairs = copies(src.transfer_regions(src_pages), dst.transfer_regions(dst_pages))
    for a, b, size in pairs:
        dst.bound.arena[b : b + size] = src.bound.arena[a : a + size]
    return len(pairs)


def assert_same(a: Pool, a_pages: list[int], b: Pool, b_pages: list[int]) -> None:
    ours, theirs = bytes_of(a, a_pages), bytes_of(b, b_pages)
    assert ours.keys() == theirs.keys()
    for key in ours:
        assert ours[key].any(), f"{key} was empty to begin with"
        assert torch.equal(ours[key], theirs[key]), f"{key} was forgotten"


@pytest.mark.parametrize("layout", ["nhd", "hnd", "page_major", "record", "vectorized"])
@pytest.mark.parametrize("way", ["move", "move_pages", "copy_pages", "offload", "transfer"])
def test_scales_and_zeros_go_along(way: str, layout: str) -> None:
    laid = Cell("dim128", TWO, layout).plan()
    pool, other = filled(laid), make(laid)
    assert tuple(bytes_of(pool, [1])) == SCALED
    wanted = bytes_of(pool, [1, 2])
    if way == "move":
        pool.move(torch.arange(32, 64), torch.arange(16, 48))
        other, pages = pool, [2, 3]
    elif way == "move_pages":
        pool.move_pages([2, 3], [1, 2])
        other, pages = pool, [2, 3]
    elif way == "copy_pages":
        pool.copy_pages(np.array([[1, 2], [2, 3]]))
        other, pages = pool, [2, 3]
    elif way == "offload":
        other.load(pool.offload([1, 2]), [3, 1])
        pages = [3, 1]
    else:
        memcpy(pool, other, [1, 2], [3, 1])
        pages = [3, 1]
    found = bytes_of(other, pages)
    for key in SCALED:
        assert torch.equal(wanted[key], found[key]), f"{key} was forgotten by {way}"


@pytest.mark.parametrize("layout", ["state_split", "slot_major"])
@pytest.mark.parametrize("geometry", STATES)
def test_states_and_their_windows_go_along(geometry: str, layout: str) -> None:
    laid = Cell(geometry, (("state", "state_int8"),), layout).plan()
    pool, other = filled(laid), make(laid)
    other.load(pool.offload([3, 4, 5]), [5, 3, 8])
    assert_same(pool, [3, 4, 5], other, [5, 3, 8])
    memcpy(pool, other, [3, 4, 5], [1, 2, 7])
    assert_same(pool, [3, 4, 5], other, [1, 2, 7])
    pool.move(torch.tensor([9, 3], dtype=torch.int32), torch.tensor([3, 9], dtype=torch.int32))
    assert_same(other, [5], pool, [9])
    pool.zero(torch.tensor([4, 9]), mask=torch.tensor([True, False]))
    assert not any(x.any() for x in bytes_of(pool, [4]).values())
    assert_same(other, [5], pool, [9])


def index_plan(requests: int = 2) -> CachePlan:
    """Keys, values, and an index of keys with scales in the same table."""
    index = INDEX | INDEXES["index128_64"]
    groups = {"main": GQA | {"q_heads": 2, "kv_heads": 2, "head_dim": 128}, "index": index}
    quant = {"k": "fp8_e4m3", "v": "mxfp8", "index_k": "fp8_tile128", "index_v": "plain"}
    return plan(
        Spec.parse(
            {
                "model": {"name": "m", "num_layers": 5, "groups": groups},
                "kv": {"quant": quant, "page_tokens": 64},
                "workload": {"requests": requests, "tokens": 128},
                "engine": {"prefill_chunk_tokens": 1},
            }
        )
    )


def test_index_pages_move_by_the_page_ids_of_their_table() -> None:
    laid = index_plan()
    main, index = filled(laid), filled(laid, 1)
    assert main.num_pages == index.num_pages
    other = make(laid, 1)
    other.load(index.offload([1, 2]), [2, 3])
    assert_same(index, [1, 2], other, [2, 3])
    assert [run.num_bytes for run in index.transfer_regions([1])] == [64 * (128 + 4 + 128)] * 2


# ---- transfer ------------------------------------------------------------------------------

RUNS = {  # of a page of two layers with five planes
    "nhd": 10,
    "hnd": 10,
    "vectorized": 10,
    "fa4_scales": 10,
    "paged_kv": 2,
    "record": 2,
    "page_major": 1,
    "token_major": 1,
    "state_split": 10,
    "slot_major": 1,
}


@pytest.mark.parametrize("layout", LAYOUTS.names())
@pytest.mark.parametrize("align_bytes", [1, 512])
def test_a_page_is_the_fewest_runs(layout: str, align_bytes: int) -> None:
    laid = Cell("dim128", TWO, layout, page_tokens=64, align_bytes=align_bytes).plan()
    src, dst = filled(laid), make(laid)
    runs = src.transfer_regions([1])
    assert len(runs) == RUNS[layout]
    assert {run.group for run in runs} == {"main"}
    assert {layer for run in runs for layer in run.layers} == {1, 3}
    assert {key for run in runs for key in run.planes} == set(SCALED)
    assert memcpy(src, dst, [3, 2, 1], [3, 1, 2]) == 3 * RUNS[layout]
    assert_same(src, [3, 2, 1], dst, [3, 1, 2])


def test_neighbours_on_both_sides_travel_together() -> None:
    laid = Cell("dim128", TWO, "nhd").plan()
    src, dst = filled(laid), make(laid)
    assert memcpy(src, dst, [1, 2, 3], [1, 2, 3]) == 10
    assert memcpy(src, dst, [1, 2], [2, 3]) == 10
    assert_same(src, [1, 2], dst, [2, 3])
    whole = copies(src.transfer_regions([1, 2]), dst.transfer_regions([2, 3]))
    assert sum(copy.num_bytes for copy in whole) == src.offload([1, 2]).num_bytes
    assert copies((), ()) == ()


@pytest.mark.parametrize("layout", LAYOUTS.names())
def test_the_other_side_may_have_more_pages(layout: str) -> None:
    def sized(tokens: int) -> CachePlan:
        spec = Cell("dim128", TWO, layout, page_tokens=64).plan().spec
        load = spec.workload.model_copy(update={"tokens": tokens})
        return plan(spec.model_copy(update={"workload": load}))

    src, dst = filled(sized(192)), make(sized(1024))
    assert src.num_pages < dst.num_pages
    assert not src.manifest().mismatches(dst.manifest())
    memcpy(src, dst, [1, 3], [15, 7])
    assert_same(src, [1, 3], dst, [15, 7])


def test_layers_and_planes_of_a_run() -> None:
    pool = make(Cell("dim128", TWO, "nhd").plan())
    named = [(run.planes, run.layers) for run in pool.transfer_regions([2])]
    assert named == [((key,), (layer,)) for key in SCALED for layer in (1, 3)]
    run = pool.transfer_regions([2])[0]
    assert run.offset == pool.group.offset + 2 * run.page_stride_bytes
    assert run.of_page(0).offset == pool.group.offset
    record = make(Cell("dim128", TWO, "record").plan()).transfer_regions([2])
    assert [(run.planes, run.layers) for run in record] == [(SCALED, (1,)), (SCALED, (3,))]


# ---- manifest ------------------------------------------------------------------------------

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"layout": "page_major"}, "manifest.layout"),
    "one split": ({"layout": "vectorized"}, "manifest.planes.v"),
    "quant": ({"quant": (("k", "nvfp4"), ("v", "int4_g128"))}, "manifest.tensors.v"),
    "planes": ({"quant": (("k", "nvfp4"), ("v", "plain"))}, "manifest.planes"),
    "option": ({"options": {"center": True}}, "manifest.tensors.k"),
    "page": ({"page_tokens": 64}, "manifest.page_slots"),
    "dims": ({"geometry": "dim96"}, "manifest.tensors.k"),
    "padding": ({"align_bytes": 512}, "manifest.planes.k"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_manifest_names_what_differs(name: str) -> None:
    changed, path = OTHERS[name]
    layout = "hnd" if name == "one split" else "record" if name == "padding" else "nhd"
    base: dict[str, Any] = {"geometry": "dim128", "quant": TWO, "layout": layout}
    if name == "dims":
        base["quant"] = (("k", "nvfp4"), ("v", "int4_g32"))
    ours, theirs = make(Cell(**base).plan()), make(Cell(**base | changed).plan())
    found = ours.manifest().mismatches(theirs.manifest())
    assert path in [problem.path for problem in found]
    assert all(problem.got and problem.need for problem in found)
    assert not ours.manifest().mismatches(Manifest.from_json(ours.manifest().to_json()))
    if name not in ("layout", "one split", "padding"):
        with pytest.raises(SpecError):
            ours.load(theirs.offload([1]), [1])


def test_constants_are_compared_and_an_image_with_others_is_refused() -> None:
    laid = Cell("dim128", TWO, "nhd").plan()
    ours, theirs = filled(laid), make(laid)
    image = ours.offload([1])
    theirs.set_constants({(3, "k", "global_scale"): 0.5})
    found = ours.manifest().mismatches(theirs.manifest())
    assert [problem.path for problem in found] == ["manifest.constants.k.global_scale"]
    with pytest.raises(SpecError, match=r"k\.global_scale"):
        theirs.load(image, [1])


# ---- images --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [name for name in LAYOUTS.names() if name != "slot_major"])
def test_an_image_has_no_layout(layout: str) -> None:
    src = filled(Cell("dim128", TWO, "slot_major", page_tokens=64).plan())
    dst = make(Cell("dim128", TWO, layout, page_tokens=64).plan())
    dst.load(src.offload([3, 1], chunk_bytes=1), [1, 2])
    assert_same(src, [3, 1], dst, [1, 2])


def test_an_image_of_no_pages() -> None:
    pool = filled(Cell("dim128", TWO, "nhd").plan())
    image = pool.offload([])
    assert image.num_pages == image.num_bytes == 0
    before = pool.bound.arena.clone()
    pool.load(image, [])
    pool.move_pages([], [])
    pool.zero([])
    pool.move(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert torch.equal(before, pool.bound.arena)
    assert pool.read(0, torch.tensor([], dtype=torch.int64))["k"].shape == (0, 2, 128)
