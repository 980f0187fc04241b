"""E8M0, the power-of-two scale of OCP Microscaling: byte e stands for 2^(e - 127), 255 for NaN.

Conversions work on exponent and mantissa, never through a float logarithm, which is off by one
near exact powers of two; torch's own cast to E8M0 rounds to nearest, not up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvfactory.quant import e2m1
from kvfactory.quant.nibbles import unpack
from kvfactory.quant.numerics import INPUT_MAX, blocks

if TYPE_CHECKING:
    from torch import Tensor

E8M0 = "float8_e8m0fnu"
BIAS = 127
LARGEST = 254
NAN = 255

_MANTISSA_BITS = 23
_TWO_TO_MINUS_127 = 0x00400000
_FLOAT32_NAN = 0x7FC00000


def round_up(x: Tensor) -> Tensor:
    """The bytes (uint8) of ceil(log2 x) for positive float32 ``x``; 255 where ``x`` is NaN."""
    import torch

    mantissa, exponent = torch.frexp(x)
    is_power = mantissa == 0.5
    code = (exponent - is_power.int() + BIAS).clamp(0, LARGEST)
    return code.masked_fill(x.isnan(), NAN).to(torch.uint8)


def powers(codes: Tensor) -> Tensor:
    """float32 2^(e - 127), exactly, of the bytes e (uint8); NaN for 255."""
    import torch

    exponent = codes.int()
    bits = exponent << _MANTISSA_BITS
    bits = bits.masked_fill(exponent == 0, _TWO_TO_MINUS_127)
    return bits.masked_fill(exponent == NAN, _FLOAT32_NAN).view(torch.float32)


def unscaled(values: Tensor, scale: Tensor, block: int) -> Tensor:
    """float32 values * 2^e [..., D] of the codes' ``values`` [..., D] and E8M0 [..., D / block].

    Saturates at +-``INPUT_MAX``: a code rounded up in the largest blocks stands for 2^128.
    """
    import torch

    steps = powers(scale.view(torch.uint8)).unsqueeze(-1)
    return (blocks(values, block) * steps).clamp(-INPUT_MAX, INPUT_MAX).flatten(-2)


def unscaled_e2m1(planes: Mapping[str, Tensor], block: int) -> Tensor:
    """float32 [..., D] of ``data``, two E2M1 codes a byte, and ``scale``, E8M0 per ``block``."""
    return unscaled(e2m1.values(unpack(planes["data"])), planes["scale"], block)
