"""Softmax attention of one request's queries over what it can read, in blocks of queries.

Legend: ``rows`` queries of a block, ``n`` entries, ``H`` kv heads, ``G`` q heads per kv head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfactory.planning.cacheplan import Attention

BLOCK_QUERIES = 128
BLOCK_LOGITS = 2**24


@dataclass(frozen=True)
class Stored:
    """What a request can read: ``k`` [H, n, dim], ``v`` [H, n, v_dim], from entry ``first`` on.

    ``per_entry`` tokens make an entry; ``positions`` int64 [n] are those of the last of them.
    ``broken`` bool [H, n] marks entries that were not finite; they are zero here, and poison only
    the queries that see them.
    """

    k: Tensor
    v: Tensor
    first: int
    per_entry: int
    positions: Tensor
    broken: Tensor | None


@dataclass(frozen=True)
class Queries:
    """Queries of a request: ``q`` [rows, q_heads, dim], scaled.

    ``order`` int64 [rows] is their place in storage, which causality compares; ``positions``
    int64 [rows] their place in the text, which windows compare (they differ in draft trees).
    ``mask`` bool [rows, kv_tokens] and ``select`` [rows, topk] as in ``AttendExtra``.
    """

    q: Tensor
    order: Tensor
    positions: Tensor
    mask: Tensor | None
    select: Tensor | None

    def block(self, start: int, stop: int) -> Queries:
        """The queries ``start:stop``."""
        rows = slice(start, stop)
        mask = None if self.mask is None else self.mask[rows]
        select = None if self.select is None else self.select[rows]
        return Queries(self.q[rows], self.order[rows], self.positions[rows], mask, select)


def attend(
    queries: Queries, stored: Stored, work: Attention, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output [rows, q_heads, v_dim] and LSE [rows, q_heads] of one request.

    A query that sees nothing gives zeros and, without sinks, an LSE of -inf.
    """
    count, heads = queries.q.shape[:2]
    rows = BLOCK_LOGITS // (heads * max(stored.k.shape[1], 1))
    rows = min(max(rows, 1), BLOCK_QUERIES)
    blocks = (queries.block(at, at + rows) for at in range(0, count, rows))
    outs, sums = zip(*(_block(block, stored, work, sinks) for block in blocks), strict=True)
    return torch.cat(outs), torch.cat(sums)


def first_visible(work: Attention, positions: Tensor) -> Tensor:
    """The earliest position that the window or chunk of each query allows, like ``positions``."""
    if work.window_tokens is not None:
        return (positions - work.window_tokens + 1).clamp(min=0)
    if work.chunk_tokens is not None:
        return positions // work.chunk_tokens * work.chunk_tokens
    return torch.zeros_like(positions)


def finite(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """``k`` and ``v`` [H, n, dim] with non-finite entries zeroed, and where they were."""
    if torch.isfinite(k.sum() + v.sum()):
        return k, v, None
    broken = ~(torch.isfinite(k).all(-1) & torch.isfinite(v).all(-1))
    return k.masked_fill(broken[..., None], 0), v.masked_fill(broken[..., None], 0), broken


def marked(columns: Tensor, width: int) -> Tensor:
    """Bool [rows, width], true at ``columns`` [rows, m]; those outside are left out."""
    inside = torch.where((columns >= 0) & (columns < width), columns, width).long()
    marks = torch.zeros(len(columns), width + 1, dtype=torch.bool, device=columns.device)
    return marks.scatter_(1, inside, True)[:, :width]


def _block(
    queries: Queries, stored: Stored, work: Attention, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    span = _span(queries, stored, work)
    k, v = stored.k[:, span], stored.v[:, span]
    visible = _visible(queries, stored, work, span)
    rows, heads, dim = queries.q.shape
    grouped = queries.q.view(rows, k.shape[0], -1, dim).permute(1, 2, 0, 3)
    logits = torch.bmm(grouped.flatten(1, 2), k.transpose(1, 2)).view(
        *grouped.shape[:3], k.shape[1]
    )
    if work.soft_cap is not None:
        logits.div_(work.soft_cap).tanh_().mul_(work.soft_cap)
    _hide(logits, ~visible)
    weights, lse = _softmax(logits, sinks)
    out = torch.bmm(weights.flatten(1, 2), v).view(*grouped.shape[:3], v.shape[-1])
    if stored.broken is not None:
        bad = (visible & stored.broken[:, None, span]).any(-1)
        out = out.masked_fill(bad[:, None, :, None], torch.nan)
    out = out.permute(2, 0, 1, 3).reshape(rows, heads, v.shape[-1])
    return out, lse.permute(2, 0, 1).reshape(rows, heads)


def _span(queries: Queries, stored: Stored, work: Attention) -> slice:
    """The entries that any of the queries can see, as a range of ``stored``."""
    low = int(first_visible(work, queries.positions).min()) // stored.per_entry - stored.first
    high = stored.k.shape[1]
    if work.causal and queries.mask is None:
        high = min(high, (int(queries.order[-1]) + 1) // stored.per_entry - stored.first)
    return slice(min(low, max(high, 0)), max(high, 0))


def _visible(queries: Queries, stored: Stored, work: Attention, span: slice) -> Tensor:
    """Which of the entries in ``span`` each query sees: bool [rows, n]."""
    low, high = span.start + stored.first, span.stop + stored.first
    entries = torch.arange(low, high, device=queries.q.device)
    ends, last = stored.positions[span], (entries + 1) * stored.per_entry - 1
    first = first_visible(work, queries.positions)[:, None]
    visible = ends >= first
    if work.chunk_tokens is not None:
        visible &= ends < first + work.chunk_tokens
    if queries.mask is not None:
        visible &= queries.mask[:, last]
    elif work.causal:
        visible &= last <= queries.order[:, None]
    if queries.select is not None:
        chosen = torch.where(queries.select < 0, -1, queries.select // stored.per_entry)
        visible &= marked(chosen - low, high - low)
    return visible


def _hide(logits: Tensor, hidden: Tensor) -> None:
    """Set ``logits`` [H, G, rows, n] to -inf where ``hidden`` [rows, n]."""
    columns = hidden.any(0).nonzero()
    if len(columns):  # mostly a few columns at the end: the rest is left alone
        span = slice(int(columns[0]), int(columns[-1]) + 1)
        logits[..., span].masked_fill_(hidden[:, span], -torch.inf)


def _softmax(logits: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights (in place of ``logits`` [H, G, rows, n]) and LSE [H, G, rows]."""
    groups = logits.shape[:2]
    extra = logits.new_full((*groups, 1), -torch.inf)
    if sinks is not None:
        extra = sinks.to(logits.dtype).view(*groups, 1)
    top = extra.expand(logits.shape[:-1])
    if logits.shape[-1]:
        top = torch.maximum(logits.amax(-1), top)
    shift = top.masked_fill(top == -torch.inf, 0.0)
    weights = logits.sub_(shift[..., None]).exp_()
    total = weights.sum(-1) + (extra - shift).exp()
    return weights.div_(total.masked_fill(total == 0, 1.0)[..., None]), shift + total.log()
