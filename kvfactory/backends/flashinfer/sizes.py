"""Bytes that FlashInfer's kernels need, as pure integers: what the plan reserves, the build slices.

The formulas are upper bounds of what FlashInfer's own planners take from a workspace
(``include/flashinfer/attention/scheduler.cuh``: DecodePlan, PrefillPlan, PrefillSM90Plan, MLAPlan;
``csrc/xqa/mha_sm90.cu``), for the most requests and tokens that a step may have. Partial results
of requests that are split over keys grow with neither: see ``partials``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvfactory.backends.flashinfer.choose import Kernels, Shape, choose_kernels, shape_of
from kvfactory.backends.flashinfer.partials import (
    CUDA_CORE_BLOCKS_PER_SM,
    cuda_core_bytes,
    fa2_bytes,
)
from kvfactory.kinds import align_up, ceil_div
from kvfactory.planning.cacheplan import GroupPlan, Limits
from kvfactory.spec import Spec

ALIGN = 256
MLA_WORKS = 16_384
MLA_TILE = 128
FA3_WORKS = 4096
XQA_TILE = 32
CLASSES = 3
"""Query tiles that fa2 is compiled for: 16, 64 and 128 rows."""


@dataclass(frozen=True)
class Served:
    """A group with the shape it is served in; ``direct`` when kernels read the pool itself."""

    group: GroupPlan
    shape: Shape
    kernels: Kernels
    direct: bool


@dataclass(frozen=True)
class Room:
    """The most that a step, eager or in a graph, may hold."""

    batch: int
    tokens: int
    each: int
    sms: int

    @classmethod
    def of(cls, limits: Limits, sms: int) -> Room:
        """The room of ``limits``; ``each`` is the most tokens a request verifies or decodes."""
        return cls(limits.max_requests, limits.step_tokens, 1 + limits.draft_tokens, max(sms, 1))


def serve(group: GroupPlan, direct: bool, spec: Spec) -> Served:
    """``group`` as it will be served."""
    shape = shape_of(group, direct)
    return Served(group, shape, choose_kernels(group, shape, spec), direct)


class Slots:
    """Which of a shape's plan areas is whose: a step may need several plans at once.

    ``main`` plans, then new tokens and prefix where they are attended apart, then custom masks.
    """

    def __init__(self, kernels: Kernels, deterministic: bool) -> None:
        mains = CLASSES if deterministic else 1
        self.new, self.prefix = mains, mains + 1
        self.general = mains + 2 * kernels.merged
        self.count = self.general + 1


def shapes_of(served: Sequence[Served]) -> dict[Shape, Kernels]:
    """Distinct shapes in order, with the kernels of the first group that has each."""
    found: dict[Shape, Kernels] = {}
    for one in served:
        found.setdefault(one.shape, one.kernels)
    return found


def workspace_bytes(served: Sequence[Served], limits: Limits, spec: Spec) -> Mapping[str, int]:
    """Use -> bytes of everything kept beyond the pools; uses without bytes are left out."""
    room = Room.of(limits, spec.device.num_sms)
    sets, deterministic = limits.steps_in_flight + 1, spec.backend.deterministic
    shapes = shapes_of(served)
    wanted = {
        "partial results": max(
            (float_bytes(s, k, room, deterministic) for s, k in shapes.items()), default=0
        ),
        "host plans": sum(
            sets * Slots(k, deterministic).count * int_bytes(s, k, room) for s, k in shapes.items()
        ),
        "prefix lists": sets * sum(list_bytes(one, limits) for one in _merging(served)),
        "xqa": sum(xqa_bytes(one, limits, room) for one in _with_xqa(served)),
        "dequantized": max((copy_bytes(one) for one in served if not one.direct), default=0),
    }
    return {use: num_bytes for use, num_bytes in wanted.items() if num_bytes}


def _merging(served: Sequence[Served]) -> list[Served]:
    return list({one.shape: one for one in served if one.kernels.merged}.values())


def _with_xqa(served: Sequence[Served]) -> list[Served]:
    return list({one.shape: one for one in served if "xqa" in one.kernels.names()}.values())


# ---- one shape -------------------------------------------------------------------------------


def float_bytes(shape: Shape, kernels: Kernels, room: Room, deterministic: bool) -> int:
    """Partial results of kernels that split over keys, eager or in a graph."""
    sizes = [0]
    for name in kernels.names():
        if name.startswith("mla"):
            sizes.append(2 * room.sms * MLA_TILE * (2 * shape.dim + 4) + ALIGN)
        elif name == "fa2" and not deterministic:
            prefills = "fa2" in {kernels.prefill.name, kernels.new.name, kernels.prefix.name}
            longest = room.tokens if prefills else room.each
            sizes.append(fa2_bytes(shape, longest, room.sms) + ALIGN)
        elif name == "cuda_cores":
            sizes.append(cuda_core_bytes(shape, room.sms) + ALIGN)
    return align_up(max(sizes), ALIGN)


def int_bytes(shape: Shape, kernels: Kernels, room: Room) -> int:
    """The schedule of one host plan."""
    sizes = [0]
    for name in kernels.names():
        if name.startswith("mla"):
            sizes.append(9 * 4 * MLA_WORKS + 5 * align_up(4 * room.sms, 16))
        elif name == "fa3":
            sizes.append(_fa3_ints(shape, room))
        else:
            sizes.append(_fa2_ints(shape, room))
    return align_up(max(sizes) + ALIGN, ALIGN)


def _fa2_ints(shape: Shape, room: Room) -> int:
    tiles = ceil_div(room.tokens * shape.group, 16) + room.batch
    works = max(tiles, CUDA_CORE_BLOCKS_PER_SM * room.sms // shape.kv_heads, 1)
    ints = 3 * (4 * works + 16) + 4 * (room.batch + 1) + 4 * (works + 1) + 4 * (room.tokens + 1)
    return ints + works + 128


def _fa3_ints(shape: Shape, room: Room) -> int:
    tile = 192 if shape.v_dim == 64 else 128
    works = ceil_div(room.tokens, tile) + room.batch
    works = max(works, min(works, FA3_WORKS) * shape.q_heads)
    return 7 * (4 * works + 16) + 4 * (room.sms + 1) + 16


# ---- further areas ---------------------------------------------------------------------------


def list_bytes(one: Served, limits: Limits) -> int:
    """Page lists of the tokens before a step, of one open step: indptr, last page, indices."""
    batch = limits.max_requests
    pages = batch * list_pages(one, limits)
    return 2 * align_up(4 * (batch + 1), 16) + align_up(4 * pages, ALIGN)


def list_pages(one: Served, limits: Limits) -> int:
    """The most pages of one request that a list names."""
    return ceil_div(limits.row_tokens, one.shape.page_tokens) + 1


def xqa_bytes(one: Served, limits: Limits, room: Room) -> int:
    """Semaphores, partial results and the block tables of open steps and graphs."""
    return semaphore_bytes(one, limits) + scratch_bytes(one, room) + table_bytes(one, limits)


def semaphore_bytes(one: Served, limits: Limits) -> int:
    """A counter per request and key head."""
    return align_up(4 * limits.max_requests * one.shape.kv_heads, ALIGN)


def scratch_bytes(one: Served, room: Room) -> int:
    """Partial rows and their sums for every part that a request's keys are split into.

    Requests are split only where all parts together are at most the SMs: of B = requests times key
    heads, ``mha_sm90.cu`` makes n = round(3 * SMs // B / 4) parts of each, so n > 1 takes B <= SMs
    / 2, and B * n <= 3 / 4 * SMs + B / 2 <= SMs; ``mha.cu`` makes SMs // B.
    """
    shape = one.shape
    rows = max(shape.group, XQA_TILE)
    row = rows * 2 * shape.dim
    return align_up(room.sms * (row + 8 * rows) + 4 * row, ALIGN)


def table_bytes(one: Served, limits: Limits) -> int:
    """Block tables int32 [batch, pages], one per open step and one for graphs."""
    row = list_pages(one, limits)
    return (limits.steps_in_flight + 1) * align_up(4 * limits.max_requests * row, ALIGN)


def copy_bytes(one: Served) -> int:
    """One layer of the pool in the compute type, for kernels that cannot read the pool itself."""
    place = one.group.planes[0].place
    num_pages = place.shape[1]
    entries = num_pages * one.shape.page_tokens
    return entries * 2 * sum(math.prod(e for _, e in t.logical.axes) for t in one.group.tensors)
