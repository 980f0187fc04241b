"""Views of a group's planes and constants over the byte arena, in logical order.

The planner has decided where every element lies; here it only becomes ``as_strided``. Everything
that touches bytes works on these views, so no operation knows a layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvfactory.errors import BuildError, Problem
from kvfactory.kinds import align_up
from kvfactory.layouts import axis_name
from kvfactory.planning.cacheplan import GroupPlan, PlanePlan
from kvfactory.quant import Codec, resolve_codec
from kvfactory.quant.numerics import torch_dtype

IMAGE_ALIGN_BYTES = 16


@dataclass(frozen=True)
class GroupViews:
    """One group on its arena.

    ``planes``: key -> view [layers, pages, slots, *axes] in the plane's own type ([layers, pages,
    *axes] for states), a split axis as two. ``constants``: tensor name -> constant name -> float32
    [layers, *shape]. ``codecs``: tensor name -> the codec that stores it. ``num_pages`` counts the
    sink, page 0. ``plane_shapes``: key -> a plane's own axes in whole, unsplit form, slot excluded.
    ``image_offsets``: key -> where the plane starts in a packed page of ``image_bytes``, both in
    multiples of 16 bytes.
    """

    group: GroupPlan
    arena: Tensor
    num_pages: int
    planes: Mapping[str, Tensor]
    constants: Mapping[str, Mapping[str, Tensor]]
    codecs: Mapping[str, Codec]
    plane_shapes: Mapping[str, tuple[int, ...]]
    image_offsets: Mapping[str, int]
    image_bytes: int

    @property
    def num_slots(self) -> int:
        """Entries that the pool holds, the sink's included; slots below this are valid."""
        return self.num_pages * self.group.page_slots

    @property
    def stateful(self) -> bool:
        """Whether this is a state group: no slot axis, a page is a state slot."""
        return self.group.kind == "linear"

    @cached_property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor name -> its own axes, in which rows are given."""
        tensors = self.group.tensors
        return {t.name: tuple(extent for _, extent in t.logical.axes) for t in tensors}

    def layer_constants(self, tensor: str, layer_index: int) -> dict[str, Tensor]:
        """Constant name -> float32 [*shape] of one layer, views into the arena."""
        return {name: table[layer_index] for name, table in self.constants[tensor].items()}


def group_views(group: GroupPlan, arena: Tensor) -> GroupViews:
    """The views of ``group`` over ``arena``, uint8 [bytes] on any device, meta included.

    Raises:
        BuildError: ``arena`` is not a flat uint8 tensor that covers the group's bytes.
        SpecError: a codec that the plan names is not installed here.
    """
    _check_arena(group, arena)
    planes = {plane.key: strided(arena, plane) for plane in group.planes}
    constants = {
        tensor.name: {
            table.name: _floats(arena, table.offset, (len(group.layers), *table.shape))
            for table in tensor.constants
        }
        for tensor in group.tensors
    }
    codecs = {
        tensor.name: resolve_codec(tensor.quant, dict(tensor.options), f"quant of {tensor.name}")
        for tensor in group.tensors
    }
    shapes = {plane.key: _own_shape(group, plane) for plane in group.planes}
    offsets, image_bytes = _image(group)
    return GroupViews(
        group=group,
        arena=arena,
        num_pages=group.planes[0].place.shape[1],
        planes=planes,
        constants=constants,
        codecs=codecs,
        plane_shapes=shapes,
        image_offsets=offsets,
        image_bytes=image_bytes,
    )


def strided(arena: Tensor, plane: PlanePlan) -> Tensor:
    """``plane`` over ``arena`` uint8 [bytes], in its own type and logical order."""
    place = plane.place
    typed = arena.view(torch_dtype(plane.dtype))
    strides = [stride // place.itemsize for stride in place.strides]
    offset = typed.storage_offset() + place.offset // place.itemsize
    return typed.as_strided(place.shape, strides, offset)


def _floats(arena: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    return arena[offset : offset + 4 * math.prod(shape)].view(torch.float32).view(shape)


def _own_shape(group: GroupPlan, plane: PlanePlan) -> tuple[int, ...]:
    """A plane's extents without layer, page and slot, the two parts of a split multiplied."""
    sizes: dict[str, int] = {}
    for label, extent in zip(plane.place.axes, plane.place.shape, strict=True):
        name = axis_name(label)
        sizes[name] = sizes.get(name, 1) * extent
    skipped = {"layer", "page"} | ({"slot"} if group.kind != "linear" else set())
    return tuple(extent for name, extent in sizes.items() if name not in skipped)


def _image(group: GroupPlan) -> tuple[dict[str, int], int]:
    """Where every plane starts in a packed page, and the bytes of one."""
    offsets, cursor = {}, 0
    for plane in group.planes:
        offsets[plane.key] = cursor
        num_bytes = plane.place.shape[0] * plane.place.page_bytes
        cursor = align_up(cursor + num_bytes, IMAGE_ALIGN_BYTES)
    return offsets, cursor


def _check_arena(group: GroupPlan, arena: Tensor) -> None:
    path = f"arena of group {group.name}"
    if arena.dtype != torch.uint8 or arena.dim() != 1 or not arena.is_contiguous():
        got = f"{arena.dtype} {list(arena.shape)}"
        raise BuildError(Problem(path, got, "a contiguous uint8 tensor [bytes]"))
    ends = [group.offset + group.num_bytes]
    for tensor in group.tensors:
        for table in tensor.constants:
            ends.append(table.offset + 4 * len(group.layers) * math.prod(table.shape))
    if arena.numel() < max(ends):
        need = f"at least {max(ends)} bytes, as planned"
        raise BuildError(Problem(path, f"{arena.numel()} bytes", need))
