"""The backend's composition root: planned bytes, compiled modules and pools become runners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvfactory.backends import AttentionRunner, Resources
from kvfactory.backends.contract import stored_exactly
from kvfactory.backends.flashinfer import sizes
from kvfactory.backends.flashinfer.calls import Library, Lists
from kvfactory.backends.flashinfer.choose import Kernels, Shape, module_key, module_keys
from kvfactory.backends.flashinfer.partials import Grid
from kvfactory.backends.flashinfer.plans import Planner, Rules
from kvfactory.backends.flashinfer.runner import Runner
from kvfactory.backends.flashinfer.schedule import Scheduler
from kvfactory.backends.flashinfer.sizes import Room, Served, Slots
from kvfactory.backends.flashinfer.spaces import PlanArea, make_area
from kvfactory.backends.flashinfer.store import CopyStore, PoolStore
from kvfactory.backends.flashinfer.xqa import Xqa
from kvfactory.kinds import align_up
from kvfactory.pools import Pool


def bind(
    served: Sequence[Served], resources: Resources, library: Library
) -> Mapping[str, AttentionRunner]:
    """A runner per group; every module that they may launch is compiled."""
    library.load({key for one in served for key in module_keys(one.shape, one.kernels)})
    binder = _Binder(served, resources, library)
    schedulers: dict[Shape, Scheduler] = {}
    runners: dict[str, AttentionRunner] = {}
    for one in served:
        if one.shape not in schedulers:
            schedulers[one.shape] = binder.scheduler(one)
        pool = resources.pools[one.group.name]
        if one.direct:
            store: PoolStore | CopyStore = PoolStore(one, pool)
        else:
            store = CopyStore(one, pool, resources.workspace["dequantized"])
        xqa = binder.xqa(one, pool) if "xqa" in one.kernels.names() else None
        runners[one.group.name] = Runner(one, store, schedulers[one.shape], xqa)
    return runners


class _Cuts:
    """Hands out the planned bytes of one use, from the front."""

    def __init__(self, space: Tensor | None) -> None:
        self._space, self._at = space, 0

    def take(self, num_bytes: int) -> Tensor:
        """The next ``num_bytes``."""
        assert self._space is not None
        assert self._at + num_bytes <= len(self._space)
        self._at += num_bytes
        return self._space[self._at - num_bytes : self._at]


class _Binder:
    """Makes the parts of runners; shapes take their bytes in the order that ``sizes`` counts."""

    def __init__(self, served: Sequence[Served], resources: Resources, library: Library) -> None:
        self.plan, self.library = resources.plan, library
        self.limits, self.spec = self.plan.limits, self.plan.spec
        self.sets = self.limits.steps_in_flight + 1
        self.room = Room.of(self.limits, self.spec.device.num_sms)
        space = resources.workspace
        none = next(iter(resources.pools.values())).bound.arena[:0]
        self.floats = space.get("partial results", none)
        self.plans = _Cuts(space.get("host plans"))
        self.prefixes = _Cuts(space.get("prefix lists"))
        self.xqas = _Cuts(space.get("xqa"))
        self.xqa_parts: dict[Shape, tuple[Tensor, Tensor, list[Tensor]]] = {}

    def scheduler(self, one: Served) -> Scheduler:
        """The scheduler of a shape."""
        shape, kernels = one.shape, one.kernels
        deterministic = self.spec.backend.deterministic
        slots = Slots(kernels, deterministic)
        new = module_key(kernels.new.name, shape.with_q_type())
        planner = Planner(
            shape=shape,
            kernels=kernels,
            modules={
                name: self.library.module(module_key(name, shape))
                for name in kernels.over_pages()
                if name != "xqa"
            },
            ragged=self.library.module(new) if kernels.merged else None,
            areas=self._areas(shape, kernels, slots),
            rules=Rules(deterministic, self.room.each, one.group.kind == "cross"),
            grid=Grid(shape, self.room.sms, len(self.floats)),
        )
        return Scheduler(
            planner=planner,
            prefix_lists=self._prefix_lists(one) if kernels.merged else [],
            xqa_tables=self._xqa(one)[2] if "xqa" in kernels.names() else [],
            slots=slots,
            lossless=stored_exactly(one.group),
            copies=not one.direct,
        )

    def xqa(self, one: Served, pool: Pool) -> Xqa:
        """The launches of a group that XQA decodes."""
        semaphores, scratch, _ = self._xqa(one)
        return Xqa(
            run=self.library.xqa(module_key("xqa", one.shape)),
            semaphores=semaphores,
            scratch=scratch,
            values=pool.bound.planes[one.group.tensors[-1].name],
            num_sms=self.spec.device.num_sms,
        )

    def _areas(self, shape: Shape, kernels: Kernels, slots: Slots) -> list[list[PlanArea]]:
        num_bytes = sizes.int_bytes(shape, kernels, self.room)
        depth = self.limits.steps_in_flight
        return [
            [
                make_area(self.floats, self.plans.take(num_bytes), depth if last else 1)
                for _ in range(slots.count)
            ]
            for last in [False] * depth + [True]
        ]

    def _prefix_lists(self, one: Served) -> list[Lists]:
        batch, small = self.limits.max_requests, align_up(4 * (self.limits.max_requests + 1), 16)
        whole = sizes.list_bytes(one, self.limits)
        found = []
        for _ in range(self.sets):
            ints = self.prefixes.take(whole).view(torch.int32)
            first, second = small // 4, 2 * small // 4
            found.append(Lists(ints[: batch + 1], ints[first : first + batch], ints[second:]))
        return found

    def _xqa(self, one: Served) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Semaphores, scratch and block tables, cut once a shape."""
        if one.shape not in self.xqa_parts:
            semaphores = self.xqas.take(sizes.semaphore_bytes(one, self.limits))
            scratch = self.xqas.take(sizes.scratch_bytes(one, self.room))
            batch, width = self.limits.max_requests, self.plan.table(one.shape.table).row_pages
            whole = sizes.table_bytes(one, self.limits) // self.sets
            tables = [
                self.xqas.take(whole)[: 4 * batch * width].view(torch.int32).view(batch, width)
                for _ in range(self.sets)
            ]
            self.xqa_parts[one.shape] = (semaphores.view(torch.int32), scratch, tables)
        return self.xqa_parts[one.shape]
