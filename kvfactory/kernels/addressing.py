# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, RET505
"""Addresses from baked steps: int64, in elements, with every division by a compile-time number."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def get(spec, name, index=None):
    """Field ``name`` of a baked object, or its item ``index``."""
    value = vars(spec)[name]
    return value if index is None else value[index]


@triton.constexpr_function
def count(spec, name):
    """Length of the tuple ``name`` of a baked object."""
    return len(vars(spec)[name])


@triton.constexpr_function
def fits(limit):
    """Whether ids below ``limit`` can be divided as int32."""
    return limit < 2**31


@triton.jit
def along(index, STEPS: tl.constexpr):
    """The step of ``index`` along an axis whose steps are (divisor, high, low)."""
    if STEPS[0] == 1:
        return index.to(tl.int64) * STEPS[1]
    else:
        high = (index // STEPS[0]).to(tl.int64) * STEPS[1]
        return high + (index % STEPS[0]).to(tl.int64) * STEPS[2]


@triton.jit
def unit_step(ids, PLACE: tl.constexpr, PAGE_SLOTS: tl.constexpr, LIMIT: tl.constexpr):
    """Where the slots (or, with PAGE_SLOTS 1, pages) ``ids`` begin in a plane or part."""
    if get(PLACE, "slot_step") != 0:
        return ids * get(PLACE, "slot_step")
    else:
        if fits(LIMIT):
            ids = ids.to(tl.int32)
        page = (ids // PAGE_SLOTS).to(tl.int64) * get(PLACE, "page")
        return page + along(ids % PAGE_SLOTS, get(PLACE, "slot"))


@triton.jit
def kept(keep, width, entry, live, MODE: tl.constexpr):
    """``live`` where the caller keeps ``entry``: MODE 0 all, 1 a mask, 2 counts per ``width``."""
    if MODE == 0:
        return live
    elif MODE == 1:
        return live & (tl.load(keep + entry, mask=live, other=0) != 0)
    else:
        most = tl.load(keep + entry // width, mask=live, other=0)
        return live & (entry % width < most)


@triton.jit
def checked(ids, wanted, errors, LIMIT: tl.constexpr, MESSAGE: tl.constexpr):
    """``wanted`` where ``ids`` are in the pool; foreign ones are reported and left out."""
    inside = (ids >= 0) & (ids < LIMIT)
    tl.device_assert(inside | (wanted == 0), MESSAGE)
    foreign = wanted & (inside == 0)
    tl.store(errors + tl.zeros_like(ids), ids, mask=foreign)
    return wanted & inside
