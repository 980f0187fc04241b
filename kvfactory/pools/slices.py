"""Transfers between unequal tensor-parallel sizes: the runs that hold a share of heads or channels.

Ranks share token tensors and recurrent states by head (Mamba-1: by channel) and convolution windows
by channel, each of the stacked blocks (q, k, v) on its own and by its heads. Where there are more
ranks than heads, every head is on as many ranks as are left for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvfactory.errors import Problem, SpecError
from kvfactory.planning.cacheplan import GroupPlan, PlanePlan, Recurrence
from kvfactory.pools.transfer import Region

SLICED = ("head", "channel")


@dataclass(frozen=True)
class Slicing:
    """How ranks share a plane: ``axis`` and the extents of the ``blocks`` stacked along it.

    ``heads`` are those of each block, the parts that ranks do not divide. ``outer_count``
    contiguous pieces per block and page hold a rank's share of one layer.
    """

    plane: str
    axis: str
    blocks: tuple[int, ...]
    outer_count: int
    heads: tuple[int, ...]


def slicings(group: GroupPlan) -> tuple[Slicing, ...]:
    """The slicing of every plane of ``group``.

    Raises:
        SpecError: a layout that splits the axis which ranks share.
    """
    found = []
    for tensor in group.tensors:
        for plane in tensor.planes:
            axis, blocks = _blocks(group, plane)
            pieces = list(_pieces(plane, axis, 0, blocks[0].extent))
            layers = {layer for layer, _, _ in pieces}
            extents, heads = zip(*blocks, strict=True)
            found.append(Slicing(plane.key, axis, extents, len(pieces) // len(layers), heads))
    return tuple(found)


def slice_regions(group: GroupPlan, part: int, parts: int) -> tuple[Region, ...]:
    """The runs of page 0 that hold share ``part`` of ``parts`` of every plane.

    Those of share r of n of one pool match, in order and size, all runs (share 0 of 1) of a pool
    of one n-th of the heads (of one head where there are fewer), of the same layout and formats.

    Raises:
        SpecError: heads of which neither ``parts`` nor they are a multiple, or a layout that splits
            the axis.
    """
    found: list[Region] = []
    for tensor in group.tensors:
        for plane in tensor.planes:
            axis, blocks = _blocks(group, plane)
            for start, extent in _shares(plane, axis, blocks, part, parts):
                found += _regions(group, plane, axis, start, extent)
    return tuple(found)


class _Block(NamedTuple):
    """A part of an axis that ranks share by its ``heads``, which have equally many elements."""

    extent: int
    heads: int


def _blocks(group: GroupPlan, plane: PlanePlan) -> tuple[str, tuple[_Block, ...]]:
    """The axis that ranks share, and what is stacked along it; no axis when replicated."""
    sizes = dict(zip(plane.place.axes, plane.place.shape, strict=True))
    for axis in SLICED:
        if axis in sizes:
            return axis, _stacked(group, axis, sizes[axis])
        if any(label.startswith((f"{axis}/", f"{axis}%")) for label in sizes):
            need = f"a layout that keeps {axis} whole, to share it among ranks"
            raise SpecError(Problem(f"layout of {plane.key}", f"'{group.layout}'", need))
    return "", (_Block(1, 1),)


def _stacked(group: GroupPlan, axis: str, extent: int) -> tuple[_Block, ...]:
    """A convolution runs over q, k and v (Mamba-2: x, B and C) stacked in one tensor."""
    states = [other.logical for other in group.tensors if "value" in dict(other.logical.axes)]
    if axis != "channel" or not states or not isinstance(group.work, Recurrence):
        return (_Block(extent, extent),)
    heads, key = states[0].extent("head"), states[0].extent("key")
    inner = heads * states[0].extent("value")
    rest = extent - inner
    if rest <= 0 or rest % (2 * key):
        return (_Block(extent, extent),)
    values, keys = _Block(inner, heads), _Block(rest // 2, rest // (2 * key))
    return (values, keys, keys) if group.work.rule == "mamba2" else (keys, keys, values)


def _shares(
    plane: PlanePlan, axis: str, blocks: tuple[_Block, ...], part: int, parts: int
) -> Iterator[tuple[int, int]]:
    """(start, extent) along the axis of every block's share."""
    if not 0 <= part < parts:
        raise SpecError(Problem("part", str(part), f"a share below parts={parts}"))
    start = 0
    for extent, heads in blocks:
        if heads % parts and parts % heads:
            need = f"a multiple of parts={parts}, or a divisor"
            raise SpecError(Problem(f"{axis} of {plane.key}", f"{heads} heads", need))
        unit = extent // heads
        yield start + part * heads // parts * unit, max(1, heads // parts) * unit
        start += extent


def _pieces(plane: PlanePlan, axis: str, start: int, extent: int) -> Iterator[tuple[int, int, int]]:
    """(layer index or -1 for all, offset, bytes) of ``extent`` elements of ``axis`` on page 0.

    Folded are the axes inside ``axis`` and it itself, never those around it, so that pieces do not
    depend on how many heads there are. Of axes with equal strides all but one have length 1.
    """
    place = plane.place
    step = place.strides[place.axes.index(axis)] if axis else 0
    num_bytes, first = place.itemsize, place.offset + start * step
    outside: list[tuple[int, int, str]] = []
    for stride, length, label in sorted(zip(place.strides, place.shape, place.axes, strict=True)):
        count = extent if label == axis else length
        inside = not axis or label == axis or stride < step
        if label == "page" or count == 1:
            continue
        if inside and stride == num_bytes:
            num_bytes *= count
        else:
            outside.insert(0, (stride, count, label))
    for spot in itertools.product(*(range(count) for _, count, _ in outside)):
        steps = list(zip(outside, spot, strict=True))
        layer = [index for (_, _, label), index in steps if label == "layer"]
        offset = first + sum(stride * index for (stride, _, _), index in steps)
        yield layer[0] if layer else -1, offset, num_bytes


def _regions(
    group: GroupPlan, plane: PlanePlan, axis: str, start: int, extent: int
) -> Iterator[Region]:
    page_stride = plane.place.strides[plane.place.axes.index("page")]
    for layer, offset, num_bytes in _pieces(plane, axis, start, extent):
        layers = group.layers if layer < 0 else (group.layers[layer],)
        yield Region(group.name, (plane.key,), layers, 0, offset, num_bytes, page_stride)
