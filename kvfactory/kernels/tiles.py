# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806, RET505
"""What codecs take from a pool and leave in it: a tile for each plane of a tensor, and constants.

Legend: a row is D elements of one (slot, head), padded to P; tiles are [R, p], one per plane.
``slot`` and ``row`` (its index within the slot) [R], ``inner`` [P] the elements of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfactory.kernels.addressing import along, count, get, unit_step
from kvfactory.quant.device.numerics import DTYPES


@triton.constexpr_function
def tile_type(plane):
    """The type in which codecs see the plane: eight-bit floats are bytes."""
    if plane.dtype.startswith("float8"):
        return tl.uint8
    return DTYPES[plane.dtype]


@triton.constexpr_function
def tile_width(tensor, plane):
    """Padded elements along the rows that a plane's tile has."""
    if plane.along == (1, 0, 0):
        return 1
    width = plane.extent * tensor.width // tensor.extent
    return 1 << (width - 1).bit_length()


@triton.constexpr_function
def layer_only(constant):
    """Whether the constant is one value a layer."""
    return constant.along == 0 and not any(constant.rows)


@triton.jit
def _row_step(row, TENSOR: tl.constexpr, PLACE: tl.constexpr):
    """Where rows ``row`` (index within a slot) lie in a plane."""
    AXES: tl.constexpr = count(TENSOR, "row_extents")
    offset = tl.zeros_like(row).to(tl.int64)
    for back in tl.static_range(AXES):
        if back == AXES - 1:
            offset += along(row, get(PLACE, "rows", 0))
        else:
            extent = get(TENSOR, "row_extents", AXES - 1 - back)
            offset += along(row % extent, get(PLACE, "rows", AXES - 1 - back))
            row = row // extent
    return offset


@triton.jit
def _constant(arena, layer, row, inner, TENSOR: tl.constexpr, NTH: tl.constexpr):
    """The NTH constant of the rows, float32: a scalar, or a tile broadcastable to [R, P]."""
    TABLE: tl.constexpr = get(TENSOR, "constants", NTH)
    base = arena.to(tl.pointer_type(tl.float32)) + get(TABLE, "offset")
    base += layer * get(TABLE, "layer")
    if layer_only(TABLE):
        return tl.load(base)
    else:
        AXES: tl.constexpr = count(TENSOR, "row_extents")
        offset = tl.zeros_like(row)
        for back in tl.static_range(AXES):
            extent = get(TENSOR, "row_extents", AXES - 1 - back)
            offset += (row % extent) * get(TABLE, "rows", AXES - 1 - back)
            row = row // extent
        if get(TABLE, "along") == 0:
            return tl.load(base + offset)[:, None]
        else:
            spots = base + offset[:, None] + (inner * get(TABLE, "along"))[None, :]
            return tl.load(spots, mask=(inner < get(TENSOR, "extent"))[None, :], other=0.0)


@triton.jit
def load_constants(arena, layer, row, inner, TENSOR: tl.constexpr):
    """All constants of the codec, in order."""
    MANY: tl.constexpr = count(TENSOR, "constants")
    tl.static_assert(MANY <= 3, "at most three constants a tensor")
    if MANY == 0:
        return ()
    elif MANY == 1:
        return (_constant(arena, layer, row, inner, TENSOR, 0),)
    elif MANY == 2:
        return (
            _constant(arena, layer, row, inner, TENSOR, 0),
            _constant(arena, layer, row, inner, TENSOR, 1),
        )
    else:
        return (
            _constant(arena, layer, row, inner, TENSOR, 0),
            _constant(arena, layer, row, inner, TENSOR, 1),
            _constant(arena, layer, row, inner, TENSOR, 2),
        )


@triton.jit
def _plane_spots(
    arena, layer, slot, row,
    SPEC: tl.constexpr, TENSOR: tl.constexpr, PLANE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Addresses [R, WIDTH] of a plane's elements of rows ``row`` at ``slot``."""
    begin = unit_step(slot, PLANE, get(SPEC, "page_slots"), get(SPEC, "limit"))
    begin += _row_step(row, TENSOR, PLANE) + layer.to(tl.int64) * get(PLANE, "layer")
    base = arena.to(tl.pointer_type(tile_type(PLANE))) + get(PLANE, "offset")
    return base + begin[:, None] + along(tl.arange(0, WIDTH), get(PLANE, "along"))[None, :]


@triton.jit
def store_plane(
    arena, layer, slot, row, live, tile,
    SPEC: tl.constexpr, TENSOR: tl.constexpr, NTH: tl.constexpr,
):  # fmt: skip
    """Store the tile [R, p] of the NTH plane for the rows that are ``live`` [R]."""
    PLANE: tl.constexpr = get(TENSOR, "planes", NTH)
    WIDTH: tl.constexpr = tile_width(TENSOR, PLANE)
    BITS: tl.constexpr = tile.dtype.primitive_bitwidth
    tl.static_assert(BITS == 8 * get(PLANE, "itemsize"), "a tile of another size than its plane")
    mask = live[:, None] & (tl.arange(0, WIDTH) < get(PLANE, "extent"))[None, :]
    spots = _plane_spots(arena, layer, slot, row, SPEC, TENSOR, PLANE, WIDTH)
    tl.store(spots, tile.to(tile_type(PLANE), bitcast=True), mask=mask)


@triton.jit
def _load_plane(
    arena, layer, slot, row, live,
    SPEC: tl.constexpr, TENSOR: tl.constexpr, NTH: tl.constexpr,
):  # fmt: skip
    PLANE: tl.constexpr = get(TENSOR, "planes", NTH)
    WIDTH: tl.constexpr = tile_width(TENSOR, PLANE)
    mask = live[:, None] & (tl.arange(0, WIDTH) < get(PLANE, "extent"))[None, :]
    return tl.load(
        _plane_spots(arena, layer, slot, row, SPEC, TENSOR, PLANE, WIDTH), mask=mask, other=0
    )


@triton.jit
def load_planes(
    arena, layer, slot, row, live, SPEC: tl.constexpr, TENSOR: tl.constexpr
):  # fmt: skip
    """The tiles of all planes, in order."""
    MANY: tl.constexpr = count(TENSOR, "planes")
    tl.static_assert(MANY <= 3, "at most three planes a tensor")
    if MANY == 1:
        return (_load_plane(arena, layer, slot, row, live, SPEC, TENSOR, 0),)
    elif MANY == 2:
        return (
            _load_plane(arena, layer, slot, row, live, SPEC, TENSOR, 0),
            _load_plane(arena, layer, slot, row, live, SPEC, TENSOR, 1),
        )
    else:
        return (
            _load_plane(arena, layer, slot, row, live, SPEC, TENSOR, 0),
            _load_plane(arena, layer, slot, row, live, SPEC, TENSOR, 1),
            _load_plane(arena, layer, slot, row, live, SPEC, TENSOR, 2),
        )
