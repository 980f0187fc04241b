"""Which bytes a unit (a page or a slot) has: parts of equal steps, from the plan's strides alone.

For copies within a pool the order does not matter, so planes that stand side by side in a unit are
one part and travel as the longest runs there are, padding included. For images the order is the
logical one, whatever the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvfactory.kernels.baked import AxisSteps, Part
from kvfactory.kinds import align_up
from kvfactory.layouts import Strided, axis_name
from kvfactory.planning.cacheplan import GroupPlan, PlanePlan

MOVE_BYTES = 4096
"""What a program copies within the pool."""

DENSE_BYTES = 2048
"""What a program copies between the pool and dense memory."""

SECTOR_BYTES = 32
"""What memory reads and writes at least."""

Dims = tuple[tuple[int, int], ...]
"""(extent, step) pairs, outermost first."""


@dataclass(frozen=True)
class Placed:
    """A plane's axes by role, steps in bytes: one value, or two for a split axis."""

    layer: tuple[int, int]
    page: tuple[int, int]
    slot: Dims
    own: Dims
    own_labels: tuple[str, ...]
    offset: int
    itemsize: int


def placed(place: Strided, stateful: bool) -> Placed:
    """``place`` taken apart; in state groups no axis is a slot."""
    pairs = dict(zip(place.axes, zip(place.shape, place.strides, strict=True), strict=True))
    rest = [label for label in place.axes if label not in ("layer", "page")]
    slots = [label for label in rest if axis_name(label) == "slot" and not stateful]
    own = [label for label in rest if label not in slots]
    return Placed(
        layer=pairs["layer"],
        page=pairs["page"],
        slot=tuple(pairs[label] for label in slots),
        own=tuple(pairs[label] for label in own),
        own_labels=tuple(own),
        offset=place.offset,
        itemsize=place.itemsize,
    )


def axis_steps(dims: Sequence[tuple[int, int]]) -> AxisSteps:
    """How an index along ``dims`` (no, one or two parts) becomes a step."""
    if not dims:
        return (1, 0, 0)
    if len(dims) == 1:
        return (1, dims[0][1], 0)
    (_, high), (divisor, low) = dims
    return (divisor, high, low)


# ---- copies within a pool --------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """``length`` bytes at ``offset``, repeated along ``outer``, for every unit."""

    offset: int
    length: int
    outer: Dims
    page: int
    slot: Dims

    @property
    def unit_step(self) -> int:
        """The closest that two units come."""
        return min([self.page, *(step for _, step in self.slot)])

    def joined(self, other: _Run) -> _Run | None:
        """Both as one run, when they stand in the same unit's stretch of bytes."""
        same = (self.outer, self.page, self.slot) == (other.outer, other.page, other.slot)
        length = other.offset + other.length - self.offset
        if not same or length > self.unit_step:
            return None
        return _Run(self.offset, length, self.outer, self.page, self.slot)


def byte_parts(group: GroupPlan, by_slot: bool) -> tuple[Part, ...]:
    """The parts of a page, or of a slot, for copies within the pool: the fewest, longest runs."""
    runs = sorted((_run(plane, group, by_slot) for plane in group.planes), key=lambda r: r.offset)
    merged: list[_Run] = []
    for run in runs:
        both = merged[-1].joined(run) if merged else None
        if both is None:
            merged.append(run)
        else:
            merged[-1] = both
    found, image = [], 0
    for run in merged:
        dims = (*run.outer, (run.length, 1))
        spot = (dims, run.offset, run.page, run.slot)
        part = _part(*spot, layer=(1, 0), image=image, program_bytes=MOVE_BYTES)
        found.append(part)
        image = align_up(image + part.total * part.word_bytes, 16)
    return tuple(found)


def byte_image(parts: Iterable[Part]) -> int:
    """Bytes of a unit's image of ``byte_parts``."""
    return max(align_up(part.image + part.total * part.word_bytes, 16) for part in parts)


def _run(plane: PlanePlan, group: GroupPlan, by_slot: bool) -> _Run:
    spot = placed(plane.place, group.kind == "linear")
    # An axis of one slot has a step that no slot takes, and planes need not agree on it.
    slot = tuple(axis for axis in spot.slot if axis[0] > 1) if by_slot else ()
    inner_slots = () if by_slot else spot.slot
    probe = _Run(spot.offset, 0, (), spot.page[1], slot)
    axes = sorted((spot.layer, *inner_slots, *spot.own), key=lambda axis: -axis[1])
    outer = tuple(axis for axis in axes if axis[0] > 1 and axis[1] > probe.unit_step)
    inner = [axis for axis in axes if axis[0] > 1 and axis[1] < probe.unit_step]
    length = spot.itemsize + sum((extent - 1) * step for extent, step in inner)
    return _Run(spot.offset, length, outer, spot.page[1], slot)


# ---- images in logical order -----------------------------------------------------------------


def plane_part(
    plane: PlanePlan, group: GroupPlan, by_slot: bool, every_layer: bool, image: int = 0
) -> Part:
    """A plane's part in logical order: [L, slot, *plane], or what remains without L or slot."""
    spot = placed(plane.place, group.kind == "linear")
    slot, inner_slots = (spot.slot, ()) if by_slot else ((), spot.slot)
    dims = (*inner_slots, *spot.own) or ((1, spot.itemsize),)
    if dims[-1][1] != spot.itemsize:
        dims = (*dims, (1, spot.itemsize))
    run = math.prod(extent for extent, _ in dims) * spot.itemsize
    layer = spot.layer if every_layer else (1, spot.layer[1])
    innermost = (dims[-1][0] * spot.itemsize, 1)
    whole = (layer, *dims[:-1], innermost) if every_layer else (*dims[:-1], innermost)
    begin = (whole, spot.offset, spot.page[1], slot)
    return _part(*begin, layer=layer, image=image, program_bytes=DENSE_BYTES, run=run)


def plane_parts(
    group: GroupPlan, images: Mapping[str, int], by_slot: bool, every_layer: bool
) -> tuple[Part, ...]:
    """``plane_part`` of every plane; ``images`` says where each begins in a unit's image."""
    return tuple(
        plane_part(plane, group, by_slot, every_layer, images[plane.key]) for plane in group.planes
    )


def in_pool_order(part: Part) -> Part:
    """``part`` for copies into the pool: words that run on in the pool stand side by side.

    Only for runs below a sector, which would each be written in pieces.
    """
    if part.dims[0] * part.word_bytes >= SECTOR_BYTES:
        return part
    extents, steps = part.dims[::2], part.dims[1::2]
    dense = [math.prod(extents[:i]) for i in range(len(extents))]
    axes = sorted(zip(steps, extents, dense, strict=True))
    return replace(
        part,
        dims=tuple(value for step, extent, _ in axes for value in (extent, step)),
        dense=tuple(dense for _, _, dense in axes),
    )


# ---- words -----------------------------------------------------------------------------------


def _part(
    dims: Dims,
    offset: int,
    page: int,
    slot: Dims,
    layer: tuple[int, int],
    image: int,
    program_bytes: int,
    run: int | None = None,
) -> Part:
    """A part from byte dims whose innermost is (bytes, 1)."""
    merged = _merged(dims)
    inner = merged[-1][0]
    outer = merged[:-1]
    steps = [step for _, step in (*outer, *slot)]
    # The start of the arena is aligned to 256 bytes at least, so offsets decide.
    word = math.gcd(8, inner, offset, page, layer[1], image, *steps)
    words = [(extent, step // word) for extent, step in outer]
    words.append((inner // word, 1))
    total = math.prod(extent for extent, _ in words)
    width = _width(total, program_bytes // word)
    slot_words = tuple((extent, step // word) for extent, step in slot)
    return Part(
        word_bytes=word,
        offset=offset // word,
        layer=layer[1] // word,
        page=page // word,
        slot=axis_steps(slot_words),
        slot_step=linear_step(page // word, slot_words),
        dims=tuple(value for pair in reversed(words) for value in pair),
        total=total,
        run=total if run is None else run // word,
        image=image // word,
        width=width,
        units=program_bytes // word // width,
    )


def linear_step(page: int, slot: Dims) -> int:
    """The step from slot to slot where it is one everywhere, else 0."""
    if not slot:
        return page
    extent = math.prod(extent for extent, _ in slot)
    step = slot[-1][1]
    whole = len(slot) == 1 or slot[0][1] == step * slot[1][0]
    return step if whole and page == step * extent else 0


def _merged(dims: Dims) -> Dims:
    """``dims`` with neighbours that step as one joined; at least one remains."""
    found: list[tuple[int, int]] = []
    for extent, step in reversed(dims):
        if found and step == found[-1][0] * found[-1][1]:
            found[-1] = (extent * found[-1][0], found[-1][1])
        elif extent > 1 or not found:
            found.append((extent, step))
    return tuple(reversed(found))


def _width(total: int, most: int) -> int:
    """Words of a unit that a program takes: the most that leaves few lanes idle."""
    width = most
    while width > 32:
        idle = align_up(total, width) - total
        if idle * 32 <= total:
            return width
        width //= 2
    return min(width, 1 << (total - 1).bit_length())
