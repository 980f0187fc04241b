"""What another process needs to copy pages by memcpy: contiguous runs. See also ``manifest``.

Padding that belongs to a page travels with it, so that runs are few: one for a page of all layers
in ``page_major``, one per layer and plane in ``nhd``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvfactory.layouts import Pattern, Strided
from kvfactory.layouts.pattern import parse
from kvfactory.planning.cacheplan import GroupPlan, PlanePlan


@dataclass(frozen=True)
class Region:
    """A contiguous run of one page: ``num_bytes`` at ``offset`` from the arena's start.

    ``planes`` (keys) and ``layers`` (model layer ids) say what lies in it. The same run of another
    page lies ``page_stride_bytes`` x (difference of page ids) further.
    """

    group: str
    planes: tuple[str, ...]
    layers: tuple[int, ...]
    page: int
    offset: int
    num_bytes: int
    page_stride_bytes: int

    def of_page(self, page: int) -> Region:
        """The same run of another page."""
        return replace(
            self, page=page, offset=self.offset + (page - self.page) * self.page_stride_bytes
        )


class Copy(NamedTuple):
    """One memcpy: offsets from the start of either arena, and bytes."""

    src_offset: int
    dst_offset: int
    num_bytes: int


def regions(group: GroupPlan) -> tuple[Region, ...]:
    """The fewest contiguous runs that hold page 0 of ``group``, all layers and planes."""
    shared = parse(group.layout, "layout")
    if "page" not in {axis.name for axis in shared.shared}:
        return tuple(run for plane in group.planes for run in _plane_regions(group, plane))
    place = group.planes[0].place
    axes = _shared_axes(shared, place)
    unit = min(axis.stride for axis in axes)
    keys = tuple(plane.key for plane in group.planes)
    return tuple(_enumerate(group, keys, replace(place, offset=group.offset), _Runs(axes, unit)))


def copies(src: Sequence[Region], dst: Sequence[Region]) -> tuple[Copy, ...]:
    """The fewest memcpys that bring ``src`` to ``dst``, region by region in order.

    Runs that are neighbours in both arenas become one.
    """
    found: list[Copy] = []
    pairs = zip(src, dst, strict=True)
    for a, b in sorted(pairs, key=lambda pair: pair[0].offset):
        last = found[-1] if found else Copy(-1, -1, 0)
        adjoins = last.num_bytes and last.src_offset + last.num_bytes == a.offset
        if adjoins and last.dst_offset + last.num_bytes == b.offset:
            found[-1] = last._replace(num_bytes=last.num_bytes + a.num_bytes)
        else:
            found.append(Copy(a.offset, b.offset, a.num_bytes))
    return tuple(found)


class _Axis(NamedTuple):
    label: str
    extent: int
    stride: int


class _Runs:
    """``axes`` folded around a dense ``unit`` into runs of ``num_bytes``, the rest ``outside``."""

    def __init__(self, axes: Iterable[_Axis], unit: int) -> None:
        self.num_bytes = unit
        self.outside: list[_Axis] = []
        for axis in sorted(axes, key=lambda axis: axis.stride):
            if axis.label == "page":
                continue
            if axis.stride == self.num_bytes:
                self.num_bytes *= axis.extent
            elif axis.extent > 1:
                self.outside.insert(0, axis)


def _axes(place: Strided) -> tuple[_Axis, ...]:
    return tuple(map(_Axis, place.axes, place.shape, place.strides))


def _shared_axes(pattern: Pattern, place: Strided) -> tuple[_Axis, ...]:
    """Axes left of ``plane``: a unit of their innermost stride belongs to one coordinate alone."""
    words = {(axis.name, axis.part) for axis in pattern.shared}
    return tuple(axis for axis in _axes(place) if _word(axis.label) in words)


def _word(label: str) -> tuple[str, str]:
    part = "/" if "/" in label else "%" if "%" in label else ""
    return (label.split(part)[0] if part else label), part


def _plane_regions(group: GroupPlan, plane: PlanePlan) -> Iterator[Region]:
    runs = _Runs(_axes(plane.place), plane.place.itemsize)
    return _enumerate(group, (plane.key,), plane.place, runs)


def _enumerate(
    group: GroupPlan, keys: tuple[str, ...], place: Strided, runs: _Runs
) -> Iterator[Region]:
    stride = place.strides[place.axes.index("page")]
    for spot in itertools.product(*(range(axis.extent) for axis in runs.outside)):
        steps = list(zip(runs.outside, spot, strict=True))
        layer = [group.layers[index] for axis, index in steps if axis.label == "layer"]
        offset = place.offset + sum(axis.stride * index for axis, index in steps)
        yield Region(
            group=group.name,
            planes=keys,
            layers=tuple(layer) or group.layers,
            page=0,
            offset=offset,
            num_bytes=runs.num_bytes,
            page_stride_bytes=stride,
        )
