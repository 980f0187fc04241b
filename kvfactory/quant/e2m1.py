"""E2M1, the four-bit float: magnitudes 0 .5 1 1.5 2 3 4 6 for codes 0..7, bit 3 is the sign."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

E2M1_MAX = 6.0
SIGN = 8
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Half-way between neighbouring magnitudes: crossing the i-th leads from code i to i + 1."""


def round_even(x: Tensor) -> Tensor:
    """Codes (uint8) of float32 ``x``: ties to the even code, saturated, -0 is 8, NaN is 0."""
    import torch

    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for below, midpoint in enumerate(MIDPOINTS):
        code += size > midpoint if below % 2 == 0 else size >= midpoint
    return (code + SIGN * x.signbit().byte()).masked_fill(x.isnan(), 0)


def round_away(x: Tensor) -> Tensor:
    """Codes (uint8) of float32 ``x``: ties away from zero, saturated, -0 and NaN are 0."""
    import torch

    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for midpoint in MIDPOINTS:
        code += size >= midpoint
    return code + SIGN * (x < 0).byte()


def values(codes: Tensor) -> Tensor:
    """float32 values of ``codes`` (uint8, 0..15)."""
    size = codes.int() & (SIGN - 1)
    # In halves the magnitudes are the integers 0 1 2 3 4 6 8 12: two bits of exponent, one of
    # mantissa. Arithmetic, not a table: a table would be copied to the device on every call.
    normal = (2 + (size & 1)) << ((size >> 1) - 1).clamp(min=0)
    halves = size.where(size < 2, normal).float()
    return 0.5 * halves * (1.0 - 2.0 * (codes >= SIGN))
