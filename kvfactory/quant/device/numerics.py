# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806, RET505
"""Triton twins of ``quant.numerics`` and ``e8m0``: the same bits, float32.

Tiles are [R, D]: R rows of D elements, D padded with zeros to a power of two. Groups of a row are
seen as [R, D / B, B]. Compile with ``enable_fp_fusion=False``. Where the interpreter converts to
eight-bit floats unlike the hardware, integer arithmetic takes the place of the conversion.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOAT32_NAN = tl.constexpr(0x7FC00000)
SIGN_OFF = tl.constexpr(0x7FFFFFFF)
SIGN = tl.constexpr(-0x80000000)
LIMIT = tl.constexpr(3.3895e38)
RINT = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves the rounded integer in the low bits


DTYPES = {
    "float32": tl.float32,
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float8_e4m3fn": tl.float8e4nv,
    "float8_e5m2": tl.float8e5,
    "float8_e8m0fnu": tl.uint8,
    "int8": tl.int8,
    "uint8": tl.uint8,
}
"""Triton's types by torch's names."""


@triton.jit
def _probe():
    pass


INTERPRETED = tl.constexpr(not isinstance(_probe, triton.JITFunction))


@triton.jit
def clamp(x, low: tl.constexpr, high: tl.constexpr):
    """``x`` in low..high; NaN stays."""
    x = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def widen(x):
    """``x`` in float32; bfloat16 pairs take two instructions, an element's own conversion three."""
    if x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    elif INTERPRETED:  # which loses subnormal numbers
        return floats(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=f,=f,r", [x], tl.float32, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def load(x):
    """``x`` in float32, clamped to +-LIMIT; NaN stays."""
    return clamp(widen(x), -LIMIT, LIMIT)


@triton.jit
def bits(x):
    """The int32 behind float32 ``x``."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def floats(x):
    """The float32 behind int32 ``x``."""
    return x.to(tl.float32, bitcast=True)


@triton.jit
def quiet(x):
    """``x`` with every NaN the positive quiet one."""
    return tl.where(x == x, x, floats(tl.full(x.shape, FLOAT32_NAN, tl.int32)))


@triton.jit
def nonzero(scale):
    """``scale`` with 1 for 0."""
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def nonnan(scale):
    """``scale`` with 1 for NaN."""
    return tl.where(scale == scale, scale, 1.0)


@triton.jit
def no_less(x, low: tl.constexpr):
    """max(x, low); NaN stays."""
    return tl.where(x < low, low, x)


@triton.jit
def convert(x, dtype: tl.constexpr):
    """``x`` in the float type ``dtype`` of 16 or 32 bits, ties to even; as it is if it has it."""
    if x.dtype != dtype:
        x = widen(x)
    if INTERPRETED and x.dtype == tl.float32 and dtype == tl.bfloat16:
        odd = (bits(x) >> 16) & 1
        rounded = tl.where(x == x, (bits(x) + 0x7FFF + odd) >> 16, 0x7FC0)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """float32 ``x`` in a shorter float type, NaN as the positive quiet one."""
    return tl.where(x == x, convert(x, dtype), tl.full(x.shape, float("nan"), dtype))


@triton.jit
def grouped(x, B: tl.constexpr):
    """``x`` [R, D] as [R, D / B, B]."""
    R: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    return tl.reshape(x, (R, D // B, B))


@triton.jit
def flat(x):
    """``x`` [R, D / B, B] as [R, D]."""
    R: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1] * x.shape[2]
    return tl.reshape(x, (R, D))


# ---- eight-bit floats ------------------------------------------------------------------------


@triton.jit
def _small_float(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Codes of float32 ``x`` within range, ties to even, NaN as 0x7F; integer arithmetic only."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    size = bits(x) & SIGN_OFF
    even = (size >> SHIFT) & 1
    normal = ((size + (1 << (SHIFT - 1)) - 1 + even) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    quantum: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA)
    tiny = bits(floats(size) + RINT * quantum) & 0xFF
    first: tl.constexpr = (128 - BIAS) << 23
    code = tl.where(size < first, tiny, normal) | ((bits(x) >> 24) & 0x80)
    return tl.where(size > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def to_e4m3(x):
    """Codes (uint8) of float32 ``x``: saturated at 448, ties to even, NaN as 0x7F."""
    if INTERPRETED:
        return _small_float(clamp(x, -448.0, 448.0), 3, 7)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # the conversion saturates


@triton.jit
def to_e5m2(x):
    """Codes (uint8) of float32 ``x``: saturated at 57344, ties to even, NaN as 0x7F."""
    if INTERPRETED:
        return _small_float(clamp(x, -57344.0, 57344.0), 2, 15)
    else:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3(codes):
    """float32 values of E4M3 ``codes`` (uint8)."""
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if INTERPRETED:
        values = tl.where((codes & 0x7F) == 0x7F, float("nan"), values)
    return values


@triton.jit
def from_e5m2(codes):
    """float32 values of E5M2 ``codes`` (uint8)."""
    values = codes.to(tl.float8e5, bitcast=True).to(tl.float32)
    if INTERPRETED:
        infinite = tl.where(codes >= 0x80, float("-inf"), float("inf"))
        values = tl.where((codes & 0x7F) == 0x7C, infinite, values)
        values = tl.where((codes & 0x7F) > 0x7C, float("nan"), values)
    return values


# ---- integers --------------------------------------------------------------------------------


@triton.jit
def rint_bits(x):
    """int32 whose low byte is ``x`` rounded to an integer of a byte, ties to even."""
    return bits(x + RINT)


@triton.jit
def to_int8(x):
    """``x`` as int8 in +-127, ties to even, NaN as 0."""
    x = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -127.0), 127.0)
    return rint_bits(x).to(tl.int8)


# ---- E8M0: powers of two ---------------------------------------------------------------------


@triton.jit
def exponent_over(x, NUMBER: tl.constexpr):
    """E8M0 codes (int32) of ceil(log2(x / NUMBER)) for ``x`` >= 0, also below 0; 255 for NaN.

    NUMBER is 448 or 6. Rounding the quotient first changes nothing: it never reaches a power of
    two from above, so the carry out of x's mantissa, compared with NUMBER's, decides.
    """
    tl.static_assert(NUMBER == 448 or NUMBER == 6)
    if NUMBER == 448:
        code = ((bits(x) + 0x1FFFFF) >> 23) - 8  # 448 = 1.75 * 2^8
    else:
        code = ((bits(x) + 0x3FFFFF) >> 23) - 2  # 6 = 1.5 * 2^2
    return tl.where(x == x, code, 255)


@triton.jit
def power(code):
    """float32 2^(code - 127), exactly; NaN for 255."""
    size = tl.where(code == 0, 0x00400000, code << 23)
    return floats(tl.where(code == 255, FLOAT32_NAN, size))


@triton.jit
def inverse_power(code):
    """float32 2^(127 - code) of codes below 254: multiplying by it divides by ``power``.

    NaN for 255.
    """
    return floats(tl.where(code == 255, FLOAT32_NAN, (254 - code) << 23))


@triton.jit
def unscaled(values, scale, B: tl.constexpr):
    """``values`` [R, D] times the powers of E8M0 ``scale`` [R, D / B], saturated at +-LIMIT."""
    steps = power(scale.to(tl.int32))[:, :, None]
    return clamp(flat(grouped(values, B) * steps), -LIMIT, LIMIT)
