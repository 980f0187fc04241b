# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N806, RET505
"""Triton twins of ``quant.e2m1`` and ``nibbles``: four-bit codes, two to a byte.

Tiles as in ``numerics``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfactory.quant.device.numerics import (
    INTERPRETED,
    SIGN,
    bits,
    flat,
    floats,
    inverse_power,
    widen,
)

# Codes come as floats: MAGIC + code, whose low bits are the code. Then additions, of which the
# hardware does two in the time of one comparison or shift, also attach signs and join nibbles.
MAGIC = tl.constexpr(12582912.0)
HALVES = tl.constexpr(6291456.5)  # of this size floats are halves apart
SIGN_BIAS = tl.constexpr(4.0)  # a sign counts as -4 or 4 beside it

# ---- E2M1: four-bit floats -------------------------------------------------------------------
#
# The code of a magnitude v is 4 a + 2 b + c, rounded, where a, b and c are v / 2, v / 2 - 1 and
# v / 2 - 2, each clamped to 0..1: b is 0 until 4 a is 4, c until 2 b is 2. The clamp costs nothing,
# and makes NaN 0. Each addition to MAGIC rounds, and what it adds to is even where ties are.


@triton.jit
def e2m1_even(share, factor, bias):
    """MAGIC + ``bias`` + the codes of ``share * factor`` = v / 2, ties to the even code.

    v above 6 counts as 6, NaN as 0. ``bias`` is even; ``factor`` is a power of two.
    """
    if INTERPRETED:
        size = tl.where(share == share, share * factor * 2.0, 0.0)
        code = (size > 0.25).to(tl.int32) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
        code += (size > 2.5).to(tl.int32) + (size >= 3.5) + (size > 5.0)
        return code.to(tl.float32) + (bias + MAGIC)
    else:
        return tl.inline_asm_elementwise(
            """{.reg .f32 a, b, c;
            mul.rn.sat.f32 a, $1, $2;
            fma.rn.sat.f32 b, $1, $2, 0fBF800000;
            fma.rn.sat.f32 c, $1, $2, 0fC0000000;
            fma.rn.f32 a, a, 0f40800000, $3;
            fma.rn.f32 a, b, 0f40000000, a;
            add.rn.f32 $0, a, c;}""",
            "=f,f,f,f", [share, factor, bias + MAGIC], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def e2m1_away(share, factor, bias):
    """HALVES + ``bias`` + the codes, ties away from zero, or half more."""
    if INTERPRETED:
        size = tl.where(share == share, share * factor * 2.0, 0.0)
        code = (size >= 0.25).to(tl.int32) + (size >= 0.75) + (size >= 1.25) + (size >= 1.75)
        code += (size >= 2.5).to(tl.int32) + (size >= 3.5) + (size >= 5.0)
        return code.to(tl.float32) + (bias + HALVES)
    else:  # a half added in advance, rounded toward zero
        return tl.inline_asm_elementwise(
            """{.reg .f32 a, b, c;
            mul.rz.sat.f32 a, $1, $2;
            fma.rz.sat.f32 b, $1, $2, 0fBF800000;
            fma.rz.sat.f32 c, $1, $2, 0fC0000000;
            fma.rz.f32 a, a, 0f40800000, $3;
            fma.rz.f32 a, b, 0f40000000, a;
            add.rz.f32 $0, a, c;}""",
            "=f,f,f,f", [share, factor, bias + HALVES], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def floor_halves(codes):
    """MAGIC + whole codes of HALVES + codes."""
    if INTERPRETED:
        return tl.floor(codes - 6291456.0) + MAGIC
    else:
        return tl.inline_asm_elementwise(
            "add.rz.f32 $0, $1, 0f4AC00000;",
            "=f,f", [codes], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def share_of(x, factor):
    """``abs(x) * factor`` clamped to 0..1, NaN as 0."""
    if INTERPRETED:
        share = tl.abs(x) * factor
        return tl.where(share < 1.0, share, tl.where(share >= 1.0, 1.0, 0.0))
    else:
        return tl.inline_asm_elementwise(
            "{.reg .f32 a; abs.f32 a, $1; mul.rn.sat.f32 $0, a, $2;}",
            "=f,f,f", [x, factor], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def with_sign(codes, x, bias):
    """``codes``, which hold ``bias`` = SIGN_BIAS more than theirs, with 8 for a sign of ``x``.

    Without signs where ``bias`` is 0.
    """
    return codes - floats((bits(x) & SIGN) | bits(bias))


@triton.jit
def e2m1_by_power(blocks, scale, away: tl.constexpr):
    """Signed codes of ``blocks`` [R, G, B] over the powers of E8M0 ``scale`` [R, G] int32.

    A scale is the least power of two that leaves no magnitude above 6. Ties go to the even code
    and -0 keeps its sign, or ``away`` from zero and it does not. Where scales are NaN codes are 0.
    """
    blocks = widen(blocks)
    fine = (scale != 255)[:, :, None]
    bias = tl.where(fine, SIGN_BIAS, 0.0)
    # Blocks with the largest scale hold no magnitude above 4, and infinities count as 4 there.
    top = scale == 253
    factor = tl.where(top, 2.0, 4.0)[:, :, None]
    step = inverse_power(scale) * tl.where(top, 0.25, 0.125)
    share = share_of(blocks, tl.where(fine, step[:, :, None], 0.0))
    if away:  # adding 0 makes -0 positive
        return floor_halves(with_sign(e2m1_away(share, factor, bias), blocks + 0.0, bias))
    else:
        return with_sign(e2m1_even(share, factor, bias), blocks, bias)


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
def whole(sixteenths):
    """MAGIC + 16 times ``sixteenths`` of 0..1, rounded, ties to even."""
    times = tl.full(sixteenths.shape, 16.0, tl.float32)
    return tl.fma(sixteenths, times, tl.full(sixteenths.shape, 12582912.0, tl.float32))


@triton.jit
def pack(codes):
    """``codes`` [R, D], MAGIC + 0..15, as bytes [R, D / 2]: the even element is the low nibble."""
    R: tl.constexpr = codes.shape[0]
    H: tl.constexpr = codes.shape[1] // 2
    low, high = tl.split(tl.reshape(codes, (R, H, 2)))
    return (bits(low) + (bits(high) << 4)).to(tl.uint8)


@triton.jit
def unpack(data):
    """Bytes [R, D / 2] as codes [R, D] int32."""
    wide = data.to(tl.int32)
    return flat(tl.join(wide & 15, wide >> 4))
