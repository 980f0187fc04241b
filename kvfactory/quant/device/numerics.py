# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806, RET505
"""Triton twins of ``quant.numerics``, ``e8m0``, ``e2m1`` and ``nibbles``: the same bits, float32.

Tiles are [R, D]: R rows of D elements, D padded with zeros to a power of two. Groups of a row are
seen as [R, D / B, B]. Compile with ``enable_fp_fusion=False``. Where the interpreter converts to
eight-bit floats unlike the hardware, integer arithmetic takes the place of the conversion.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOAT32_NAN = tl.constexpr(0x7FC00000)
INFINITY = tl.constexpr(0x7F800000)
SIGN_OFF = tl.constexpr(0x7FFFFFFF)
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
def load(x):
    """``x`` in float32, clamped to +-LIMIT; NaN stays."""
    return clamp(x.to(tl.float32), -LIMIT, LIMIT)


@triton.jit
def bits(x):
    """The int32 behind float32 ``x``."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def floats(x):
    """The float32 behind int32 ``x``."""
    return x.to(tl.float32, bitcast=True)


@triton.jit
def amax_bits(x, axis: tl.constexpr):
    """Bits of the largest magnitude along ``axis``: ordered as the magnitudes are, NaN largest."""
    largest = tl.max(bits(x) & SIGN_OFF, axis)
    return tl.where(largest > INFINITY, FLOAT32_NAN, largest)


@triton.jit
def amax(x, axis: tl.constexpr):
    """Largest magnitude along ``axis``, which disappears; the positive quiet NaN if any is NaN."""
    return floats(amax_bits(x, axis))


@triton.jit
def divide_by(x, by: tl.constexpr):
    """``x / by`` for a number, correctly rounded; a NaN is the positive quiet one."""
    quotient = tl.div_rn(x, tl.full(x.shape, by, tl.float32))
    return tl.where(quotient == quotient, quotient, floats(tl.full(x.shape, FLOAT32_NAN, tl.int32)))


@triton.jit
def nonzero(scale):
    """``scale`` with 1 for 0."""
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def convert(x, dtype: tl.constexpr):
    """``x`` in the float type ``dtype`` of 16 or 32 bits, ties to even; as it is if it has it."""
    if x.dtype == tl.float64:
        x = x.to(tl.float32)
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
    return tl.where(size > INFINITY, 0x7F, code).to(tl.uint8)


@triton.jit
def to_e4m3(x):
    """Codes (uint8) of float32 ``x``: saturated at 448, ties to even, NaN as 0x7F."""
    if INTERPRETED:
        return _small_float(clamp(x, -448.0, 448.0), 3, 7)
    else:
        return clamp(x, -448.0, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def to_e5m2(x):
    """Codes (uint8) of float32 ``x``: saturated at 57344, ties to even, NaN as 0x7F."""
    if INTERPRETED:
        return _small_float(clamp(x, -57344.0, 57344.0), 2, 15)
    else:
        return clamp(x, -57344.0, 57344.0).to(tl.float8e5).to(tl.uint8, bitcast=True)


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
def rint_bits(x, low: tl.constexpr, high: tl.constexpr):
    """int32 whose low byte is ``x`` rounded to an integer in low..high, ties to even.

    NaN gives some byte in range; the caller knows better what it should be.
    """
    return bits(tl.minimum(tl.maximum(x, low), high) + RINT)


@triton.jit
def to_int8(x):
    """``x`` as int8 in +-127, ties to even, NaN as 0."""
    return rint_bits(tl.where(x == x, x, 0.0), -127.0, 127.0).to(tl.int8)


# ---- E8M0: powers of two ---------------------------------------------------------------------


@triton.jit
def ceil_log2(x):
    """E8M0 codes (int32) of ceil(log2 x) for positive float32 ``x``; 255 where ``x`` is NaN."""
    size = bits(x)
    exponent = size >> 23
    mantissa = size & 0x7FFFFF
    code = exponent + (mantissa != 0).to(tl.int32)
    code = tl.where(exponent == 0, (mantissa > 0x400000).to(tl.int32), code)
    return tl.where(size > INFINITY, 255, tl.minimum(code, 254))


@triton.jit
def power(code):
    """float32 2^(code - 127), exactly; NaN for 255."""
    size = tl.where(code == 0, 0x00400000, code << 23)
    return floats(tl.where(code == 255, FLOAT32_NAN, size))


@triton.jit
def inverse_power(code):
    """float32 2^(127 - code), exactly: multiplying by it divides by ``power``; NaN for 255."""
    size = tl.where(code == 254, 0x00400000, (254 - code) << 23)
    return floats(tl.where(code == 255, FLOAT32_NAN, size))


@triton.jit
def at_least(x, low: tl.constexpr):
    """max(x, low) for float32 ``x`` >= 0 or NaN, and low > 0; NaN stays."""
    return tl.where(x < low, low, x)


@triton.jit
def unscaled(values, scale, B: tl.constexpr):
    """``values`` [R, D] times the powers of E8M0 ``scale`` [R, D / B], saturated at +-LIMIT."""
    steps = power(scale.to(tl.int32))[:, :, None]
    return clamp(flat(grouped(values, B) * steps), -LIMIT, LIMIT)


# ---- E2M1: four-bit floats -------------------------------------------------------------------


@triton.jit
def _sign(x):
    return (bits(x) >> 28) & 8


@triton.jit
def e2m1_even(x):
    """Codes (int32) of float32 ``x``: ties to the even code, saturated, -0 is 8, NaN is 0."""
    size = tl.minimum(tl.abs(x), 6.0)
    # Steps are .5 below 2, 1 below 4, then 2. Adding 1.5 * 2^23 steps rounds to one; the addend's
    # low bits lift the count of steps to the code.
    magic = tl.where(size < 4.0, 12582914.0, 25165832.0)
    magic = tl.where(size < 2.0, 6291456.0, magic)
    code = (bits(size + magic) & 7) | _sign(x)
    return tl.where(x == x, code, 0)


@triton.jit
def e2m1_away(x):
    """Codes (int32) of float32 ``x``: ties away from zero, saturated, -0 and NaN are 0."""
    size = bits(tl.minimum(tl.abs(x), 6.0))
    normal = ((size + 0x200000) >> 22) - 252
    tiny = (size >= 0x3E800000).to(tl.int32) + (size >= 0x3F400000).to(tl.int32)
    code = tl.where(size < 0x3F800000, tiny, normal) | tl.where(x < 0.0, 8, 0)
    return tl.where(x == x, code, 0)


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
    """``codes`` [R, D] int32 in 0..15 as bytes [R, D / 2]: the even element is the low nibble."""
    R: tl.constexpr = codes.shape[0]
    H: tl.constexpr = codes.shape[1] // 2
    low, high = tl.split(tl.reshape(codes, (R, H, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def unpack(data):
    """Bytes [R, D / 2] as codes [R, D] int32."""
    wide = data.to(tl.int32)
    return flat(tl.join(wide & 15, wide >> 4))
