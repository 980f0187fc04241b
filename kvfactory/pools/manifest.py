"""What two pools must agree on before bytes may pass between them as they are."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pydantic import TypeAdapter

from kvfactory.errors import Problem
from kvfactory.planning.cacheplan import GroupPlan
from kvfactory.pools.transfer import Region
from kvfactory.pools.views import GroupViews


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


def manifest_of(views: GroupViews, runs: Sequence[Region]) -> Manifest:
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
        place = plane.place
        axes = list(zip(place.axes, place.shape, place.strides, strict=True))
        labels, extents, strides = zip(*(axis for axis in axes if axis[0] != "page"), strict=True)
        yield PlaneForm(
            key=plane.key,
            dtype=plane.dtype,
            axes=labels,
            extents=extents,
            strides=tuple(step if step < region.num_bytes else 0 for step in strides),
            lead_bytes=place.offset - region.offset,
            run_bytes=region.num_bytes,
        )


def _digests(views: GroupViews) -> Iterator[tuple[str, str, str]]:
    for tensor, tables in views.constants.items():
        for name, table in tables.items():
            values = table.detach().cpu().contiguous().numpy().astype("<f4")
            assert values.nbytes == 4 * math.prod(table.shape)
            yield tensor, name, hashlib.sha256(values.tobytes()).hexdigest()
