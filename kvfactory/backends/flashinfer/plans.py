"""Host plans of one shape: made once a step, from host lengths, for all layers and groups.

A plan splits the batch among thread blocks. The kernels read true lengths from the page lists, so
a decode plan that keeps requests whole names no lengths at all: where there are too many to split
it serves every batch of its size, else until they have grown by a quarter in all. One that splits
them is made for ``HEADROOM`` more than they are, and used until a request outgrows it or the batch
changes.
Latent attention alone carries lengths in its plan: ``latent`` puts new ones in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from kvfactory.backends.flashinfer.calls import Module, Sizes, Space
from kvfactory.backends.flashinfer.choose import KernelName, Kernels, Shape
from kvfactory.backends.flashinfer.latent import Runs, runs_of
from kvfactory.backends.flashinfer.partials import Grid
from kvfactory.backends.flashinfer.spaces import PlanArea
from kvfactory.backends.flashinfer.work import Counts, Work
from kvfactory.books.ids import indptr
from kvfactory.errors import BooksError, Problem
from kvfactory.steps.step import Step

HEADROOM = 64
"""A decode plan that splits is made for requests 1/64 (at least a page) longer than they are."""
LOOK_EVERY = 16
"""Steps after which to look whether splitting would pay by now."""
NARROW_TILE = 64


@dataclass(frozen=True)
class Rules:
    """What the backend choice and the engine ask of plans.

    ``each`` is the most tokens that a request verifies in a step; where it is 1, every token of a
    step stays, and the host's lengths are exact. ``own_lengths``: see ``work_of``.
    """

    deterministic: bool
    each: int
    own_lengths: bool

    @property
    def exact_lengths(self) -> bool:
        """Whether lengths on the host are exact while earlier steps are undecided."""
        return self.own_lengths or self.each == 1


class Ask(NamedTuple):
    """A plan to make: of kernel ``name`` for ``work``, in ``slot`` of the step's areas.

    ``ragged`` keys are not in pages: each token is one.
    """

    name: KernelName
    work: Work
    slot: int
    causal: bool
    window_left: int
    ragged: bool = False


@dataclass
class Planner:
    """Makes plans for one shape; ``areas`` [set][slot] hold them, the last set for graphs."""

    shape: Shape
    kernels: Kernels
    modules: Mapping[KernelName, Module]
    ragged: Module | None
    areas: list[list[PlanArea]]
    rules: Rules
    grid: Grid
    made: int = field(default=0)

    def kernel_for(self, work: Work, step: Step) -> KernelName:
        """The kernel for ``work``.

        All but fa2 and xqa carry lengths in their plan, or read past the end when a request is
        shorter than planned, so they need exact ones. A graph keeps to one kernel, so for decode
        and verification it takes the one that always may.

        Raises:
            BooksError: lengths that are not decided yet where there is no such kernel.
        """
        name = (self.kernels.decode if work.decodes else self.kernels.prefill).name
        if name in ("fa2", "xqa"):
            return name
        repeats = step.graph is not None and step.graph.each > 0
        if not self.shape.latent and (repeats or not (work.settled or step.graph)):
            return self.kernels.general.name
        if work.settled:
            return name
        got = "an earlier step whose accepted counts are still open"
        need = f"decided lengths, which plans of {name} carry"
        raise BooksError(Problem(f"table {self.shape.table}", got, need, "commit that step first"))

    def plan(self, step: Step, ask: Ask) -> tuple[Space, Any]:
        """The space and schedule for ``ask``, those of an earlier step where they still fit."""
        area, work = self.areas[min(step.buffer, len(self.areas) - 1)][ask.slot], ask.work
        owner = step.buffer if step.graph else 0
        key = (ask.name, ask.window_left, owner, work.batch)
        held = area.holder
        area.uses += 1
        if isinstance(held, Held) and held.fits(key, work, area.uses):
            return held.space, held.info
        if isinstance(held, Carrying) and held.key == key and self._carries(ask):
            if held.runs.fits(self._seen(work)):
                return self._rewritten(area, held, work)
        parts = self._parts(ask, step)
        whole = self._whole(ask, parts)
        pages = work.lengths.pages
        if self._grows(ask) and parts:
            pages = pages + np.maximum(pages // HEADROOM, 1)
        graph = step.graph is not None and not whole
        space, staging = area.next()
        if graph and not parts:
            space.pinned.zero_()
        info = self.module(ask).plan(space, self._sizes(step, ask, pages, parts, graph))
        staging.mark()
        self.made += 1
        if self._carries(ask):
            area.holder = self._carrying(ask, key, space, info)
        else:
            area.holder = self._held(ask, whole, pages, Held(key, space, info))
        return space, info

    def _carries(self, ask: Ask) -> bool:
        """Whether the plan carries lengths that later steps can replace."""
        return self.shape.latent and ask.work.decodes and not ask.causal

    def _carrying(self, ask: Ask, key: object, space: Space, info: Any) -> Carrying | None:
        fields = self.module(ask).runs(space, info)
        runs = runs_of(fields, space.pinned, self._seen(ask.work)) if fields else None
        return Carrying(key, space, info, runs) if runs else None

    def _rewritten(self, area: PlanArea, held: Carrying, work: Work) -> tuple[Space, Any]:
        """The plan ``held`` by ``area``, with the lengths of ``work`` put in."""
        space, staging = area.next()
        first = indptr(work.lengths.pages)
        held.runs.write(space.pinned, space.ints, first, self._seen(work))
        staging.mark()
        return held.space, held.info

    def _held(self, ask: Ask, whole: bool, pages: Counts, plan: Held) -> Held | None:
        """``plan``, made for so many ``pages`` each, with what it may be used for again, if any."""
        if whole:
            return plan
        if not self._grows(ask):
            return None
        batch = ask.work.batch
        if not self.module(ask).splits(plan.info):
            total, few = int(ask.work.readable.sum()), 4 * self.shape.page_tokens * batch
            return plan._replace(total=range(total * 3 // 4 - few, total * 5 // 4 + few))
        slack = int(pages.sum()) // 8 + 2 * batch
        return plan._replace(most=pages, slack=slack) if ask.name == "fa2" else None

    def module(self, ask: Ask) -> Module:
        """The module that ``ask`` is for."""
        if ask.ragged:
            assert self.ragged is not None
            return self.ragged
        return self.modules[ask.name]

    def _sizes(self, step: Step, ask: Ask, pages: Counts, parts: int, graph: bool) -> Sizes:
        shape, work = self.shape, ask.work
        page_tokens = 1 if ask.ragged else shape.page_tokens
        lengths = work.lengths
        return Sizes(
            q_indptr=torch.from_numpy(indptr(lengths.q_tokens)),
            kv_indptr=torch.from_numpy(indptr(pages)),
            kv_tokens=torch.from_numpy(self._seen(work, page_tokens).astype(np.int32)),
            rows=self._rows(work, step) if graph else work.rows,
            q_heads=shape.q_heads,
            kv_heads=shape.kv_heads,
            page_tokens=page_tokens,
            dim=shape.dim,
            v_dim=shape.v_dim,
            graph=graph,
            causal=ask.causal,
            window_left=ask.window_left,
            split=parts > 0,
            idle_blocks=self.grid.idle_blocks(parts),
            soft_cap=shape.soft_cap,
        )

    def _seen(self, work: Work, page_tokens: int = 0) -> Counts:
        """Tokens of each request from the first page on that the step can see, int64 [batch]."""
        lengths = work.lengths
        before = lengths.first_page * (page_tokens or self.shape.page_tokens)
        seen: Counts = np.maximum(lengths.tokens - before, 0)
        return seen

    def _rows(self, work: Work, step: Step) -> int:
        """Rows that a graph's plan holds for.

        FlashInfer derives the query tile from them; where arithmetic must not depend on the batch
        they are made to give the tile that a request's own tokens give.
        """
        assert step.graph is not None
        each = step.graph.each
        if self.rules.deterministic and 0 < each * self.shape.group <= NARROW_TILE:
            return work.batch - 1 + each
        return step.graph.rows

    def _parts(self, ask: Ask, step: Step) -> int:
        """Into how many parts fa2 may split the requests over keys; 0: they stay whole.

        That is where the parts of several rows would be laid out by lengths that the host does not
        know, or may not know at a later replay.
        """
        work = ask.work
        if ask.name != "fa2" or self.rules.deterministic:
            return 0
        if work.decodes:
            return self.grid.decode_parts(work.batch, step.graph is not None)
        if step.graph is not None or not work.settled:
            return 0
        return self.grid.parts(work.batch, work.rows)

    def _grows(self, ask: Ask) -> bool:
        """Whether the kernel takes lengths from the page lists, so that a plan may last."""
        return ask.name in ("fa2", "cuda_cores") and ask.work.decodes and not ask.ragged

    def _whole(self, ask: Ask, parts: int) -> bool:
        """Whether the plan is the same for all batches of this size."""
        if ask.name == "cuda_cores":
            return self._grows(ask) and self.grid.whole_on_cuda_cores(ask.work.batch)
        return self._grows(ask) and not parts


class Held(NamedTuple):
    """What an area holds: a plan that is right for requests of any length or, with ``most``, of up
    to so many pages each, and too long for those of more than ``slack`` fewer in all.

    With ``total`` another plan is likely the faster one for other numbers of readable tokens.
    """

    key: object
    space: Space
    info: Any
    total: range | None = None
    most: Counts | None = None
    slack: int = 0

    def fits(self, key: object, work: Work, uses: int) -> bool:
        """Whether to use the plan for ``work``, when its area has served ``uses`` times."""
        if key != self.key or not work.decodes:
            return False
        if self.total is not None:
            return uses % LOOK_EVERY > 0 or int(work.readable.sum()) in self.total
        if self.most is None:
            return True
        spare = self.most - work.lengths.pages
        return bool(spare.min() >= 0 and spare.sum() <= self.slack)


class Carrying(NamedTuple):
    """What an area of latent attention holds: a plan whose ``runs`` take new lengths."""

    key: object
    space: Space
    info: Any
    runs: Runs
