"""A reference store: rows in plain arrays, and a second arena kept by address arithmetic alone.

Nothing here uses views of a pool. Rows are encoded and decoded by the codec itself; where a row's
bytes belong in the arena is computed from the plan's offsets and strides, element by element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfactory.planning.cacheplan import GroupPlan, PlanePlan
from kvfactory.quant import resolve_codec
from kvfactory.quant.numerics import torch_dtype

Bytes = NDArray[np.uint8]
POISON = 0xA5


def as_bytes(values: Tensor, rows: int) -> Bytes:
    """Any tensor [rows, ...] as bytes [rows, row bytes]."""
    flat = values.contiguous().view(-1).view(torch.uint8).numpy()
    return flat.reshape(rows, flat.size // rows if rows else 0)


class Addresses:
    """Byte offsets of a plane's elements from the arena's start."""

    def __init__(self, group: GroupPlan, plane: PlanePlan) -> None:
        place, self.page_slots = plane.place, group.page_slots
        self.has_slots = group.kind != "linear"
        sizes = dict(zip(place.axes, zip(place.shape, place.strides, strict=True), strict=True))
        self.layer, self.page = sizes.pop("layer")[1], sizes.pop("page")[1]
        slot = {label: sizes.pop(label) for label in place.axes if self._is_slot(label)}
        self.slot = [(label, stride) for label, (_, stride) in slot.items()]
        own = np.zeros(1, np.int64)
        for extent, stride in sizes.values():
            own = (own[:, None] + np.arange(extent) * stride).reshape(-1)
        self.own = (own[:, None] + np.arange(place.itemsize)).reshape(-1)
        self.offset = place.offset

    def _is_slot(self, label: str) -> bool:
        return self.has_slots and label.replace("%", "/").split("/")[0] == "slot"

    def of(self, layer: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Offsets int64 [n, row bytes] of the rows at ``slots``."""
        base = self.offset + layer * self.layer + slots // self.page_slots * self.page
        inside = slots % self.page_slots
        for label, stride in self.slot:
            if "/" in label:
                base = base + inside // int(label.split("/")[1]) * stride
            elif "%" in label:
                base = base + inside % int(label.split("%")[1]) * stride
            else:
                base = base + inside * stride
        return base[:, None] + self.own


class Reference:
    """Rows of one group as a pool should hold them: ``rows[key]`` uint8 [layers, slots, bytes].

    ``arena`` is what the whole arena should be; everything starts as poison in the group's region.
    """

    def __init__(self, group: GroupPlan, arena: Bytes) -> None:
        self.group, self.arena = group, arena
        self.num_pages = group.planes[0].place.shape[1]
        self.num_slots = self.num_pages * group.page_slots
        self.addresses = {plane.key: Addresses(group, plane) for plane in group.planes}
        layers = len(group.layers)
        self.rows = {
            key: np.full((layers, self.num_slots, spot.own.size), POISON, np.uint8)
            for key, spot in self.addresses.items()
        }
        self.codecs = {
            t.name: resolve_codec(t.quant, dict(t.options), t.name) for t in group.tensors
        }
        self.constants: dict[str, dict[str, Tensor]] = {
            t.name: {c.name: torch.full((layers, *c.shape), c.default) for c in t.constants}
            for t in group.tensors
        }

    def set_constants(self, values: Mapping[tuple[int, str, str], Tensor]) -> None:
        """Values by (model layer, tensor, name), in the arena too."""
        for (layer, tensor, name), value in values.items():
            index = self.group.layers.index(layer)
            table = self.constants[tensor][name]
            table[index] = value
            for plan in self.group.tensor(tensor).constants:
                if plan.name == name:
                    size = 4 * table[0].numel()
                    start = plan.offset + index * size
                    row = table[index].contiguous().view(-1).view(torch.uint8)
                    self.arena[start : start + size] = row.numpy()

    def encode(self, layer: int, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Planes by key of rows by tensor name."""
        found = {}
        for tensor in self.group.tensors:
            constants = {name: t[layer] for name, t in self.constants[tensor.name].items()}
            codec = self.codecs[tensor.name]
            parts = codec.encode(tensor.logical, given[tensor.name], constants)
            found |= {plane.key: parts[plane.part] for plane in tensor.planes}
        return found

    def decode(self, layer: int, slots: Sequence[int], dtype: str) -> dict[str, Tensor]:
        """Values by tensor name of stored rows."""
        found = {}
        for tensor in self.group.tensors:
            constants = {name: t[layer] for name, t in self.constants[tensor.name].items()}
            parts = {
                plane.part: torch.from_numpy(self.rows[plane.key][layer, list(slots)])
                .view(-1)
                .view(torch_dtype(plane.dtype))
                .view(len(slots), *_own_shape(plane, tensor.logical.axes))
                for plane in tensor.planes
            }
            codec = self.codecs[tensor.name]
            found[tensor.name] = codec.decode(tensor.logical, parts, constants, dtype)
        return found

    def store(self, layer: int, slots: Sequence[int], planes: Mapping[str, Tensor]) -> None:
        """Put encoded rows at ``slots``."""
        for key, values in planes.items():
            self._poke(key, layer, np.array(slots, np.int64), as_bytes(values, len(slots)))

    def move(self, dst: Sequence[int], src: Sequence[int]) -> None:
        """Copy rows of all planes and layers, sources first."""
        for key, rows in self.rows.items():
            for layer in range(len(self.group.layers)):
                self._poke(key, layer, np.array(dst, np.int64), rows[layer, list(src)].copy())

    def zero(self, slots: Sequence[int]) -> None:
        """Clear rows of all planes and layers."""
        for key, rows in self.rows.items():
            for layer in range(len(self.group.layers)):
                self._poke(key, layer, np.array(slots, np.int64), np.zeros_like(rows[layer, slots]))

    def take(self, other: Reference, dst: Sequence[int], src: Sequence[int]) -> None:
        """Copy rows of all planes and layers out of ``other``."""
        for key, rows in other.rows.items():
            for layer in range(len(self.group.layers)):
                self._poke(key, layer, np.array(dst, np.int64), rows[layer, list(src)])

    def _poke(self, key: str, layer: int, slots: NDArray[np.int64], rows: Bytes) -> None:
        self.rows[key][layer, slots] = rows
        self.arena[self.addresses[key].of(layer, slots)] = rows

    def slots_of(self, pages: Sequence[int]) -> list[int]:
        """All slots of ``pages``, in order."""
        per = self.group.page_slots
        return [page * per + offset for page in pages for offset in range(per)]


def _own_shape(plane: PlanePlan, axes: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    """A plane's own extents; a plane of a tensor has a subset of the tensor's axes."""
    sizes: dict[str, Any] = {}
    for label, extent in zip(plane.place.axes, plane.place.shape, strict=True):
        name = label.replace("%", "/").split("/")[0]
        sizes[name] = sizes.get(name, 1) * extent
    return tuple(sizes[name] for name, _ in axes if name in sizes)
