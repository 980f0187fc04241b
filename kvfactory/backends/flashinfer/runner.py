"""Attention of one group through FlashInfer: the launches of a step, and what comes after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvfactory.backends.flashinfer import finish, masks
from kvfactory.backends.flashinfer.calls import Call
from kvfactory.backends.flashinfer.choose import FULL
from kvfactory.backends.flashinfer.schedule import Launch, Schedule, Scheduler, lists_of
from kvfactory.backends.flashinfer.sizes import Served
from kvfactory.backends.flashinfer.store import Layer, Store
from kvfactory.backends.flashinfer.xqa import Xqa
from kvfactory.errors import BooksError, Problem, SpecError
from kvfactory.planning.cacheplan import Attention
from kvfactory.steps.step import Step

if TYPE_CHECKING:
    from kvfactory.backends import AttendExtra


@dataclass
class Runner:
    """One group bound to its store and to the scheduler that groups of its shape share."""

    served: Served
    store: Store
    scheduler: Scheduler
    xqa: Xqa | None
    _begun: dict[int, Schedule] = field(default_factory=dict)

    @property
    def takes_new(self) -> bool:
        """Whether new tokens are attended as they came."""
        return self.served.kernels.merged

    @property
    def capturable(self) -> bool:
        """Not where a step's lengths shape the work between launches."""
        return not (self.store.copies or self.served.kernels.merged)

    @property
    def work(self) -> Attention:
        """What the group computes."""
        work = self.served.group.work
        assert isinstance(work, Attention)
        return work

    def prepare(self, step: Step) -> None:
        """Host plans for a graph's ``step``, unless a group of equal shape has made them.

        Raises:
            SpecError: constants were set after a graph was captured with the old ones.
            BooksError: lengths that are not decided yet where the kernels carry them.
        """
        self.scheduler.prepare(step, self.store.refresh())

    def begin(self, step: Step) -> None:
        """What a graph's step takes on the device once; an eager one begins when it is attended."""
        if step.graph is not None:
            self._begin(step)

    def _begin(self, step: Step) -> None:
        """Further page lists, and clean tails for XQA."""
        self.scheduler.begin(step)
        if any(launch.kernel == "xqa" for launch in self.scheduler.of(step).main):
            assert self.xqa is not None
            self.xqa.begin(lists_of(step, self.served.shape.table))

    def check(self, step: Step, extra: AttendExtra) -> None:
        """Refuse what ``attend`` cannot take.

        Raises:
            SpecError: a selection of keys, or a mask for latent attention.
            BooksError: a mask in a graph, or over lengths that are not decided yet.
        """
        if extra.select is not None:
            need = "none: FlashInfer attends to all that is visible"
            raise SpecError(Problem("attend(select=)", "a selection", need, "backend=torch"))
        if extra.mask is None:
            return
        if self.served.shape.latent:
            need = "none: FlashInfer's latent kernels take no mask"
            raise SpecError(Problem("attend(mask=)", "a mask", need, "backend=torch"))
        if step.graph is not None or not self.scheduler.of(step).work.settled:
            got = "a mask in a graph" if step.graph else "a mask over undecided lengths"
            raise BooksError(Problem("attend(mask=)", got, "a mask for an eager, decided step"))

    def attend(self, layer_index: int, q: Tensor, step: Step, extra: AttendExtra) -> Tensor:
        """Attention of ``q`` [tokens, q_heads, dim] over the pool: [tokens, q_heads, v_dim]."""
        schedule = self.scheduler.of(step)
        out = q.new_empty(*q.shape[:2], self.served.shape.v_dim)
        if not schedule.busy:
            return out.zero_()
        begins = step.graph is None and self._begun.get(step.buffer) is not schedule
        if begins:
            self._begin(step)
            self._begun[step.buffer] = schedule
        elif step.graph is not None and not step.graph.each:
            out.zero_()
        layer = self.store.layer(layer_index, schedule.slots)
        lse = None if extra.sinks is None else q.new_empty(q.shape[:2], dtype=torch.float32)
        replayed = step.graph is not None and not self.capturable  # right after the lists' making
        given = Given(q, layer, out, lse, overlap=not (begins or replayed))
        if extra.mask is not None:
            self._masked(given, step, extra.mask)
        elif schedule.new and extra.new_k is not None:
            return self._merged(given, schedule, extra)
        else:
            for launch in self.scheduler.main(step):
                self._launch(launch, given)
        self._finish(given, extra.sinks)
        return out

    # ---- launches ----------------------------------------------------------------------------

    def _launch(self, launch: Launch, given: Given) -> None:
        """Launch over the rows of ``given`` that ``launch`` covers."""
        if launch.rows is None:
            self._run(launch, given.first(launch.num_rows))
            return
        some = given.only(launch.rows)
        self._run(launch, some)
        given.out[launch.rows] = some.out
        if given.lse is not None and some.lse is not None:
            given.lse[launch.rows] = some.lse

    def _run(self, launch: Launch, given: Given, packed: masks.Packed | None = None) -> None:
        if launch.module is None:
            assert self.xqa is not None
            self.xqa.attend(launch, given.q, given.layer, given.out, self.work.scale)
            return
        layer = given.layer
        call = self._call(launch, given, (layer.k, layer.v), layer.k_scale)
        if packed is not None:
            call = call._replace(mask=packed.bits, mask_indptr=packed.indptr)
            call = call._replace(window_left=FULL, overlap=False)
        assert launch.space is not None
        launch.module.run(launch.space, launch.info, call, launch.lists)
        if layer.v_scale != 1.0:
            given.out.mul_(layer.v_scale)

    def _call(
        self, launch: Launch, given: Given, kv: tuple[Tensor, Tensor], k_scale: float
    ) -> Call:
        return Call(
            q=given.q,
            k=kv[0],
            v=kv[1],
            out=given.out,
            lse=given.lse,
            q_indptr=launch.q_indptr,
            scale=self.work.scale * k_scale,
            causal=launch.causal,
            window_left=launch.window_left,
            soft_cap=self.served.shape.soft_cap,
            overlap=given.overlap,
        )

    def _masked(self, given: Given, step: Step, mask: Tensor) -> None:
        """A custom mask, by fa2 whatever the step's own kernel is."""
        launch, work = self.scheduler.general(step)
        shape = self.served.shape
        packed = masks.custom(
            mask, work.lengths, shape.page_tokens, shape.window_left, step.positions
        )
        self._run(launch, given.first(launch.num_rows), packed)

    def _merged(self, given: Given, schedule: Schedule, extra: AttendExtra) -> Tensor:
        """New tokens as they came and, where there is one, the paged prefix, merged by LSE."""
        assert extra.new_k is not None
        new_v = extra.new_k if extra.new_v is None else extra.new_v
        lse = given.q.new_empty(given.q.shape[:2], dtype=torch.float32)
        given = given._replace(lse=lse)
        for launch in schedule.new:
            assert launch.module is not None
            assert launch.space is not None
            call = self._call(launch, given, (extra.new_k, new_v), 1.0)
            launch.module.run(launch.space, launch.info, call, None)
        out = given.out
        for launch in schedule.prefix:
            old = given._replace(out=torch.empty_like(out), lse=torch.empty_like(lse))
            self._run(launch, old, schedule.prefix_mask)
            self._finish(old, None)
            out, lse = finish.merge(out, lse, old.out, self._true_lse(old))
        if extra.sinks is not None:
            finish.apply_sinks(out, lse, extra.sinks)
        return out

    # ---- afterwards --------------------------------------------------------------------------

    def _finish(self, given: Given, sinks: Tensor | None) -> None:
        if given.layer.v_center is not None:
            finish.add_center(given.out, given.layer.v_center)
        if sinks is not None:
            finish.apply_sinks(given.out, self._true_lse(given), sinks)

    def _true_lse(self, given: Given) -> Tensor:
        """The log-sum-exp over keys with their center, base 2."""
        assert given.lse is not None
        if given.layer.k_center is None:
            return given.lse
        return given.lse + finish.shift_of(given.q, given.layer.k_center, self.work.scale)


class Given(NamedTuple):
    """What one call of attend works on; ``lse`` where something after the kernels needs it.

    No ``overlap`` where the kernel just before may have made the step's lists: see ``Call``.
    """

    q: Tensor
    layer: Layer
    out: Tensor
    lse: Tensor | None
    overlap: bool

    def first(self, count: int) -> Given:
        """The first ``count`` rows."""
        lse = None if self.lse is None else self.lse[:count]
        return self._replace(q=self.q[:count], out=self.out[:count], lse=lse)

    def only(self, rows: Tensor) -> Given:
        """Copies of some rows."""
        lse = None if self.lse is None else self.lse[rows]
        return self._replace(q=self.q[rows], out=self.out[rows], lse=lse)
