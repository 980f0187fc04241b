"""The parts of a unit: every byte of it once, and no byte of another unit."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from kernel_cells import GEOMETRIES, INDEXES, STATES, Cell
from numpy.typing import NDArray

from kvfactory.errors import KVFactoryError
from kvfactory.kernels.baked import AxisSteps, Part
from kvfactory.kernels.parts import SECTOR_BYTES, byte_parts, in_pool_order, plane_parts
from kvfactory.layouts import LAYOUTS
from kvfactory.planning.cacheplan import GroupPlan

QUANTS = ("plain", "int8_token_head", "int4_g32", "nvfp4")


def groups(layout: str) -> list[GroupPlan]:
    """Small groups of every geometry under ``layout``, where it can place them."""
    found = []
    pages = (128,) if layout == "fa4_scales" else (1, 16)
    for geometry, quant, page in product([*GEOMETRIES, *INDEXES, *STATES], QUANTS, pages):
        name = quant if geometry not in STATES else "state_int8"
        try:
            found.append(Cell(geometry, name, layout, page).plan().groups[-1])
        except KVFactoryError:
            continue
    return found


def bytes_of(part: Part, unit: int, page_slots: int) -> NDArray[np.int64]:
    """Arena offsets of every byte of ``unit`` in ``part``."""
    offset = part.offset + (unit // page_slots) * part.page + step(unit % page_slots, part.slot)
    if part.slot_step:
        assert offset == part.offset + unit * part.slot_step
    words = np.full(1, offset)
    for extent, stride in zip(part.dims[::2], part.dims[1::2], strict=True):
        words = (words[:, None] + np.arange(extent) * stride).ravel()
    assert len(words) == part.total
    return (words[:, None] * part.word_bytes + np.arange(part.word_bytes)).ravel()


def walked(part: Part) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The part's words in the order of its dims: where they are in a unit, and [dims, words]."""
    extents = part.dims[::2]
    spots = np.indices(extents[::-1]).reshape(len(extents), -1)[::-1]
    return np.array(part.dims[1::2]) @ spots, spots


def step(index: int, steps: AxisSteps) -> int:
    divisor, high, low = steps
    return index // divisor * high + index % divisor * low


def planned(group: GroupPlan, unit: int, by_slot: bool) -> set[int]:
    """The same from the plan's planes."""
    found: set[int] = set()
    slots = group.page_slots
    page, wanted = (unit // slots, unit % slots) if by_slot else (unit, None)
    for plane in group.planes:
        place = plane.place
        spots = np.indices(place.shape).reshape(len(place.shape), -1)
        keep = spots[place.axes.index("page")] == page
        if wanted is not None and group.kind != "linear":
            slot = np.zeros(spots.shape[1], np.int64)
            for label, extent, axis in zip(place.axes, place.shape, spots, strict=True):
                if label.split("/")[0].split("%")[0] == "slot":
                    slot = slot * extent + axis
            keep &= slot == wanted
        starts = place.offset + np.tensordot(np.array(place.strides), spots[:, keep], 1)
        found.update((starts[:, None] + np.arange(place.itemsize)).ravel().tolist())
    return found


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS.names())
def test_parts_cover_a_unit_once(layout: str, by_slot: bool) -> None:
    for group in groups(layout):
        slots = group.page_slots if by_slot else 1
        units = (slots, slots + 1) if by_slot else (1, 2)
        own, other = (planned(group, unit, by_slot) for unit in units)
        parts = [bytes_of(part, units[0], slots) for part in byte_parts(group, by_slot)]
        covered = np.concatenate(parts).tolist()
        assert len(covered) == len(set(covered)), f"{group.layout}: bytes twice"
        assert own <= set(covered), f"{group.layout}: bytes missing"
        assert not other & set(covered), f"{group.layout}: bytes of another unit"
        assert len(covered) <= 1.2 * len(own) + 64 * len(group.layers), "mostly padding"
        starts = dict.fromkeys((plane.key for plane in group.planes), 0)
        logical = plane_parts(group, starts, by_slot, every_layer=True)
        exact = np.concatenate([bytes_of(part, units[0], slots) for part in logical]).tolist()
        assert len(exact) == len(own)
        assert set(exact) == own


@pytest.mark.parametrize("layout", ["hnd", "vectorized", "record", "fa4_scales"])
def test_parts_in_pool_order_pair_the_same_words(layout: str) -> None:
    moved = 0
    for group in groups(layout):
        starts = dict.fromkeys((plane.key for plane in group.planes), 0)
        for part in plane_parts(group, starts, by_slot=False, every_layer=True):
            turned = in_pool_order(part)
            pool, spots = walked(turned)
            image = np.array(turned.dense) @ spots if turned.dense else np.arange(part.total)
            assert np.array_equal(pool[np.argsort(image)], walked(part)[0])
            if turned.dense:
                steps = turned.dims[1::2]
                assert steps == tuple(sorted(steps))
                assert part.dims[0] * part.word_bytes < SECTOR_BYTES
                moved += 1
    assert moved, f"{layout}: no part turned"


def test_pages_of_all_layers_are_one_run_where_the_layout_makes_them_one() -> None:
    group = Cell("dim128", "nvfp4", "page_major").plan().groups[0]
    (part,) = byte_parts(group, by_slot=False)
    assert part.dims == (part.total, 1)
    assert part.word_bytes == 8
