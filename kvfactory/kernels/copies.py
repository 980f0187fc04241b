# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806
"""Kernels that copy bytes: move, zero, and pool <-> dense images; one launch for all planes.

Legend: units are pages or slots, ``n`` of them; a part of a unit is ``total`` words. A program
takes a tile [U units, W words] of one part. ``ids`` int64 [n]. KEEP: see ``addressing.kept``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfactory.kernels.addressing import checked, count, get, kept, unit_step


@triton.constexpr_function
def word_type(part):
    """The integer type of the part's words."""
    return {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[part.word_bytes]


@triton.constexpr_function
def words_in(part, num_bytes):
    """Words of the part that ``num_bytes`` hold, at least one."""
    return max(1, num_bytes // part.word_bytes)


@triton.constexpr_function
def chunks(part):
    """Programs that share the words of a unit."""
    return -(-part.total // part.width)


@triton.constexpr_function
def pool_steps(part):
    """The steps of the part's dims in the pool."""
    return part.dims[1::2]


@triton.constexpr_function
def image_steps(part):
    """The steps of the part's dims in the image."""
    return part.dense


@triton.jit
def _units_and_words(tile, PART: tl.constexpr):
    """The units [U] and words [W] of program ``tile``."""
    U: tl.constexpr = get(PART, "units")
    W: tl.constexpr = get(PART, "width")
    unit = tile // chunks(PART) * U + tl.arange(0, U)
    return unit, tile % chunks(PART) * W + tl.arange(0, W)


@triton.jit
def _spread(word, STEPS: tl.constexpr, PART: tl.constexpr):
    """Where words ``word`` of a unit lie from the unit's begin: dims innermost first."""
    PAIRS: tl.constexpr = count(PART, "dims") // 2
    offset = tl.zeros_like(word).to(tl.int64)
    for pair in tl.static_range(PAIRS):
        if pair == PAIRS - 1:
            offset += word.to(tl.int64) * STEPS[pair]
        else:
            index = word % get(PART, "dims", 2 * pair)
            offset += index.to(tl.int64) * STEPS[pair]
            word = word // get(PART, "dims", 2 * pair)
    return offset


@triton.jit
def _pointers(arena, ids, word, SPEC: tl.constexpr, PART: tl.constexpr):
    """Addresses [U, W] in the arena of ``word`` [W] of units ``ids`` [U]."""
    begin = unit_step(ids, PART, get(SPEC, "page_slots"), get(SPEC, "limit"))
    base = arena.to(tl.pointer_type(word_type(PART))) + get(PART, "offset")
    return base + begin[:, None] + _spread(word, pool_steps(PART), PART)[None, :]


@triton.jit
def _move_tile(
    arena, errors, dst, src, keep, n, unit, word,
    SPEC: tl.constexpr, PART: tl.constexpr, KEEP: tl.constexpr, READ_FIRST: tl.constexpr,
):  # fmt: skip
    live = kept(keep, 1, unit, unit < n, KEEP)
    source = tl.load(src + unit, mask=live, other=0)
    target = tl.load(dst + unit, mask=live, other=0)
    live = checked(source, live, errors, get(SPEC, "limit"), get(SPEC, "message"))
    live = checked(target, live, errors, get(SPEC, "limit"), get(SPEC, "message"))
    mask = live[:, None] & (word < get(PART, "total"))[None, :]
    values = tl.load(_pointers(arena, source, word, SPEC, PART), mask=mask)
    if READ_FIRST:
        tl.debug_barrier()
    tl.store(_pointers(arena, target, word, SPEC, PART), values, mask=mask)


@triton.jit
def move(
    arena, errors, dst, src, keep, n,
    SPEC: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Copy units ``src`` [n] to ``dst`` [n], which have no unit in common."""
    start = 0
    for i in tl.static_range(count(SPEC, "parts")):
        start = _move_part(arena, errors, dst, src, keep, n, start, SPEC, i, KEEP)


@triton.jit
def _move_part(
    arena, errors, dst, src, keep, n, start,
    SPEC: tl.constexpr, NTH: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = get(SPEC, "parts", NTH)
    tiles = tl.cdiv(n, get(PART, "units")) * chunks(PART)
    tile = tl.program_id(0) - start
    if (tile >= 0) & (tile < tiles):
        unit, word = _units_and_words(tile, PART)
        _move_tile(arena, errors, dst, src, keep, n, unit, word, SPEC, PART, KEEP, False)
    return start + tiles


@triton.jit
def move_together(
    arena, errors, dst, src, keep, n,
    SPEC: tl.constexpr, KEEP: tl.constexpr, U: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Copy units ``src`` [n] to ``dst`` [n], n <= U, as if all were read before any is written.

    Words only ever meet the same words of other units, so a program that holds some words of all
    units needs to wait for nobody else: it reads them all, then writes.
    """
    start = 0
    for i in tl.static_range(count(SPEC, "parts")):
        start = _together_part(arena, errors, dst, src, keep, n, start, SPEC, i, KEEP, U, BYTES)


@triton.jit
def _together_part(
    arena, errors, dst, src, keep, n, start,
    SPEC: tl.constexpr, NTH: tl.constexpr, KEEP: tl.constexpr, U: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = get(SPEC, "parts", NTH)
    W: tl.constexpr = words_in(PART, BYTES)
    tiles = tl.cdiv(get(PART, "total"), W)
    tile = tl.program_id(0) - start
    if (tile >= 0) & (tile < tiles):
        unit, word = tl.arange(0, U), tile * W + tl.arange(0, W)
        _move_tile(arena, errors, dst, src, keep, n, unit, word, SPEC, PART, KEEP, True)
    return start + tiles


@triton.jit
def zero(
    arena, errors, ids, keep, n,
    SPEC: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Every byte of units ``ids`` becomes 0."""
    start = 0
    for i in tl.static_range(count(SPEC, "parts")):
        start = _zero_part(arena, errors, ids, keep, n, start, SPEC, i, KEEP)


@triton.jit
def _zero_part(
    arena, errors, ids, keep, n, start,
    SPEC: tl.constexpr, NTH: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = get(SPEC, "parts", NTH)
    tiles = tl.cdiv(n, get(PART, "units")) * chunks(PART)
    tile = tl.program_id(0) - start
    if (tile >= 0) & (tile < tiles):
        unit, word = _units_and_words(tile, PART)
        live = kept(keep, 1, unit, unit < n, KEEP)
        target = tl.load(ids + unit, mask=live, other=0)
        live = checked(target, live, errors, get(SPEC, "limit"), get(SPEC, "message"))
        mask = live[:, None] & (word < get(PART, "total"))[None, :]
        values = tl.zeros((get(PART, "units"), get(PART, "width")), word_type(PART))
        tl.store(_pointers(arena, target, word, SPEC, PART), values, mask=mask)
    return start + tiles


@triton.jit
def copy_dense(
    arena, errors, ids, keep, n, width, layer, dense,
    SPEC: tl.constexpr, KEEP: tl.constexpr, INTO: tl.constexpr, IMAGE: tl.constexpr,
):  # fmt: skip
    """Units ``ids`` [n] to dense memory, or with INTO from it.

    IMAGE: ``dense`` is one tensor of rows of ``image_bytes``, a unit each, parts at their places.
    Else it is a tuple with a tensor [L or nothing, n, words] per part.
    """
    start = 0
    for i in tl.static_range(count(SPEC, "parts")):
        if IMAGE:
            target = dense
        else:
            target = dense[i]
        start = _dense_part(
            arena, errors, ids, keep, n, width, layer, target, start, SPEC, i, KEEP, INTO, IMAGE
        )


@triton.jit
def _dense_part(
    arena, errors, ids, keep, n, width, layer, dense, start,
    SPEC: tl.constexpr, NTH: tl.constexpr, KEEP: tl.constexpr, INTO: tl.constexpr,
    IMAGE: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = get(SPEC, "parts", NTH)
    RUN: tl.constexpr = get(PART, "run")
    tiles = tl.cdiv(n, get(PART, "units")) * chunks(PART)
    tile = tl.program_id(0) - start
    if (tile >= 0) & (tile < tiles):
        unit, word = _units_and_words(tile, PART)
        live = kept(keep, width, unit, unit < n, KEEP)
        spot = tl.load(ids + unit, mask=live, other=0)
        inside = checked(spot, live, errors, get(SPEC, "limit"), get(SPEC, "message"))
        pool = _pointers(arena, spot, word, SPEC, PART)
        pool += layer.to(tl.int64) * get(PART, "layer")
        image = dense.to(tl.pointer_type(word_type(PART)))
        if IMAGE:
            row = unit.to(tl.int64) * (get(SPEC, "image_bytes") // get(PART, "word_bytes"))
            if count(PART, "dense") == 0:
                place = word
            else:
                place = _spread(word, image_steps(PART), PART)
            image += row[:, None] + (place + get(PART, "image"))[None, :]
        elif RUN == get(PART, "total"):
            image += unit.to(tl.int64)[:, None] * RUN + word[None, :]
        else:
            outer = (word // RUN).to(tl.int64) * n * RUN
            image += unit.to(tl.int64)[:, None] * RUN + (outer + word % RUN)[None, :]
        whole = (word < get(PART, "total"))[None, :]
        if INTO:
            values = tl.load(image, mask=live[:, None] & whole)
            tl.store(pool, values, mask=inside[:, None] & whole)
        else:
            values = tl.load(pool, mask=inside[:, None] & whole, other=0)
            tl.store(image, values, mask=live[:, None] & whole)
    return start + tiles
