"""Properties of placement over random patterns, extents, splits and alignments.

A pattern that places some planes is a bijection into the region: every byte of every plane has an
address of its own. One that cannot is refused with a reason, never placed wrongly.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvfactory.kinds import align_up
from kvfactory.layouts import LAYOUTS, Extents, Layout, Pattern, Strided, place, placement_problems
from kvfactory.layouts.pattern import parse

SPLITS = ("2", "4", "x")
SETTINGS = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)


def words(axis: str) -> st.SearchStrategy[list[str]]:
    """An axis whole, or split in two."""
    split = st.sampled_from(SPLITS).map(lambda n: [f"{axis}/{n}", f"{axis}%{n}"])
    return st.just([axis]) | split


@st.composite
def patterns(draw: st.DrawFn) -> str:
    """Every axis once, in any order and split, ``plane`` anywhere, the rest perhaps as ``...``."""
    axes = ["layer", "page"]
    for name in ("slot", "head", "dim"):
        axes += draw(words(name))
    order = draw(st.permutations(axes))
    if draw(st.booleans()):  # most useful layouts have dim on the right
        order = sorted(order, key=lambda word: word.startswith("dim"))
    cut = draw(st.integers(0, len(order)))
    text = [*order[:cut], "plane", *order[cut:]]
    if draw(st.integers(0, 3)) == 0:
        text = [word for word in text if not word.startswith(("head", "dim"))]
        text.insert(draw(st.integers(0, len(text))), "...")
    return " ".join(text)


@st.composite
def plane_sets(draw: st.DrawFn) -> list[Extents]:
    """One to four planes: data, a scale per head, a scale per block of dim."""
    slot = draw(st.sampled_from([1, 2, 4, 16]))
    found = []
    for number in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from([1, 2, 4]))
        axes = [("slot", slot), ("head", draw(st.sampled_from([1, 2, 3])))]
        if draw(st.booleans()):
            axes.append(("dim", draw(st.sampled_from([1, 4, 8, 16, 20]))))
        found.append(Extents(f"p{number}", size, tuple(axes)))
    return found


OUTER = st.fixed_dictionaries({"layer": st.integers(1, 3), "page": st.integers(1, 4)})
ALIGNMENTS = st.sampled_from([1, 2, 16, 64])


def addresses(spot: Strided) -> NDArray[np.int64]:
    """Every byte's address, in logical order of the elements."""
    found = np.array([spot.offset], np.int64)
    for extent, stride in zip(spot.shape, spot.strides, strict=True):
        found = (found[:, None] + np.arange(extent) * stride).reshape(-1)
    return (found[:, None] + np.arange(spot.itemsize)).reshape(-1)


def check(chosen: list[Pattern], planes: list[Extents], outer: dict[str, int], align: int) -> None:
    placed = place(chosen, planes, outer, align)
    everything = [addresses(placed.planes[plane.key]) for plane in planes]
    pages = outer["layer"] * outer["page"]
    for plane, found in zip(planes, everything, strict=True):
        assert found.size == plane.page_bytes * pages, "not every element has an address"
    taken = np.concatenate(everything)
    assert np.unique(taken).size == taken.size, "two bytes share an address"
    assert taken.min() >= 0
    assert taken.max() < placed.num_bytes
    for plane in planes:
        spot = placed.planes[plane.key]
        assert spot.offset % max(align, spot.itemsize) == 0
        assert all(stride % spot.itemsize == 0 for stride in spot.strides)
    check_shared_strides(chosen, planes, placed.planes, align)


def check_shared_strides(
    chosen: list[Pattern], planes: list[Extents], placed: dict[str, Strided], align: int
) -> None:
    """Left of ``plane``: equal strides, multiples of the alignment and of the largest element."""
    unit = max([align, *(plane.itemsize for plane in planes)])
    for axis in chosen[0].shared:
        found = {
            spot.strides[spot.axes.index(axis.name)]
            for spot in placed.values()
            if axis.name in spot.axes
        }
        assert len(found) <= 1
        assert all(stride % unit == 0 for stride in found)


@SETTINGS
@given(patterns(), plane_sets(), OUTER, ALIGNMENTS)
def test_a_random_pattern_is_a_bijection_or_refused(
    text: str, planes: list[Extents], outer: dict[str, int], align: int
) -> None:
    chosen = [parse(text, "layout")] * len(planes)
    wrong = placement_problems(chosen, planes, "layout")
    assert all(problem.path and problem.got and problem.need for problem in wrong)
    if not wrong:
        check(chosen, planes, outer, align)


@SETTINGS
@given(plane_sets(), OUTER, ALIGNMENTS, st.sampled_from(LAYOUTS.names()))
def test_the_catalog_is_a_bijection_or_refused(
    planes: list[Extents], outer: dict[str, int], align: int, name: str
) -> None:
    layout: Layout = LAYOUTS.get(name, "layout")
    families = itertools.cycle(("k", "v", "scale"))
    chosen = [layout.pattern(next(families), "layout") for _ in planes]
    if not placement_problems(chosen, planes, "layout"):
        check(chosen, planes, outer, align)


@SETTINGS
@given(plane_sets(), OUTER, ALIGNMENTS)
def test_padding_is_only_what_alignment_asks_for(
    planes: list[Extents], outer: dict[str, int], align: int
) -> None:
    chosen = [parse("layer page plane slot ...", "layout")] * len(planes)
    if placement_problems(chosen, planes, "layout"):
        return
    cursor = 0
    for plane in planes:
        cursor = align_up(cursor, max(align, plane.itemsize)) + plane.page_bytes
    unit = max([align, *(plane.itemsize for plane in planes)])
    page = align_up(cursor, unit)
    assert place(chosen, planes, outer, align).num_bytes == page * outer["layer"] * outer["page"]


@pytest.mark.parametrize(
    "text",
    [
        "layer page ... plane slot",
        "layer page slot/x plane head dim slot%x",
        "layer page head plane slot dim",
    ],
)
def test_what_differs_between_planes_cannot_stand_left_of_plane(text: str) -> None:
    planes = [
        Extents("k", 2, (("slot", 16), ("head", 2), ("dim", 8))),
        Extents("k.scale", 4, (("slot", 16), ("head", 1))),
    ]
    found = placement_problems([parse(text, "layout")] * 2, planes, "kv.layout.tokens")
    assert found
    assert all(problem.path == "kv.layout.tokens" for problem in found)
