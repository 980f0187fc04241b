# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806, RET505
"""Divisions in Triton that round as the specification's do, by a divisor that many elements share.

A correctly rounded division costs a dozen instructions and a branch; here the divisor's share of
the work is done once. With f a power of two, s' = s f in [1, 2) and r about 1 / s', the estimate
q = y r of y / s', where y = x f, is within a few ulps, and q + r (y - q s') corrects it.

*Short* dividends, of at most 11 significant bits (bfloat16 and float16), need one correction: what
it leaves, below 2^-20 of an ulp, could only matter next to the midpoints of the codes, numbers of
few bits, and there for few divisors, which the tests enumerate. For longer ones r is the correctly
rounded reciprocal, and a second correction makes the quotient the correctly rounded one
(Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990).

Nothing overflows, as callers clamp y; quotients too small to be corrected exactly are below every
code's smallest step. Dividends and reciprocals are negated: so a zero keeps its sign, and no
instruction is spent on turning signs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfactory.quant.device.numerics import (
    INTERPRETED,
    LIMIT,
    bits,
    floats,
    nonnan,
    quiet,
    widen,
)


@triton.constexpr_function
def short(dtype):
    """Whether numbers of ``dtype`` have at most 11 significant bits."""
    return dtype.primitive_bitwidth <= 16


@triton.jit
def reciprocal(x):
    """About -1 / x of positive ``x`` between 2^-126 and 2^126."""
    if INTERPRETED:
        return tl.div_rn(-1.0, x)
    else:
        return tl.inline_asm_elementwise(
            "{.reg .f32 r; rcp.approx.ftz.f32 r, $1; neg.f32 $0, r;}",
            "=f,f", [x], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def divisor(scale, SHORT: tl.constexpr):
    """(-f, s', -r) of positive float32 ``scale``, for ``quotient``; NaN gives NaN."""
    exponent = tl.minimum(bits(scale) >> 23, 253)
    factor = floats((254 - exponent) << 23)
    unit = scale * factor
    inverse = reciprocal(unit)
    if not INTERPRETED:
        if not SHORT:  # two Newton steps: a division without a branch
            inverse = tl.fma(tl.fma(inverse, unit, 1.0), inverse, inverse)
            inverse = tl.fma(tl.fma(inverse, unit, 1.0), inverse, inverse)
            # They miss one mantissa, that of all ones, whose reciprocal is just above a power.
            power = floats(((253 - (bits(unit) >> 23)) << 23) + 1)
            inverse = tl.where((bits(unit) & 0x7FFFFF) == 0x7FFFFF, -power, inverse)
    return -factor, unit, inverse


@triton.jit
def quotient(y, unit, inverse, SHORT: tl.constexpr):
    """``-y / unit``; ``y``: x times -f, clamped. A zero has the sign of x."""
    if INTERPRETED:  # whose fused operations round twice
        return tl.div_rn(-y, unit)
    else:
        unit = tl.broadcast_to(unit, y.shape)
        inverse = tl.broadcast_to(inverse, y.shape)
        q = y * inverse
        if not SHORT:
            q = tl.fma(tl.fma(q, unit, y), inverse, q)
        return tl.fma(tl.fma(q, unit, y), inverse, q)


@triton.jit
def at_least(x, low):
    """max(x, low); ``low`` for NaN."""
    if INTERPRETED:  # whose maximum keeps NaN
        return tl.where(x > low, x, low)
    else:
        return tl.maximum(x, low)


@triton.jit
def within(x, bound):
    """``x`` clamped to +-``bound``, which is positive; ``bound`` in size where x is NaN."""
    if INTERPRETED:
        size = tl.where(tl.abs(x) < bound, tl.abs(x), bound)
        return tl.where(bits(x) < 0, -size, size)
    else:
        return tl.inline_asm_elementwise(
            "min.xorsign.abs.f32 $0, $1, $2;",
            "=f,f,f", [x, bound], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def within_or_nan(x, bound):
    """``within``, NaN where either is."""
    if INTERPRETED:
        both = x + bound
        return tl.where(both == both, within(x, bound), float("nan"))
    else:
        return tl.inline_asm_elementwise(
            "min.NaN.xorsign.abs.f32 $0, $1, $2;",
            "=f,f,f", [x, bound], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def coded(x, scale, high: tl.constexpr):
    """``x / scale`` clamped to +-high, correctly rounded next to codes; -0 stays.

    ``x`` counts as clamped to +-LIMIT; ``scale`` is positive. NaN where either is.
    """
    SHORT: tl.constexpr = short(x.dtype)
    minus, unit, inverse = divisor(scale, SHORT)
    bound = tl.minimum(unit * high, -LIMIT * minus, propagate_nan=tl.PropagateNan.ALL)
    return quotient(within_or_nan(widen(x) * minus, bound), unit, inverse, SHORT)


@triton.jit
def coded_by_one(x, scale, high: tl.constexpr):
    """``coded`` for one ``scale`` (a scalar) of all, for a cast that saturates at +-high.

    Dividing by a power of two is exact, and no clamp of the input shows below the cast's.
    """
    minus, unit, _ = divisor(scale, True)
    if (unit == 1.0) & (-LIMIT * minus >= high):
        found = widen(x) * -minus
    else:
        found = coded(x, scale, high)
    return found


@triton.jit
def part(y, unit, inverse):
    """``-y / unit`` clamped to 0..1, NaN as 0: for a short y or ``unit``; 0 where ``inverse`` is.

    Clamps are free, and as the estimate is clamped before it is corrected, infinities need no care.
    """
    if INTERPRETED:
        found = tl.where(inverse == 0.0, 0.0, tl.div_rn(-y, unit))
        return tl.where(found >= 1.0, 1.0, tl.where(found > 0.0, found, 0.0))
    else:
        return tl.inline_asm_elementwise(
            """{.reg .f32 q, r;
            mul.rn.sat.f32 q, $1, $3;
            fma.rn.f32 r, q, $2, $1;
            fma.rn.sat.f32 $0, r, $3, q;}""",
            "=f,f,f,f", [y, unit, inverse], tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def eighths(x, scale, keep):
    """``abs(x) / scale / 8``, correctly rounded next to codes up to 6; 0 without ``keep``."""
    SHORT: tl.constexpr = short(x.dtype)
    minus, unit, inverse = divisor(tl.where(keep, scale, 1.0), SHORT)
    y = tl.abs(widen(x)) * minus
    if SHORT:
        return part(y, unit * 8.0, tl.where(keep, inverse * 0.125, 0.0))
    else:
        y = at_least(y, tl.where(keep, unit * -6.0, 0.0))
        return quotient(y, unit, inverse, SHORT) * 0.125


@triton.jit
def coded_integer(x, scale, high: tl.constexpr):
    """``coded`` with 0 where ``scale`` is NaN."""
    SHORT: tl.constexpr = short(x.dtype)
    minus, unit, inverse = divisor(nonnan(scale), SHORT)
    bound = tl.where(scale == scale, unit * high, 0.0)
    return quotient(within(widen(x) * minus, bound), unit, inverse, SHORT)


@triton.jit
def divide_by(x, by: tl.constexpr):
    """``x / by`` for a number, correctly rounded; a NaN is the positive quiet one."""
    return quiet(tl.div_rn(x, tl.full(x.shape, by, tl.float32)))


@triton.jit
def divide_by_small(x, by: tl.constexpr):
    """``divide_by`` without a branch, for a whole number below 512 and no subnormal quotient."""
    if INTERPRETED:
        return divide_by(x, by)
    else:
        q = x * (1.0 / by)
        return quiet(tl.fma(tl.fma(q, -by, x), 1.0 / by, q))
