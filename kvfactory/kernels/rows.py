# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806, RET505
"""Kernels that encode rows into the pool and decode them out of it: all tensors in one launch.

Legend: ``n`` entries of S rows each; a row is D elements of one (slot, head), padded to P. A
program takes R rows of one tensor: x [R, P] -> the codec's tiles [R, p], one per plane. ``slots``
int64 [n]. KEEP: see ``addressing.kept``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfactory.kernels.addressing import checked, count, get, kept
from kvfactory.kernels.tiles import load_constants, load_planes, store_plane
from kvfactory.quant.device.numerics import convert


@triton.constexpr_function
def encoder(tensor):
    """The codec's encode."""
    return tensor.codec.encode


@triton.constexpr_function
def decoder(tensor):
    """The codec's decode."""
    return tensor.codec.decode


@triton.constexpr_function
def options(tensor):
    """The codec's options."""
    return tensor.codec.options


@triton.constexpr_function
def slot_rows(tensor):
    """Rows in a slot."""
    return tensor.slot_rows


@triton.constexpr_function
def step_unit(pointer, aligned):
    """Elements that a step of the rows' own tensor counts: 16 bytes when all is aligned to that."""
    return 128 // pointer.element_ty.primitive_bitwidth if aligned else 1


@triton.constexpr_function
def vectors(tensor, pointer, aligned):
    """Elements in four vectors of 16 bytes, where a thread should load so many side by side.

    Four-bit formats take more to fill 16 bytes encoded than the compiler would give a thread.
    """
    data = tensor.planes[0]
    packed = data.extent * data.itemsize * 2 <= tensor.extent
    elements = 4 * 128 // pointer.element_ty.primitive_bitwidth
    return elements if aligned and packed and tensor.along == 1 and tensor.width >= elements else 0


@triton.constexpr_function
def word_type(pointer):
    """What vectors are loaded as: two elements of 16 bits are one word, which moves whole."""
    return tl.int32 if pointer.element_ty.primitive_bitwidth == 16 else pointer.element_ty


@triton.jit
def _load_rows(start, live, TENSOR: tl.constexpr):
    """The rows [R, P] at ``start`` [R]."""
    inner = tl.arange(0, get(TENSOR, "width"))
    mask = live[:, None] & (inner < get(TENSOR, "extent"))[None, :]
    spots = start[:, None] + (inner * get(TENSOR, "along"))[None, :]
    if get(TENSOR, "width") == get(TENSOR, "extent"):
        return tl.load(spots, mask=mask)  # rows that are not live are not stored either
    else:
        return tl.load(spots, mask=mask, other=0.0)


@triton.jit
def _load_vectors(start, inner, live, TENSOR: tl.constexpr):
    """Rows [R, P] of which a thread gets four neighbouring vectors of 16 bytes.

    Then it owns whole groups of a format and stores 16 encoded bytes, without an exchange.
    ``start`` [R * P / 4 / V] are the addresses of such fours, ``inner`` where they lie in the row.
    """
    ELEMENT: tl.constexpr = start.dtype.element_ty
    WORD: tl.constexpr = word_type(start.dtype)
    V: tl.constexpr = 128 // WORD.primitive_bitwidth
    VECTOR: tl.constexpr = 128 // ELEMENT.primitive_bitwidth
    WIDTH: tl.constexpr = get(TENSOR, "width")
    R: tl.constexpr = start.shape[0] * 4 * VECTOR // WIDTH
    spots = start.to(tl.pointer_type(WORD))[:, None] + tl.arange(0, V)[None, :]
    mask = live[:, None]
    left = get(TENSOR, "extent") - inner[:, None]
    a = tl.load(spots, mask=mask & (left > 0), other=0)
    b = tl.load(spots + V, mask=mask & (left > VECTOR), other=0)
    c = tl.load(spots + 2 * V, mask=mask & (left > 2 * VECTOR), other=0)
    d = tl.load(spots + 3 * V, mask=mask & (left > 3 * VECTOR), other=0)
    four = tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (0, 3, 2, 1))
    words = tl.reshape(four, (R, WIDTH * V // VECTOR))
    if V == VECTOR:
        return words
    else:
        low = words.to(tl.int16).to(ELEMENT, bitcast=True)
        high = (words >> 16).to(tl.int16).to(ELEMENT, bitcast=True)
        return tl.reshape(tl.join(low, high), (R, WIDTH))


@triton.jit
def _source_step(row, first, TENSOR: tl.constexpr):
    """Where rows ``row`` lie in the caller's entry: ``first`` is the step of the outermost axis."""
    AXES: tl.constexpr = count(TENSOR, "row_extents")
    offset = tl.zeros_like(row).to(tl.int64)
    for back in tl.static_range(AXES):
        if back == AXES - 1:
            offset += row.to(tl.int64) * first
        else:
            extent = get(TENSOR, "row_extents", AXES - 1 - back)
            offset += (row % extent).to(tl.int64) * get(TENSOR, "steps", AXES - 1 - back)
            row = row // extent
    return offset


@triton.jit
def write(
    arena, errors, slots, keep, n, width, layer, xs, steps,
    SPEC: tl.constexpr, KEEP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Encode row i of each tensor of ``xs`` into ``slots[i]``.

    ``steps``: per tensor the step from entry to entry and along its outermost own axis, in units
    of 16 bytes if ALIGNED, else in elements.
    """
    start = 0
    for i in tl.static_range(count(SPEC, "tensors")):
        start = write_tensor(
            arena, errors, slots, keep, n, width, layer, xs[i], steps[2 * i], steps[2 * i + 1],
            start, SPEC, i, KEEP, ALIGNED,
        )  # fmt: skip


@triton.jit
def _begin(flat, entry_step, first_step, TENSOR: tl.constexpr):
    """The entries that have the rows ``flat`` of all, and where the rows begin."""
    ROWS: tl.constexpr = slot_rows(TENSOR)
    entry = flat // ROWS
    return entry, entry.to(tl.int64) * entry_step + _source_step(flat % ROWS, first_step, TENSOR)


@triton.jit
def write_tensor(
    arena, errors, slots, keep, n, width, layer, x, entry_step, first_step, start,
    SPEC: tl.constexpr, NTH: tl.constexpr, KEEP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Encode the NTH tensor's rows, by the programs from ``start`` on: where its last one ends."""
    TENSOR: tl.constexpr = get(SPEC, "tensors", NTH)
    R: tl.constexpr = get(TENSOR, "tile_rows")
    ROWS: tl.constexpr = slot_rows(TENSOR)
    tiles = tl.cdiv(n * ROWS, R)
    tile = tl.program_id(0) - start
    if (tile >= 0) & (tile < tiles):
        UNIT: tl.constexpr = step_unit(x.dtype, ALIGNED)
        FOUR: tl.constexpr = vectors(TENSOR, x.dtype, ALIGNED)
        if FOUR:
            EACH: tl.constexpr = get(TENSOR, "width") // FOUR
            spot = tl.arange(0, R * EACH)
            flat = tile * R + spot // EACH
            part = spot % EACH * FOUR
            entry, begin = _begin(flat, entry_step * UNIT, first_step * UNIT, TENSOR)
            values = _load_vectors(x + begin + part, part, entry < n, TENSOR)
        flat = tile * R + tl.arange(0, R)
        entry, begin = _begin(flat, entry_step * UNIT, first_step * UNIT, TENSOR)
        live = entry < n
        if not FOUR:
            values = _load_rows(x + begin, live, TENSOR)
        row = flat % ROWS
        inner = tl.arange(0, get(TENSOR, "width"))
        live = kept(keep, width, entry, live, KEEP)
        slot = tl.load(slots + entry, mask=live, other=0)
        live = checked(slot, live, errors, get(SPEC, "limit"), get(SPEC, "message"))
        constants = load_constants(arena, layer, row, inner, TENSOR)
        ENCODE: tl.constexpr = encoder(TENSOR)
        tiles_out = ENCODE(values, constants, options(TENSOR))
        for plane in tl.static_range(count(TENSOR, "planes")):
            store_plane(arena, layer, slot, row, live, tiles_out[plane], SPEC, TENSOR, plane)
    return start + tiles


@triton.jit
def read(
    arena, errors, slots, n, layer, outs,
    SPEC: tl.constexpr,
):  # fmt: skip
    """Decode ``slots`` into rows of each tensor of ``outs``, contiguous [n, *axes]."""
    start = 0
    for i in tl.static_range(count(SPEC, "tensors")):
        start = _read_tensor(arena, errors, slots, n, layer, outs[i], start, SPEC, i)


@triton.jit
def _read_tensor(
    arena, errors, slots, n, layer, out, start, SPEC: tl.constexpr, NTH: tl.constexpr
):  # fmt: skip
    TENSOR: tl.constexpr = get(SPEC, "tensors", NTH)
    R: tl.constexpr = get(TENSOR, "tile_rows")
    ROWS: tl.constexpr = slot_rows(TENSOR)
    tiles = tl.cdiv(n * ROWS, R)
    tile = tl.program_id(0) - start
    if (tile >= 0) & (tile < tiles):
        flat = tile * R + tl.arange(0, R)
        entry, row = flat // ROWS, flat % ROWS
        inner = tl.arange(0, get(TENSOR, "width"))
        wanted = entry < n
        slot = tl.load(slots + entry, mask=wanted, other=0)
        live = checked(slot, wanted, errors, get(SPEC, "limit"), get(SPEC, "message"))
        planes = load_planes(arena, layer, slot, row, live, SPEC, TENSOR)
        constants = load_constants(arena, layer, row, inner, TENSOR)
        DECODE: tl.constexpr = decoder(TENSOR)
        values = DECODE(planes, constants, options(TENSOR))
        values = convert(values, out.dtype.element_ty)
        begin = entry.to(tl.int64) * get(TENSOR, "elements")
        begin += _source_step(row, get(TENSOR, "steps", 0), TENSOR)
        mask = wanted[:, None] & (inner < get(TENSOR, "extent"))[None, :]
        tl.store(out + begin[:, None] + (inner * get(TENSOR, "along"))[None, :], values, mask=mask)
    return start + tiles
