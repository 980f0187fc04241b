"""``build``: the composition root. A plan becomes memory, pools, books and backends, only here.

On a GPU it also compiles every kernel that the plan can launch, so that an engine's loop never
waits for a compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfactory.backends import BACKENDS, AttentionRunner, Resources, SelectRunner
from kvfactory.books import Books
from kvfactory.books.shape import books_shape
from kvfactory.cache import Cache
from kvfactory.cache.parts import Parts
from kvfactory.calibration import required_constants
from kvfactory.calibration.checkpoint import read_constants
from kvfactory.errors import BuildError, OutOfMemory, Problem, SpecError
from kvfactory.memory import MEMORIES
from kvfactory.planning.cacheplan import Attention, CachePlan, Select
from kvfactory.pools import MakeOps, Pool, TorchOps
from kvfactory.quant import resolve_codec
from kvfactory.steps.buffers import StepBuffers
from kvfactory.steps.indexing import Indexer, TorchIndexer

if TYPE_CHECKING:
    from kvfactory.kernels import ErrorWords


def build(plan: CachePlan, device: str | None = None) -> Cache:
    """The cache of ``plan`` on ``device`` (default: the plan's device type).

    Raises:
        OutOfMemory: too little free memory; a BuildError too.
        BuildError: a device that is not the one planned for, or a library that is missing.
        SpecError: ``plan`` is none, or ``kv.constants`` names a file that lacks a constant or
            cannot be used.
    """
    if not isinstance(plan, CachePlan):
        fix = "build(plan(spec))"
        raise SpecError(Problem("build(plan)", f"a {type(plan).__name__}", "a CachePlan", fix))
    target = device or plan.spec.device.type
    _check_device(plan, torch.device(target))
    arena = _allocate(plan, target)
    backed = _placeholder(plan) if plan.counted_bytes else arena
    errors = _error_words(plan, backed)
    make_ops = _mover(errors)
    pools = {group.name: Pool(group, backed, make_ops) for group in (*plan.groups, *plan.annexes)}
    if not plan.counted_bytes:
        _load_constants(plan, pools)
    runners, selectors = _bind(plan, pools, arena)
    parts = Parts(
        plan=plan,
        arena=arena,
        books=Books(books_shape(plan)),
        pools=pools,
        runners=runners,
        selectors=selectors,
        buffers=StepBuffers(plan, arena, indexer_of(plan, arena)),
        errors=errors,
    )
    return Cache(_with_kernels(parts) if arena.is_cuda else parts)


def _with_kernels(parts: Parts) -> Parts:
    """``parts`` whose layers write in one launch, with all kernels compiled."""
    from kvfactory.kernels import FusedWrites, TritonOps, warm_up
    from kvfactory.kernels.index import IndexBuild

    fused, indexer = FusedWrites(parts.arena), parts.buffers.indexer
    wanted = [
        kernel
        for pool in parts.pools.values()
        if isinstance(pool.ops, TritonOps)
        for kernel in pool.ops.kernels()
    ]
    assert isinstance(indexer, IndexBuild)
    warm_up([*indexer.kernels(), *fused.kernels(parts.plan, parts.pools), *wanted])
    return replace(parts, write=fused.run)


def indexer_of(plan: CachePlan, arena: Tensor) -> Indexer:
    """What makes indices of steps: one launch on a GPU, torch elsewhere."""
    if not arena.is_cuda:
        return TorchIndexer(plan, arena)
    from kvfactory.kernels.index import IndexBuild

    return IndexBuild(plan, arena)


def _error_words(plan: CachePlan, arena: Tensor) -> ErrorWords | None:
    """Where kernels report foreign ids, a word per table; None where torch moves the bytes."""
    if not arena.is_cuda:
        return None
    from kvfactory.kernels import ErrorWords

    groups = (*plan.groups, *plan.annexes)
    return ErrorWords(tuple(dict.fromkeys(group.table for group in groups)), arena.device)


def _mover(errors: ErrorWords | None) -> MakeOps:
    """Triton kernels on a GPU, torch elsewhere."""
    if errors is None:
        return TorchOps
    from kvfactory.kernels import kernel_ops

    return kernel_ops(errors)


def _load_constants(plan: CachePlan, pools: Mapping[str, Pool]) -> None:
    """Set what ``kv.constants`` names; without it every constant keeps its default."""
    path = plan.spec.kv.constants
    if path is None:
        return
    stored = [
        (layer, t.logical, resolve_codec(t.quant, dict(t.options), "kv.constants"))
        for group in plan.groups
        for layer in group.layers
        for t in group.tensors
    ]
    values = read_constants(path, required_constants(stored)).values
    for pool in pools.values():
        own = pool.constant_keys()
        pool.set_constants({key: value for key, value in values.items() if key in own})


def _placeholder(plan: CachePlan) -> Tensor:
    """What groups that are only counted lie in: addresses without bytes."""
    return torch.empty(plan.counted_bytes, dtype=torch.uint8, device="meta")


def _bind(
    plan: CachePlan, pools: Mapping[str, Pool], arena: Tensor
) -> tuple[dict[str, AttentionRunner], dict[str, SelectRunner]]:
    runners: dict[str, AttentionRunner] = {}
    selectors: dict[str, SelectRunner] = {}
    for name in dict.fromkeys(group.choice.backend for group in plan.groups if group.choice):
        served = [g for g in plan.groups if g.choice and g.choice.backend == name]
        spaces = {
            w.use: arena[w.offset : w.offset + w.num_bytes]
            for w in plan.workspaces
            if w.backend == name
        }
        backend, resources = BACKENDS.get(name, "backend.name"), Resources(plan, pools, spaces)
        attending = [group for group in served if isinstance(group.work, Attention)]
        selecting = [group for group in served if isinstance(group.work, Select)]
        if attending:
            runners |= backend.bind(attending, resources)
        if selecting:
            selectors |= backend.selectors(selecting, resources)
    return runners, selectors


def _check_device(plan: CachePlan, device: torch.device) -> None:
    planned = plan.spec.device
    if device.type != planned.type:
        need = f"a device of type {planned.type}, which the plan is for"
        fix = "device=auto" if device.type == "cuda" else "device=cpu"
        raise BuildError(Problem("device", str(device), need, fix))
    if device.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise BuildError(Problem("device", "no CUDA device here", "one", "device=cpu"))
    card = torch.cuda.get_device_properties(device)
    found = {"sm": card.major * 10 + card.minor, "num_sms": card.multi_processor_count}
    wanted = {"sm": planned.sm, "num_sms": planned.num_sms}
    wrong = [
        Problem(
            f"device.{key}", str(found[key]), f"{wanted[key]}, which the plan is for", "device=auto"
        )
        for key in found
        if found[key] != wanted[key]
    ]
    if wrong:
        raise BuildError(*wrong)


def _allocate(plan: CachePlan, device: str) -> Tensor:
    """The arena; too little memory is an error in words, before or by the allocator."""
    memory = MEMORIES.get(plan.memory, "memory.name")
    free = _free_bytes(device, plan.memory)
    if free is not None and free < plan.bytes:
        raise OutOfMemory(_short(plan, f"{free} B free"))
    try:
        return memory.allocate(plan.bytes, device)
    except (MemoryError, RuntimeError) as error:
        said = next(iter(str(error).splitlines()), "no memory")
        raise OutOfMemory(_short(plan, said)) from error
    except Exception as error:  # a fault of a third party's plugin
        got = f"{plan.memory!r}, which fails to allocate: {type(error).__name__}: {error}"
        fix = f"mend or uninstall {MEMORIES.origin(plan.memory)}"
        raise BuildError(Problem("memory.name", got, "a working memory plugin", fix)) from error


def _free_bytes(device: str, memory: str) -> int | None:
    if memory == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return None


def _short(plan: CachePlan, got: str) -> Problem:
    return Problem("memory.budget", got, f"{plan.bytes} B for the arena", "a smaller memory.budget")
