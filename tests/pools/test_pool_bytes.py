"""The account of bytes: plan = arena = rows, regions apart, every byte of every plane its own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool_cells import GEOMETRIES, INDEXES, STATES, Cell
from pool_reference import Addresses, as_bytes

from kvfactory.errors import KVFactoryError
from kvfactory.layouts import LAYOUTS
from kvfactory.memory import MEMORIES
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan, GroupPlan
from kvfactory.pools import Pool
from kvfactory.spec import Spec

GOLDEN = Path(__file__).parents[1] / "golden"


def every_byte(group: GroupPlan) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Addresses of all bytes, one array per plane, by arithmetic on the plan."""
    slots = np.arange(group.planes[0].place.shape[1] * group.page_slots)
    found = []
    for plane in group.planes:
        spot = Addresses(group, plane)
        layers = [spot.of(layer, slots).reshape(-1) for layer in range(len(group.layers))]
        found.append(np.concatenate(layers))
    return found


def extents(laid: CachePlan) -> list[tuple[int, int]]:
    """(start, stop) of everything that the plan places in the arena."""
    found = [(group.offset, group.num_bytes) for group in laid.groups]
    for group in laid.groups:
        for tensor in group.tensors:
            found += [
                (c.offset, 4 * len(group.layers) * int(np.prod(c.shape))) for c in tensor.constants
            ]
    rows = laid.limits.max_requests + 1
    found += [(table.offset, 4 * rows * table.row_pages) for table in laid.tables]
    first = min(field.offset for field in laid.fields)
    found.append((first, laid.step_bytes * laid.limits.steps_in_flight))
    found += [(work.offset, work.num_bytes) for work in laid.workspaces]
    return [(start, start + size) for start, size in found]


@pytest.mark.parametrize("layout", LAYOUTS.names())
@pytest.mark.parametrize("geometry", [*GEOMETRIES, *INDEXES, *STATES])
def test_plan_is_arena_is_rows_and_no_bytes_are_shared(geometry: str, layout: str) -> None:
    token_formats = ("plain", "fp8_e4m3_token_head", "int4_g32", "nvfp4")
    for name in ("plain", "state_int8") if geometry in STATES else token_formats:
        names = ("k", "v", "latent", "rope", "index_k", "index_v", "state")
        cell = Cell(geometry, tuple((role, name) for role in names), layout)
        try:
            laid = cell.plan()
        except KVFactoryError:
            continue
        arena = MEMORIES.get("cpu", "memory").allocate(laid.bytes, "cpu")
        assert laid.bytes == arena.nbytes == sum(row.num_bytes for row in laid.rows)
        spans = sorted(extents(laid))
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), f"{cell}: regions overlap"
        assert spans[-1][1] <= laid.bytes
        for group in laid.groups:
            check_group(group, Pool(group, arena))


def check_group(group: GroupPlan, pool: Pool) -> None:
    planes = every_byte(group)
    taken = np.concatenate(planes)
    assert np.unique(taken).size == taken.size, f"{group.name}: two elements share a byte"
    assert taken.min() >= group.offset
    assert taken.max() < group.offset + group.num_bytes
    counted = pool.plane_bytes()
    for plane, found in zip(group.planes, planes, strict=True):
        sizes = counted[plane.key]
        assert sizes.pool_bytes == found.size
        assert sizes.page_bytes * pool.num_pages == found.size
        entries = len(group.layers) * group.page_slots * pool.num_pages
        assert sizes.entry_bytes * entries == found.size
    assert pool.num_bytes == group.num_bytes


def deepseek() -> CachePlan:
    """Sparse DeepSeek: 656-byte latent records and index pages of 64 keys."""
    mla = {
        "kind": "full",
        "geometry": "mla",
        "layers": "0-1",
        "q_heads": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "scale": 0.1,
    }
    index = {
        "kind": "sparse_index",
        "layers": "0-1",
        "selects": "latent",
        "index_heads": 64,
        "head_dim": 128,
        "topk": 2048,
    }
    kv = {
        "page_tokens": 64,
        "quant": {"latent": "fp8_tile128", "rope": "plain", "index_k": "fp8_tile128"},
        "layout": {"tokens": "record", "index": "paged_kv"},
    }
    model = {"name": "m", "num_layers": 2, "groups": {"latent": mla, "index": index}}
    parts = {"workload": {"requests": 8, "tokens": 64}, "engine": {"prefill_chunk_tokens": 64}}
    return plan(Spec.parse({"model": model, "kv": kv, **parts}))


def test_656_byte_record_and_8448_byte_index_page_come_out_of_the_catalog() -> None:
    laid = deepseek()
    latent, index = laid.groups
    assert latent.table == index.table
    strides = dict(zip(latent.planes[0].place.axes, latent.planes[0].place.strides, strict=True))
    assert strides["slot"] == 656
    starts = [plane.place.offset - latent.offset for plane in latent.planes]
    assert [plane.key for plane in latent.planes] == ["latent", "latent.scale", "rope"]
    assert starts == [0, 512, 528]
    strides = dict(zip(index.planes[0].place.axes, index.planes[0].place.strides, strict=True))
    assert strides["page"] == 8448
    assert [plane.place.offset - index.offset for plane in index.planes] == [0, 64 * 128]


def test_records_are_the_golden_rows() -> None:
    laid = deepseek()
    latent = laid.groups[0]
    golden = np.load(GOLDEN / "mla_row_656.npz")
    rows = len(golden["record"])
    pool = Pool(latent, torch.zeros(laid.bytes, dtype=torch.uint8))
    given = {name: torch.from_numpy(golden[name]) for name in ("latent", "rope")}
    pool.write(0, torch.arange(64, 64 + rows), **given)
    start = latent.offset + 64 * 656
    stored = pool.bound.arena[start : start + rows * 656].numpy().reshape(rows, 656)
    np.testing.assert_array_equal(stored, golden["record"])


def test_index_pages_are_the_golden_keys() -> None:
    laid = deepseek()
    index = laid.groups[1]
    golden = np.load(GOLDEN / "index_key.npz")
    rows = len(golden["x"])
    pool = Pool(index, torch.zeros(laid.bytes, dtype=torch.uint8))
    pool.write(1, torch.arange(64, 64 + rows), index_k=torch.from_numpy(golden["x"]))
    place = index.planes[0].place
    start = place.offset + place.strides[0] + 8448
    page = pool.bound.arena[start : start + 8448].numpy()
    keys, scales = page[: 64 * 128].reshape(64, 128), page[64 * 128 :].reshape(64, 4)
    np.testing.assert_array_equal(keys[:rows], golden["data"].reshape(rows, 128))
    wanted = as_bytes(torch.from_numpy(golden["scale"]), rows)
    np.testing.assert_array_equal(scales[:rows], wanted)
