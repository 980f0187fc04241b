# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, N806, RET505
"""Smallest and largest of rows and groups in Triton, float32 whatever the rows are in.

Groups that one thread holds whole (those of four-bit formats, see ``kernels.rows``) are folded,
halves onto halves, rather than reduced: pairs of 16-bit floats take one instruction, and however
the compiler orders the registers, and it may use one order for the data and one for the scales,
these are the same operations, and happen once. Every NaN stays.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvfactory.quant.device.numerics import (
    INTERPRETED,
    LIMIT,
    SIGN_OFF,
    bits,
    floats,
    quiet,
    widen,
)

FOLDED = tl.constexpr(32)


@triton.constexpr_function
def packed(dtype):
    """The PTX suffix of pairs of ``dtype``, or nothing for wider types."""
    return {tl.bfloat16: "bf16x2", tl.float16: "f16x2"}.get(dtype, "")


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _either(a, b, OPERATION: tl.constexpr):
    """The smaller (min) or the larger (max) of each, in their own type."""
    SUFFIX: tl.constexpr = packed(a.dtype)
    if SUFFIX != "":
        return tl.inline_asm_elementwise(
            OPERATION + ".NaN." + SUFFIX + " $0, $1, $2;",
            "=r,r,r", [a, b], a.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    elif OPERATION == "min":
        return _smaller(a, b)
    else:
        return _larger(a, b)


@triton.jit
def _folded(x, OPERATION: tl.constexpr):
    """``x`` [R, N, F], F even, as float32 [R, N]."""
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    H: tl.constexpr = x.shape[2] // 2
    if H == 1:
        low, high = tl.split(widen(x))
        return _either(low, high, OPERATION)
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, (R, N, 2, H)), (0, 1, 3, 2)))
        return _folded(_either(low, high, OPERATION), OPERATION)


@triton.jit
def amax(x, axis: tl.constexpr, whole: tl.constexpr = False):
    """Largest magnitude of ``x`` along the last ``axis``, which disappears, at most LIMIT.

    The positive quiet NaN if any is NaN.
    """
    if INTERPRETED:  # which reduces fast with its own maxima only; bits order as magnitudes do
        largest = floats(tl.max(bits(widen(x)) & SIGN_OFF, axis))
    elif whole:
        low, high = extremes(x)
        largest = _larger(tl.abs(low), tl.abs(high))
    else:
        largest = tl.reduce(tl.abs(widen(x)), axis, _larger)
    return quiet(tl.minimum(largest, LIMIT, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def extremes(x):
    """Smallest and largest of groups ``x`` [R, G, B] as [R, G]; both NaN if any is NaN."""
    R: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1]
    B: tl.constexpr = x.shape[2]
    if INTERPRETED:
        x = widen(x)
        broken = tl.max((x != x).to(tl.int32), 2) != 0
        clean = tl.where(x == x, x, 0.0)
        nan = tl.full(broken.shape, float("nan"), tl.float32)
        return tl.where(broken, nan, tl.min(clean, 2)), tl.where(broken, nan, tl.max(clean, 2))
    elif B <= FOLDED:
        return _folded(x, "min"), _folded(x, "max")
    else:
        parts = tl.reshape(x, (R, G * B // FOLDED, FOLDED))
        low = tl.reshape(_folded(parts, "min"), (R, G, B // FOLDED))
        high = tl.reshape(_folded(parts, "max"), (R, G, B // FOLDED))
        return tl.reduce(low, 2, _smaller), tl.reduce(high, 2, _larger)
