"""Placement: pattern + planes + extents -> a byte offset and strides for every plane.

The whole mechanism behind all layouts, in pure integers. Left of ``plane`` all planes share
strides, right of it each plane is dense in itself; an axis that a plane lacks is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvfactory.errors import Problem
from kvfactory.kinds import align_up
from kvfactory.layouts.pattern import REST, Axis, Pattern

X_BYTES = 16


@dataclass(frozen=True)
class Extents:
    """A plane to place: its ``key``, element size and its own axes (slot included)."""

    key: str
    itemsize: int
    axes: tuple[tuple[str, int], ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer without padding."""
        return self.itemsize * math.prod(extent for _, extent in self.axes)


@dataclass(frozen=True)
class Strided:
    """Where a plane's elements live: element (i, j, ...) is at offset + i * strides[0] + ...

    ``axes`` is the logical order, ``layer page`` and the plane's own axes, a split axis as two
    (``dim/16 dim%16``). ``offset`` counts from the region's start; all in bytes.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    itemsize: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page (or state slot) of one layer, without padding."""
        return math.prod(self.shape[2:]) * self.itemsize


def axis_name(label: str) -> str:
    """The axis of a label in ``Strided.axes``: ``dim`` for ``dim/16`` and ``dim%16``."""
    return label.split("/")[0].split("%")[0]


@dataclass(frozen=True)
class Placement:
    """Every plane's place in a region of ``num_bytes``, padding included."""

    planes: Mapping[str, Strided]
    num_bytes: int


def place(
    patterns: Sequence[Pattern],
    planes: Sequence[Extents],
    outer: Mapping[str, int],
    align_bytes: int = 1,
) -> Placement:
    """Offsets and strides of ``planes``, one pattern each, over the ``outer`` axes layer and page.

    Each plane starts at a multiple of its element size, shared strides at a multiple of the
    largest; ``align_bytes`` comes on top. The caller has asked ``placement_problems`` first.
    """
    cursor, inner = 0, []
    for pattern, plane in zip(patterns, planes, strict=True):
        offset = align_up(cursor, max(plane.itemsize, align_bytes))
        own = _resolve(pattern.inner, pattern, plane, outer)
        strides, span = _dense(own, plane.itemsize)
        inner.append((offset, strides))
        cursor = offset + span
    unit = max([align_bytes, *(plane.itemsize for plane in planes)])
    left = _resolve(patterns[0].shared, patterns[0], planes[0], outer)
    shared, total = _dense(left, align_up(cursor, unit))
    placed = {
        plane.key: _logical(plane, shared | strides, offset)
        for plane, (offset, strides) in zip(planes, inner, strict=True)
    }
    return Placement(placed, total)


@dataclass(frozen=True)
class _Part:
    """One concrete axis of one plane: ``rank`` orders the two parts of a split."""

    name: str
    label: str
    rank: int
    extent: int


def _resolve(
    axes: Sequence[Axis], pattern: Pattern, plane: Extents, outer: Mapping[str, int]
) -> list[_Part]:
    sizes = {**outer, **dict(plane.axes)}
    named = {axis.name for axis in pattern.axes}
    parts: list[_Part] = []
    for axis in axes:
        if axis.name == REST:
            parts += [_Part(n, n, 0, extent) for n, extent in plane.axes if n not in named]
        elif axis.name in sizes:
            parts.append(_part(axis, sizes[axis.name], plane.itemsize))
    return parts


def _part(axis: Axis, extent: int, itemsize: int) -> _Part:
    if not axis.part:
        return _Part(axis.name, axis.name, 0, extent)
    divisor = _divisor(axis, itemsize)
    rank, length = (0, extent // divisor) if axis.part == "/" else (1, divisor)
    return _Part(axis.name, f"{axis.name}{axis.part}{divisor}", rank, length)


def _divisor(axis: Axis, itemsize: int) -> int:
    return max(1, X_BYTES // itemsize) if axis.divisor == "x" else int(axis.divisor)


def _dense(parts: Sequence[_Part], unit_bytes: int) -> tuple[dict[_Part, int], int]:
    """Strides in bytes of ``parts`` packed around a unit, innermost last, and the bytes spanned."""
    strides: dict[_Part, int] = {}
    span = unit_bytes
    for part in reversed(parts):
        strides[part] = span
        span *= part.extent
    return strides, span


def _logical(plane: Extents, strides: Mapping[_Part, int], offset: int) -> Strided:
    order = ["layer", "page", *(name for name, _ in plane.axes)]
    parts = sorted(strides, key=lambda part: (order.index(part.name), part.rank))
    return Strided(
        tuple(part.label for part in parts),
        tuple(part.extent for part in parts),
        tuple(strides[part] for part in parts),
        offset,
        plane.itemsize,
    )


# ---- what cannot be placed -----------------------------------------------------------------


def placement_problems(
    patterns: Sequence[Pattern], planes: Sequence[Extents], path: str
) -> tuple[Problem, ...]:
    """Why these patterns cannot place these planes; empty when they can."""
    known = {name for plane in planes for name, _ in plane.axes}
    wrong: list[Problem] = []
    for pattern, plane in zip(patterns, planes, strict=True):
        wrong += _unknown_axes(pattern, known, path)
        wrong += _missing_axes(pattern, plane, path)
        wrong += _indivisible(pattern, plane, path)
    wrong += _unshared(patterns, planes, path)
    return tuple(dict.fromkeys(wrong))


def _unshared(
    patterns: Sequence[Pattern], planes: Sequence[Extents], path: str
) -> Iterator[Problem]:
    """Axes left of ``plane`` have the same parts and lengths in all planes."""
    outer = {"layer": 1, "page": 1}
    parts = {
        plane.key: {p.label: p.extent for p in _resolve(pattern.shared, pattern, plane, outer)}
        for pattern, plane in zip(patterns, planes, strict=True)
    }
    for label in dict.fromkeys(label for found in parts.values() for label in found):
        lengths = {key: found.get(label) for key, found in parts.items()}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{key} {length or 'none'}" for key, length in lengths.items())
            need = f"one length of {label} in all planes, since it stands left of plane"
            yield Problem(path, f"'{patterns[0]}' with {label} of {shown}", need)


def _unknown_axes(pattern: Pattern, known: set[str], path: str) -> list[Problem]:
    allowed = sorted(known | {"layer", "page", REST})
    return [
        Problem(
            path, f"axis {axis.name!r} in '{pattern}'", f"axes among {', '.join(allowed)}, plane"
        )
        for axis in pattern.axes
        if axis.name not in allowed and axis.name not in ("head", "dim")
    ]


def _missing_axes(pattern: Pattern, plane: Extents, path: str) -> list[Problem]:
    named = {axis.name for axis in pattern.axes}
    if REST in named:
        return []
    return [
        Problem(
            path,
            f"'{pattern}' without {name}",
            f"every axis of {plane.key}, or ...",
            f"{path}='{pattern} {name}'",
        )
        for name, _ in plane.axes
        if name not in named
    ]


def _indivisible(pattern: Pattern, plane: Extents, path: str) -> list[Problem]:
    sizes = dict(plane.axes)
    wrong = []
    for axis in pattern.axes:
        if axis.part != "/" or axis.name not in sizes:
            continue
        divisor = _divisor(axis, plane.itemsize)
        if sizes[axis.name] % divisor:
            got = f"{axis.name} {sizes[axis.name]} of {plane.key} for '{axis}'"
            fix = "kv.page_tokens=" + str(divisor) if axis.name == "slot" else ""
            wrong.append(Problem(path, got, f"a multiple of {divisor}", fix))
    return wrong
