"""The specification of a pool's operations, in torch on views; also what a CPU uses.

Bytes travel as integers: torch has no indexing for some eight-bit types on the CPU, and an integer
copy cannot change a value. Where a plane's rows allow it, eight bytes travel as one integer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfactory.errors import Problem, SpecError
from kvfactory.layouts import axis_name
from kvfactory.planning.cacheplan import GroupPlan, PlanePlan, TensorPlan
from kvfactory.pools.ops import Keep
from kvfactory.pools.views import GroupViews

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchOps:
    """``Ops`` in plain torch, bound to ``views``; runs on any device without synchronising it."""

    def __init__(self, views: GroupViews) -> None:
        self._views = views
        self._bytes = {plane.key: _plane_bytes(views, plane) for plane in views.group.planes}
        self._tensors = {tensor.name: tensor for tensor in views.group.tensors}
        self._on_host = views.arena.device.type == "cpu"

    def write(
        self, layer_index: int, slots: Tensor, rows: Mapping[str, Tensor], keep: Keep | None
    ) -> None:
        """Encode ``rows`` (tensor name -> float [n, *axes]) and store them at ``slots``."""
        chosen = self._kept(slots, self._views.num_slots, keep)
        encoded: dict[str, Tensor] = {}
        for tensor in self._tensors.values():
            constants = self._views.layer_constants(tensor.name, layer_index)
            codec = self._views.codecs[tensor.name]
            parts = codec.encode(tensor.logical, chosen.rows(rows[tensor.name]), constants)
            for plane in tensor.planes:
                _check_codec(plane, parts[plane.part])
                encoded[plane.key] = parts[plane.part]
        spots = _Spots(chosen.ids)
        for key, values in encoded.items():
            self._bytes[key].put(layer_index, spots, values)

    def write_encoded(
        self, layer_index: int, slots: Tensor, planes: Mapping[str, Tensor], keep: Keep | None
    ) -> None:
        """Store ``planes`` (plane key -> [n, *plane]) at ``slots``."""
        chosen = self._kept(slots, self._views.num_slots, keep)
        spots = _Spots(chosen.ids)
        for key, target in self._bytes.items():
            target.put(layer_index, spots, chosen.rows(planes[key]))

    def read(
        self, layer_index: int, slots: Tensor, names: Sequence[str], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Decoded tensors: name -> fresh [n, *axes] in ``dtype``."""
        spots = _Spots(self._guarded(slots, self._views.num_slots))
        found = {}
        for name in names:
            tensor = self._tensors[name]
            parts = {p.part: self._bytes[p.key].take(layer_index, spots) for p in tensor.planes}
            found[name] = self._decode(tensor, layer_index, parts, dtype)
        return found

    def gather(self, layer_index: int | None, slots: Tensor) -> dict[str, Tensor]:
        """Raw planes in the order of ``slots``: key -> fresh [n, *plane], or [L, n, *plane]."""
        spots = _Spots(self._guarded(slots, self._views.num_slots))
        every = slice(None) if layer_index is None else layer_index
        return {key: source.take(every, spots) for key, source in self._bytes.items()}

    def move(
        self, dst_slots: Tensor, src_slots: Tensor, keep: Keep | None, disjoint: bool = False
    ) -> None:
        """Copy all planes of all layers, as if every source were read before any write."""
        limit = self._views.num_slots
        chosen = self._kept(dst_slots, limit, keep)
        dst, src = _Spots(chosen.ids), _Spots(self._guarded(chosen.rows(src_slots), limit))
        for plane in self._bytes.values():
            for layer in plane.raw:
                layer[dst.of(plane.slot_parts)] = layer[src.of(plane.slot_parts)]

    def move_pages(self, dst_pages: Tensor, src_pages: Tensor, disjoint: bool = False) -> None:
        """``move`` of whole pages."""
        limit = self._views.num_pages
        chosen = self._kept(dst_pages, limit, None)
        sources = self._guarded(src_pages, limit)
        for plane in self._bytes.values():
            for layer in plane.raw:
                layer[chosen.ids] = layer[sources]

    def zero(self, pages: Tensor, keep: Keep | None) -> None:
        """Every byte of all planes of all layers of ``pages`` becomes 0."""
        chosen = self._kept(pages, self._views.num_pages, keep)
        for plane in self._bytes.values():
            plane.raw[:, chosen.ids] = 0

    def pack(self, pages: Tensor, out: Tensor) -> None:
        """Copy whole pages to ``out`` uint8 [n, image_bytes]."""
        pages = self._guarded(pages, self._views.num_pages)
        for key, plane in self._bytes.items():
            self._image_part(key, out).copy_(plane.raw[:, pages].transpose(0, 1))

    def unpack(self, pages: Tensor, data: Tensor) -> None:
        """The inverse of ``pack``."""
        chosen = self._kept(pages, self._views.num_pages, None)
        for key, plane in self._bytes.items():
            plane.raw[:, chosen.ids] = self._image_part(key, data).transpose(0, 1)

    def _image_part(self, key: str, image: Tensor) -> Tensor:
        """A plane's part of ``image`` uint8 [n, image_bytes], as [n, L, *page] integers."""
        raw, start = self._bytes[key].raw, self._views.image_offsets[key]
        shape = (raw.shape[0], *raw.shape[2:])
        num_bytes = math.prod(shape) * raw.element_size()
        part = image[:, start : start + num_bytes].view(raw.dtype)
        return part.view(image.shape[0], *shape)

    def _decode(
        self, tensor: TensorPlan, layer_index: int, parts: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Tensor:
        constants = self._views.layer_constants(tensor.name, layer_index)
        name = str(dtype).removeprefix("torch.")
        return self._views.codecs[tensor.name].decode(tensor.logical, parts, constants, name)

    def _kept(self, ids: Tensor, limit: int, keep: Keep | None) -> _Chosen:
        """The entries to write: the kept ones on a host, elsewhere all, the others to the sink."""
        if self._on_host:
            if keep is None:
                return _Chosen(ids, None)
            mask = keep.as_mask()
            return _Chosen(ids[mask], mask)
        inside = (ids >= 0) & (ids < limit)
        if keep is not None:
            inside &= keep.as_mask()
        return _Chosen(ids.where(inside, 0), None)

    def _guarded(self, ids: Tensor, limit: int) -> Tensor:
        """Ids that are safe to read: outside a host those beyond the pool become the sink."""
        return ids if self._on_host else ids.where((ids >= 0) & (ids < limit), 0)


@dataclass(frozen=True)
class _Chosen:
    """The ids to write to, and the mask that picks the rows which belong to them."""

    ids: Tensor
    mask: Tensor | None

    def rows(self, values: Tensor) -> Tensor:
        return values if self.mask is None else values[self.mask]


class _Spots:
    """Slots as indices into a layer of ``raw``: page and parts of the offset in it, found once."""

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots
        self._found: dict[tuple[int, ...], tuple[Tensor, ...]] = {}

    def of(self, slot_parts: tuple[int, ...]) -> tuple[Tensor, ...]:
        """(page, offset) of every slot, the offset split into ``slot_parts``."""
        if slot_parts not in self._found:
            rest = self._slots
            parts: list[Tensor] = []
            for extent in reversed(slot_parts):
                parts.insert(0, rest % extent)
                rest = rest // extent
            self._found[slot_parts] = (rest, *parts)
        return self._found[slot_parts]


@dataclass(frozen=True)
class _PlaneBytes:
    """A plane as integers.

    ``raw`` [layers, pages, *slot parts, *own] holds ``shape`` (the plane's own axes, unsplit, in
    ``dtype``); ``slot_parts`` are the extents into which the offset in a page is split.
    """

    raw: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    slot_parts: tuple[int, ...]

    def take(self, layers: int | slice, spots: _Spots) -> Tensor:
        """Fresh [n, *shape] of one layer, or [L, n, *shape] of a slice of them."""
        where: tuple[Any, ...] = (layers, *spots.of(self.slot_parts))
        found = self.raw[where]
        lead = found.shape[: found.dim() - (self.raw.dim() - 2 - len(self.slot_parts))]
        return self._typed(found).reshape(*lead, *self.shape)

    def put(self, layer_index: int, spots: _Spots, values: Tensor) -> None:
        """Store ``values`` [n, *shape] in ``dtype`` at ``spots`` of a layer."""
        own = self.raw.shape[2 + len(self.slot_parts) :]
        integers = values.contiguous().view(-1).view(self.raw.dtype)
        self.raw[layer_index][spots.of(self.slot_parts)] = integers.view(len(values), *own)

    def _typed(self, integers: Tensor) -> Tensor:
        return integers.contiguous().view(-1).view(self.dtype)


def _plane_bytes(views: GroupViews, plane: PlanePlan) -> _PlaneBytes:
    view = views.planes[plane.key]
    slot_parts = _slot_parts(views.group, plane)
    return _PlaneBytes(
        raw=_widened(view, first_own=2 + len(slot_parts)),
        dtype=view.dtype,
        shape=views.plane_shapes[plane.key],
        slot_parts=slot_parts,
    )


def _slot_parts(group: GroupPlan, plane: PlanePlan) -> tuple[int, ...]:
    if group.kind == "linear":
        return ()
    labels = zip(plane.place.axes, plane.place.shape, strict=True)
    return tuple(extent for label, extent in labels if axis_name(label) == "slot")


def _widened(view: Tensor, first_own: int) -> Tensor:
    """``view`` as the widest integers that its rows allow.

    Only an innermost axis of the plane's own can widen; every start and stride must stay whole.
    """
    size = view.element_size()
    dense = view.dim() > first_own and view.stride(-1) == 1
    offset = view.storage_offset() * size
    outer = [stride * size for stride in view.stride()[:-1]]
    for width in (8, 4, 2) if dense else ():
        fits = [offset, view.shape[-1] * size, *outer]
        if width > size and all(value % width == 0 for value in fits):
            return view.view(_INTEGERS[width])
    return view.view(_INTEGERS[size])


def _check_codec(plane: PlanePlan, values: Tensor) -> None:
    """A codec that returns another type than it planned would be stored as garbage."""
    got = str(values.dtype).removeprefix("torch.")
    if got != plane.dtype:
        raise SpecError(Problem(f"encoded {plane.key}", got, f"{plane.dtype}, as it planned"))
