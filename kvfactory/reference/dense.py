"""Dense attention over one request's whole history: what every backend is verified against.

Written apart from the paged oracle on purpose: visibility is one comparison of positions, and the
softmax, with the sink as one more column, is torch's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfactory.planning.cacheplan import Attention

PIECE_LOGITS = 2**20


def visible_keys(
    work: Attention, queries: Tensor, keys: Tensor, select: Tensor | None = None
) -> Tensor:
    """Which keys each query sees: bool [queries, keys].

    Args:
        work: windows, chunks and causality of the group.
        queries: positions, int64 [queries].
        keys: positions, int64 [keys], of the last token that each covers.
        select: int [queries, topk] positions, of which a query sees only those; -1 is none.
    """
    distance = queries[:, None] - keys[None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if work.causal:
        seen &= distance >= 0
    if work.window_tokens is not None:
        seen &= distance < work.window_tokens
    if work.chunk_tokens is not None:
        seen &= queries[:, None] // work.chunk_tokens == keys[None, :] // work.chunk_tokens
    if select is not None:
        columns = select.long() + 1  # column 0 takes the padding
        top = max(int(x.max()) if x.numel() else 0 for x in (columns, keys + 1))
        chosen = torch.zeros(len(queries), top + 1, dtype=torch.bool, device=keys.device)
        seen &= chosen.scatter_(1, columns, True)[:, keys + 1]
    return seen


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    work: Attention,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention [queries, q_heads, v_dim], in float32 or, for float64 inputs, float64.

    Args:
        q: [queries, q_heads, dim].
        k: [keys, kv_heads, dim]; of latent attention latent and rope together, one head.
        v: [keys, kv_heads, v_dim].
        seen: bool [queries, keys]; a query that sees nothing gives zeros.
        work: scale and soft cap of the group.
        sinks: [q_heads], a further logit per head without a value.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(dtype).view(len(q), k.shape[1], -1, q.shape[-1])
    keys, values = k.to(dtype), v.to(dtype)
    rows = max(1, PIECE_LOGITS // max(1, q.shape[1] * len(k)))
    pieces = []
    for part, sight in zip(torch.split(grouped, rows), torch.split(seen, rows), strict=True):
        stop = int(sight.any(0).nonzero().max()) + 1 if sight.any() else 0
        pieces.append(_piece(part, keys[:stop], values[:stop], sight[:, :stop], work, sinks))
    return torch.cat(pieces).flatten(1, 2)


def _piece(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, work: Attention, sinks: Tensor | None
) -> Tensor:
    logits = torch.einsum("qhgd,khd->hgqk", q, keys) * work.scale
    if work.soft_cap is not None:
        logits = work.soft_cap * torch.tanh(logits / work.soft_cap)
    logits = logits.masked_fill_(~seen, -torch.inf)
    if sinks is not None:
        groups = logits.shape[:2]
        column = sinks.to(logits.dtype).view(*groups, 1, 1).expand(*groups, len(q), 1)
        logits = torch.cat([logits, column], -1)
    weights = torch.softmax(logits, -1)[..., : len(keys)]
    blind = ~seen.any(-1, keepdim=True)
    if blind.any():
        weights = weights.masked_fill(blind, 0.0)
    return torch.einsum("hgqk,khd->qhgd", weights, values)
