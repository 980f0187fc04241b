"""Equality to the bit."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether both have one shape, one type and equal bytes."""
    as_bytes = [x.contiguous().unsqueeze(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and torch.equal(*as_bytes)
