"""From a group's plan to what its kernels bake in."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvfactory.kernels.baked import ConstantSpec, CopySpec, PlaneSpec, RowsSpec, TensorSpec
from kvfactory.kernels.parts import (
    axis_steps,
    byte_image,
    byte_parts,
    in_pool_order,
    linear_step,
    placed,
    plane_parts,
)
from kvfactory.layouts import axis_name
from kvfactory.planning.cacheplan import ConstantPlan, GroupPlan, PlanePlan, TensorPlan
from kvfactory.pools import GroupViews
from kvfactory.quant.codec import DeviceCodec

TILE_ELEMENTS = 2048
"""Elements that one program encodes or decodes."""

WARPS = 2
"""Warps of a program, which has 32 elements or 64 bytes a thread."""


def rows_spec(views: GroupViews, codecs: Sequence[DeviceCodec], names: Sequence[str]) -> RowsSpec:
    """What write and read bake in for the tensors ``names``; ``codecs`` are theirs."""
    group = views.group
    tensors = [group.tensor(name) for name in names]
    return RowsSpec(
        tensors=tuple(
            _tensor(views, tensor, codec) for tensor, codec in zip(tensors, codecs, strict=True)
        ),
        page_slots=group.page_slots,
        limit=views.num_slots,
        message=_message(group, "slot"),
    )


def move_spec(views: GroupViews, by_slot: bool) -> CopySpec:
    """What copies within the pool and zeroing bake in, for slots or for pages."""
    parts = byte_parts(views.group, by_slot)
    return CopySpec(
        parts=parts,
        page_slots=views.group.page_slots if by_slot else 1,
        limit=views.num_slots if by_slot else views.num_pages,
        image_bytes=byte_image(parts),
        message=_message(views.group, "slot" if by_slot else "page"),
    )


def image_spec(views: GroupViews, into: bool) -> CopySpec:
    """What pack, or with ``into`` unpack, bakes in: pages, images of planes in logical order.

    Parts of short words (scales in another order than the pool's) come first: they would end a
    launch with little in flight.
    """
    group = views.group
    parts = plane_parts(group, views.image_offsets, by_slot=False, every_layer=True)
    return CopySpec(
        parts=tuple(
            in_pool_order(part) if into else part
            for part in sorted(parts, key=lambda part: part.word_bytes)
        ),
        page_slots=1,
        limit=views.num_pages,
        image_bytes=views.image_bytes,
        message=_message(group, "page"),
    )


def gather_spec(views: GroupViews, every_layer: bool) -> CopySpec:
    """What gather and write_encoded bake in: slots, a dense tensor per plane."""
    group = views.group
    starts = dict.fromkeys(views.image_offsets, 0)
    return CopySpec(
        parts=plane_parts(group, starts, by_slot=True, every_layer=every_layer),
        page_slots=group.page_slots,
        limit=views.num_slots,
        image_bytes=0,
        message=_message(group, "slot"),
    )


def _message(group: GroupPlan, unit: str) -> str:
    return f"table {group.table}: a {unit} outside the pool of group {group.name}"


def _tensor(views: GroupViews, tensor: TensorPlan, codec: DeviceCodec) -> TensorSpec:
    group = views.group
    constants = views.codecs[tensor.name].constants(tensor.logical)
    axes = tensor.logical.axes
    names = [name for name, _ in axes]
    dense = [math.prod(extent for _, extent in axes[i + 1 :]) for i in range(len(axes))]
    position = names.index(codec.axis)
    extent = axes[position][1]
    others = [i for i in range(len(axes)) if i != position]
    width = 1 << (extent - 1).bit_length()
    row_names = [names[i] for i in others] or [""]
    return TensorSpec(
        codec=codec,
        row_extents=tuple(axes[i][1] for i in others) or (1,),
        extent=extent,
        width=width,
        steps=tuple(dense[i] for i in others) or (extent,),
        along=dense[position],
        elements=tensor.logical.elements,
        planes=tuple(_plane(group, plane, row_names, codec.axis) for plane in tensor.planes),
        constants=tuple(
            _constant(table, [name for name, _ in known.axes], codec.axis, row_names)
            for table, known in zip(tensor.constants, constants, strict=True)
        ),
        tile_rows=max(1, TILE_ELEMENTS // width),
    )


def _plane(group: GroupPlan, plane: PlanePlan, rows: Sequence[str], axis: str) -> PlaneSpec:
    size = plane.place.itemsize
    spot = placed(plane.place, group.kind == "linear")
    own: dict[str, list[tuple[int, int]]] = {}
    for label, (extent, step) in zip(spot.own_labels, spot.own, strict=True):
        own.setdefault(axis_name(label), []).append((extent, step // size))
    slot = tuple((extent, step // size) for extent, step in spot.slot)
    page = spot.page[1] // size
    along = own.get(axis, [])
    return PlaneSpec(
        offset=spot.offset // size,
        layer=spot.layer[1] // size,
        page=page,
        slot=axis_steps(slot),
        slot_step=linear_step(page, slot),
        rows=tuple(axis_steps(own.get(name, [])) for name in rows),
        along=axis_steps(along),
        extent=math.prod(extent for extent, _ in along),
        dtype=plane.dtype,
        itemsize=size,
    )


def _constant(
    table: ConstantPlan, axes: Sequence[str], along: str, rows: Sequence[str]
) -> ConstantSpec:
    steps = {name: math.prod(table.shape[position + 1 :]) for position, name in enumerate(axes)}
    return ConstantSpec(
        offset=table.offset // 4,
        layer=math.prod(table.shape),
        rows=tuple(steps.get(name, 0) for name in rows),
        along=steps.get(along, 0),
    )
