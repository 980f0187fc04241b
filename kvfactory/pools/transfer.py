"""What another process needs to copy pages by memcpy: contiguous runs, and a manifest to match.

Padding that belongs to a page travels with it, so that runs are few: one for a page of all layers
in ``page_major``, one per layer and plane in ``nhd``.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from kvfactory.errors import Problem
from kvfactory.layouts import Pattern, Strided
from kvfactory.layouts.pattern import parse
from kvfactory.planning.cacheplan import GroupPlan, PlanePlan
from kvfactory.pools.views import GroupViews


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


# ---- what both sides must agree on ---------------------------------------------------------


@dataclass(frozen=True)
class PlaneForm:
    """How a plane lies in its run of ``run_bytes``, whatever the number of pages.

    It starts ``lead_bytes`` into the run; ``axes``, ``extents`` and ``strides`` are all but
    ``page``, with stride 0 for axes that enumerate runs.
    """

    key: str
    dtype: str
    axes: tuple[str, ...]
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    lead_bytes: int
    run_bytes: int


@dataclass(frozen=True)
class TensorForm:
    """A logical tensor and the number format that stores it; ``options`` as JSON-like pairs."""

    name: str
    axes: tuple[tuple[str, int], ...]
    dtype: str
    quant: str
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Manifest:
    """What two pools must share before bytes may pass between them as they are.

    ``constants`` are (tensor, name, SHA-256 of the float32 table [layers, *shape]).
    """

    kind: str
    layers: tuple[int, ...]
    page_slots: int
    tokens_per_entry: int
    tensors: tuple[TensorForm, ...]
    layout: str
    planes: tuple[PlaneForm, ...]
    constants: tuple[tuple[str, str, str], ...]

    def mismatches(self, other: Manifest, same_layout: bool = True) -> tuple[Problem, ...]:
        """Where ``other`` differs; ``same_layout=False`` for images, which have no layout."""
        skipped = set() if same_layout else {"layout", "planes"}
        return tuple(
            Problem(f"manifest.{name}", str(theirs), f"{ours}, as in this pool")
            for name, ours, theirs in _pairs(self, other)
            if name.split(".")[0] not in skipped
        )

    def to_json(self) -> str:
        """The manifest as JSON text, to be sent to the other side."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest that ``to_json`` wrote."""
        return _ADAPTER.validate_json(text)


_ADAPTER: TypeAdapter[Manifest] = TypeAdapter(Manifest)


def manifest(views: GroupViews, runs: Sequence[Region]) -> Manifest:
    """The manifest of a pool with the ``regions`` ``runs``; reads its constants from the device."""
    group = views.group
    return Manifest(
        kind=group.kind,
        layers=group.layers,
        page_slots=group.page_slots,
        tokens_per_entry=group.tokens_per_entry,
        tensors=tuple(
            TensorForm(t.name, t.logical.axes, t.logical.dtype, t.quant, t.options)
            for t in group.tensors
        ),
        layout=group.layout,
        planes=tuple(_forms(group, runs)),
        constants=tuple(_digests(views)),
    )


def _pairs(ours: Manifest, theirs: Manifest) -> Iterator[tuple[str, Any, Any]]:
    """Differing (path, ours, theirs): single tensors, planes and constants where names agree."""
    for field in fields(Manifest):
        mine, other = vars(ours)[field.name], vars(theirs)[field.name]
        if mine == other:
            continue
        if field.name in ("tensors", "planes", "constants") and _names(mine) == _names(other):
            for name, a, b in zip(_names(mine), mine, other, strict=True):
                if a != b:
                    yield f"{field.name}.{name}", a, b
        else:
            yield field.name, mine, other


def _names(items: Sequence[Any]) -> list[str]:
    found = []
    for item in items:
        match item:
            case TensorForm():
                found.append(item.name)
            case PlaneForm():
                found.append(item.key)
            case tensor, name, _:
                found.append(f"{tensor}.{name}")
    return found


def _forms(group: GroupPlan, runs: Sequence[Region]) -> Iterator[PlaneForm]:
    by_key = {key: region for region in reversed(runs) for key in region.planes}
    for plane in group.planes:
        region = by_key[plane.key]
        axes = [axis for axis in _axes(plane.place) if axis.label != "page"]
        inside = [axis.stride if axis.stride < region.num_bytes else 0 for axis in axes]
        yield PlaneForm(
            key=plane.key,
            dtype=plane.dtype,
            axes=tuple(axis.label for axis in axes),
            extents=tuple(axis.extent for axis in axes),
            strides=tuple(inside),
            lead_bytes=plane.place.offset - region.offset,
            run_bytes=region.num_bytes,
        )


def _digests(views: GroupViews) -> Iterator[tuple[str, str, str]]:
    for tensor, tables in views.constants.items():
        for name, table in tables.items():
            values = table.detach().cpu().contiguous().numpy().astype("<f4")
            assert values.nbytes == 4 * math.prod(table.shape)
            yield tensor, name, hashlib.sha256(values.tobytes()).hexdigest()
