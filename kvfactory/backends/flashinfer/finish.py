"""After the kernels: scales, centers, sinks, and the merge of two partial answers.

FlashInfer's log-sum-exp is in base 2 and -inf where a query saw nothing; FA3 leaves NaN there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


def shift_of(q: Tensor, center: Tensor, scale: float) -> Tensor:
    """What a key center [heads, dim] adds to every logit of ``q`` [rows, q_heads, dim], base 2.

    Without a soft cap it is the same for all keys of a query, so it changes the log-sum-exp only.
    """
    heads, dim = center.shape
    grouped = q.float().view(len(q), heads, -1, dim)
    return torch.einsum("rhgd,hd->rhg", grouped, center).flatten(1) * (scale * LOG2_E)


def add_center(out: Tensor, center: Tensor) -> None:
    """Add a value center [heads, dim] to ``out`` [rows, q_heads, dim]: weights sum to one."""
    grouped = out.view(len(out), center.shape[0], -1, center.shape[1])
    grouped.add_(center.to(out.dtype)[:, None])


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Scale ``out`` for one more logit per head, [q_heads] natural, in the denominator.

    With S the sum of exponentials it multiplies by S / (S + exp(sink)), which is
    sigmoid(lse - sink): 0 where nothing was seen.
    """
    share = torch.sigmoid(seen(lse) / LOG2_E - sinks.float())
    out.mul_(share.unsqueeze(-1).to(out.dtype))


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """One answer from two over disjoint keys, [rows, q_heads, dim] and base-2 LSE [rows, q_heads].

    Any number of heads; rows that saw nothing in either are 0. As in FlashInfer's cascade
    (arXiv:2501.01005, section 2.2), in float32.
    """
    first, second = seen(lse), seen(other_lse)
    top = torch.maximum(first, second)
    shift = top.masked_fill(top == -torch.inf, 0.0)
    a, b = torch.exp2(first - shift), torch.exp2(second - shift)
    total = (a + b).clamp(min=torch.finfo(torch.float32).tiny)
    merged = _part(out, a / total).add_(_part(other, b / total))
    return merged.to(out.dtype), shift + torch.log2(a + b)


def _part(out: Tensor, weight: Tensor) -> Tensor:
    """``weight`` times ``out``, 0 where the weight is, whatever stands there."""
    weight = weight.unsqueeze(-1)
    return torch.where(weight > 0, out.float() * weight, 0.0)


def seen(lse: Tensor) -> Tensor:
    """``lse`` with -inf for rows that saw nothing."""
    return torch.nan_to_num(lse, nan=-torch.inf, neginf=-torch.inf, posinf=torch.inf)
