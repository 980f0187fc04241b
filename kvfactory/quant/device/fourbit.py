# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N806, RET505
"""Triton twins of ``quant.e2m1`` and ``nibbles``: four-bit codes, two to a byte.

Tiles as in ``numerics``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfactory.quant.device.numerics import INTERPRETED, bits, flat, floats

# ---- E2M1: four-bit floats -------------------------------------------------------------------


@triton.jit
def e2m1_even(size):
    """int32 whose low three bits are the codes of float32 ``size`` in 0..6, ties to the even code.

    The code of a magnitude is the least of 2 a, a + 2 and a / 2 + 4, rounded; rounding happens
    once, in the addition of 1.5 * 2^23, and keeps order and parity.
    """
    two = tl.full(size.shape, 2.0, tl.float32)
    half = tl.full(size.shape, 0.5, tl.float32)
    least = tl.fma(size, two, tl.full(size.shape, 12582912.0, tl.float32))
    least = tl.minimum(least, size + 12582914.0)
    last = tl.fma(size, half, tl.full(size.shape, 12582916.0, tl.float32))
    return bits(tl.minimum(least, last))


@triton.jit
def _toward_zero(a, b, c):
    """a b + c, rounded toward zero."""
    return tl.inline_asm_elementwise(
        "fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def e2m1_away(size):
    """int32 whose low byte is the code of float32 ``size`` in 0..6, ties away from zero.

    As ``e2m1_even``, with the half that rounds up in the addend, halves in the lowest bit.
    """
    if INTERPRETED:
        normal = ((bits(size) + 0x200000) >> 22) - 252
        tiny = (size >= 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32)
        return tl.where(size < 1.0, tiny, normal)
    else:
        least = tl.minimum(_toward_zero(size, 2.0, 6291456.5), _toward_zero(size, 1.0, 6291458.5))
        return bits(tl.minimum(least, _toward_zero(size, 0.5, 6291460.5))) >> 1


@triton.jit
def signs(x, keep):
    """8 where float32 ``x`` has its sign bit set and ``keep`` is true, else 0."""
    top = (x.to(tl.uint32, bitcast=True) >> 28).to(tl.int32)
    return top & tl.where(keep, 8, 0)


@triton.jit
def e2m1_values(codes):
    """float32 values of ``codes`` (int32, 0..15)."""
    size = codes & 7
    # From code 2 on, exponent and mantissa are those of a float32 shifted down by 22 bits.
    normal = floats((size + 252) << 22)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
    return tl.where(codes >= 8, -value, value)


# ---- nibbles ---------------------------------------------------------------------------------


@triton.jit
def pack(codes):
    """``codes`` [R, D] int32 as bytes [R, D / 2]: the even element is the low nibble.

    Codes are the low bytes, in 0..15; what stands above them does not matter.
    """
    R: tl.constexpr = codes.shape[0]
    H: tl.constexpr = codes.shape[1] // 2
    low, high = tl.split(tl.reshape(codes, (R, H, 2)))
    return (low + (high << 4)).to(tl.uint8)


@triton.jit
def unpack(data):
    """Bytes [R, D / 2] as codes [R, D] int32."""
    wide = data.to(tl.int32)
    return flat(tl.join(wide & 15, wide >> 4))
