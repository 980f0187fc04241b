# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806
"""The kernel that turns a step's lengths into what attention reads, for all tables at once.

Legend: B batch entries of ``q_indptr[b]:q_indptr[b + 1]`` new tokens each; P tokens a page. Program
(table, b, part) lists the pages of entry b and finds the slots of its new tokens, ``parts``
programs taking turns at blocks. All arrays are fields of one open step, ``shift`` bytes behind the
first one's; all int32 but the int64 ``slots`` and ``positions``. The specification is
``steps.indexing``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfactory.kernels.addressing import count, get


@triton.jit
def _ints(arena, shift, OFFSET: tl.constexpr):
    return (arena + OFFSET + shift).to(tl.pointer_type(tl.int32))


@triton.jit
def _longs(arena, shift, OFFSET: tl.constexpr):
    return (arena + OFFSET + shift).to(tl.pointer_type(tl.int64))


@triton.jit
def _lengths(arena, shift, entry, live, SPEC: tl.constexpr, TABLE: tl.constexpr):
    """Tokens readable after the step, and the first page that a new token can see."""
    prefix = tl.load(_ints(arena, shift, get(SPEC, "prefix")) + entry, mask=live, other=0)
    if get(TABLE, "lifetime") == "encoder":
        tokens = tl.load(_ints(arena, shift, get(TABLE, "kv_lengths")) + entry, mask=live, other=0)
    else:
        bounds = _ints(arena, shift, get(SPEC, "q_indptr")) + entry
        tokens = prefix + tl.load(bounds + 1, mask=live, other=0)
        tokens -= tl.load(bounds, mask=live, other=0)
    visible = tl.zeros_like(prefix)
    if get(TABLE, "lifetime") == "window":
        visible = tl.maximum(prefix - get(TABLE, "reach") + 1, 0)
    if get(TABLE, "lifetime") == "chunk":
        visible = (prefix // get(TABLE, "reach")) * get(TABLE, "reach")
    return tokens, visible // get(TABLE, "page_tokens")


@triton.jit
def _pages(tokens, first, P: tl.constexpr):
    """Pages from ``first`` to the last token's."""
    return tl.maximum((tokens + P - 1) // P - first, 0)


@triton.jit
def _pages_before(
    arena, shift, b, begin, SPEC: tl.constexpr, TABLE: tl.constexpr, BATCH: tl.constexpr
):
    """Listed pages of the entries ``begin`` .. ``begin`` + BATCH - 1 that stand before b, each."""
    P: tl.constexpr = get(TABLE, "page_tokens")
    entry = begin + tl.arange(0, BATCH)
    tokens, first = _lengths(arena, shift, entry, entry < b, SPEC, TABLE)
    return tl.where(entry < b, _pages(tokens, first, P), 0)


@triton.jit
def _write_slots(
    arena, shift, pages, start, prefix, new, room, begin,
    SPEC: tl.constexpr, TABLE: tl.constexpr, POSITIONS: tl.constexpr, TREE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots of a block of ``new`` tokens and of padding up to ``room``, which is 0; with POSITIONS
    also their positions.
    """
    P: tl.constexpr = get(TABLE, "page_tokens")
    token = begin + tl.arange(0, BLOCK)
    own, inside = token < new, token < room
    stored = tl.where(own, prefix + token, 0)
    column = stored // P
    known = own & (column < get(TABLE, "row_pages"))
    page = tl.load(pages + column, mask=known, other=0).to(tl.int64)
    slots = _longs(arena, shift, get(TABLE, "slots")) + start
    tl.store(slots + token, page * P + stored % P, mask=inside)
    if POSITIONS:
        position = stored
        if TREE:
            depths = _ints(arena, shift, get(SPEC, "depths")) + start
            depth = tl.load(depths + token, mask=own, other=0)
            position = tl.where(own, prefix + depth, 0)
        positions = _longs(arena, shift, get(SPEC, "positions")) + start
        tl.store(positions + token, position.to(tl.int64), mask=inside)


@triton.jit
def _build_table(
    arena, shift, b, batch, rows, part, parts,
    SPEC: tl.constexpr, NTH: tl.constexpr, POSITIONS: tl.constexpr, TREE: tl.constexpr,
    BATCH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Everything of entry b in a table. What does not depend on each other is loaded at once."""
    TABLE: tl.constexpr = get(SPEC, "tables", NTH)
    P: tl.constexpr = get(TABLE, "page_tokens")
    ENCODER: tl.constexpr = get(TABLE, "lifetime") == "encoder"
    row = tl.load(_ints(arena, shift, get(SPEC, "rows")) + b).to(tl.int64)
    tokens, first = _lengths(arena, shift, b, b < batch, SPEC, TABLE)
    before = _pages_before(arena, shift, b, 0, SPEC, TABLE, BATCH)
    if not ENCODER:
        bounds = _ints(arena, shift, get(SPEC, "q_indptr")) + b
        token_start = tl.load(bounds)
        new = tl.load(bounds + 1) - token_start
        # Padding rows of a graph stand behind the last entry's.
        all_rows = tl.where(b == batch - 1, rows - token_start, new)
        prefix = tl.load(_ints(arena, shift, get(SPEC, "prefix")) + b)
    pages = _ints(arena, 0, get(TABLE, "pages")) + row * get(TABLE, "row_pages")
    own = _pages(tokens, first, P)
    room = tl.minimum(own, get(TABLE, "row_pages") - first)
    column = part * BLOCK + tl.arange(0, BLOCK)
    listed = tl.load(pages + first + column, mask=column < room)
    if not ENCODER:
        _write_slots(
            arena, shift, pages, token_start, prefix, new, all_rows, part * TOKENS,
            SPEC, TABLE, POSITIONS, TREE, TOKENS,
        )  # fmt: skip
    start = tl.sum(before)
    for begin in range(BATCH, b, BATCH):
        start += tl.sum(_pages_before(arena, shift, b, begin, SPEC, TABLE, BATCH))
    target = _ints(arena, shift, get(TABLE, "indices")) + start
    room = tl.minimum(room, get(TABLE, "capacity") - start)
    tl.store(target + column, listed, mask=column < room)
    if part == 0:
        indptr = _ints(arena, shift, get(TABLE, "indptr"))
        tl.store(indptr + b, start)
        if b == batch - 1:
            tl.store(indptr + batch, start + own)
        last = _ints(arena, shift, get(TABLE, "last_page"))
        tl.store(last + b, (tokens + P - 1) % P + 1)
        tl.store(_ints(arena, shift, get(TABLE, "kv_lengths")) + b, tokens)
        tl.store(_ints(arena, shift, get(TABLE, "first_page")) + b, first)
    for begin in range((part + parts) * BLOCK, room, parts * BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < room
        tl.store(target + column, tl.load(pages + first + column, mask=inside), mask=inside)
    if not ENCODER:
        for begin in range((part + parts) * TOKENS, all_rows, parts * TOKENS):
            _write_slots(
                arena, shift, pages, token_start, prefix, new, all_rows, begin,
                SPEC, TABLE, POSITIONS, TREE, TOKENS,
            )  # fmt: skip


@triton.jit
def build_index(
    arena, shift, batch, rows, parts,
    SPEC: tl.constexpr, TREE: tl.constexpr, BATCH: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Everything for entry b in one table; the grid is parts x batch x tables.

    ``rows`` are the step's rows of new tokens, padding included.
    """
    TABLES: tl.constexpr = count(SPEC, "tables")
    table = tl.program_id(0) % TABLES
    b = (tl.program_id(0) // TABLES) % batch
    part = tl.program_id(0) // TABLES // batch
    for i in tl.static_range(TABLES):
        if table == i:
            _build_table(
                arena, shift, b, batch, rows, part, parts,
                SPEC, i, i == get(SPEC, "positions_table"), TREE, BATCH, BLOCK, TOKENS,
            )  # fmt: skip


@triton.jit
def update_tables(arena, updates, n, SPEC: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``updates`` int32 [n, 4], (table, row, column, page) each, to the device tables."""
    nth = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = nth < n
    update = updates + 4 * nth
    owner = tl.load(update, mask=live, other=-1)
    row = tl.load(update + 1, mask=live, other=0).to(tl.int64)
    column = tl.load(update + 2, mask=live, other=0)
    page = tl.load(update + 3, mask=live, other=0)
    for i in tl.static_range(count(SPEC, "tables")):
        _update_table(arena, row, column, page, live & (owner == i), get(SPEC, "tables", i))


@triton.jit
def _update_table(arena, row, column, page, own, TABLE: tl.constexpr):
    """Those of the updates that are for ``TABLE``."""
    spots = _ints(arena, 0, get(TABLE, "pages")) + row * get(TABLE, "row_pages") + column
    tl.store(spots, page, mask=own)
