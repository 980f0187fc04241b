"""Host plans of one shape: made once a step, from host lengths, for all layers and groups.

A plan splits the batch among thread blocks. The kernels read true lengths from the page lists, so
a decode plan made for slightly longer requests stays right while they grow; it is made for
``HEADROOM`` more and used until a request outgrows it or the batch changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from kvfactory.errors import BooksError, Problem
from kvfactory.flashinfer_runtime.choose import KernelName, Kernels, Shape
from kvfactory.flashinfer_runtime.library import Module, Sizes, Space
from kvfactory.flashinfer_runtime.spaces import PlanArea
from kvfactory.flashinfer_runtime.work import Counts, Work, indptr
from kvfactory.runtime.steps import Step

HEADROOM = 64
"""A decode plan is made for requests 1/64 (at least a page) longer than they are."""
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
        key = (ask.name, ask.window_left, owner, len(work.tokens))
        held = area.holder
        if isinstance(held, Held) and held.fits(key, work):
            return held.space, held.info
        grows = ask.name == "fa2" and work.decodes and not ask.ragged
        pages = work.pages + np.maximum(work.pages // HEADROOM, 1) if grows else work.pages
        split = self._may_split(ask.name, work, step)
        space, staging = area.next()
        if step.graph and not split:
            space.pinned.zero_()
        info = self.module(ask).plan(space, self._sizes(step, ask, pages, split))
        staging.mark()
        self.made += 1
        area.holder = Held(key, space, info, pages, grows)
        return space, info

    def module(self, ask: Ask) -> Module:
        """The module that ``ask`` is for."""
        if ask.ragged:
            assert self.ragged is not None
            return self.ragged
        return self.modules[ask.name]

    def _sizes(self, step: Step, ask: Ask, pages: Counts, split: bool) -> Sizes:
        shape, work = self.shape, ask.work
        page_tokens = 1 if ask.ragged else shape.page_tokens
        seen = work.tokens - work.first_page * page_tokens
        return Sizes(
            q_indptr=torch.from_numpy(indptr(work.q_tokens)),
            kv_indptr=torch.from_numpy(indptr(pages)),
            kv_tokens=torch.from_numpy(np.maximum(seen, 0).astype(np.int32)),
            rows=self._rows(work, step),
            q_heads=shape.q_heads,
            kv_heads=shape.kv_heads,
            page_tokens=page_tokens,
            dim=shape.dim,
            v_dim=shape.v_dim,
            graph=step.graph is not None,
            causal=ask.causal,
            window_left=ask.window_left,
            split=split,
            soft_cap=shape.soft_cap,
        )

    def _rows(self, work: Work, step: Step) -> int:
        """Rows that the plan holds for.

        FlashInfer derives a graph's query tile from them; where arithmetic must not depend on the
        batch they are made to give the tile that a request's own tokens give.
        """
        if step.graph is None:
            return work.rows
        each = step.graph.each
        if self.rules.deterministic and 0 < each * self.shape.group <= NARROW_TILE:
            return len(work.tokens) - 1 + each
        return step.graph.rows

    def _may_split(self, name: KernelName, work: Work, step: Step) -> bool:
        """Whether fa2 may split requests over keys.

        Not where the parts of several rows would be laid out by lengths that the host does not
        know, or may not know at a later replay, nor where there is no room for partial results.
        """
        if name != "fa2" or self.rules.deterministic:
            return False
        if work.decodes:
            return True
        roomy = self.kernels.prefill.name == "fa2" or work.longest <= self.rules.each
        return work.settled and roomy and step.graph is None


@dataclass(frozen=True)
class Held:
    """What an area holds: a plan for requests of ``pages``, usable while ``grows`` and they fit."""

    key: object
    space: Space
    info: Any
    pages: Counts
    grows: bool

    def fits(self, key: object, work: Work) -> bool:
        """Whether the plan is right for ``work`` and not far too long for it."""
        if not self.grows or key != self.key or not work.decodes:
            return False
        if not (work.pages <= self.pages).all():
            return False
        slack = self.pages.sum() - work.pages.sum()
        return bool(slack <= self.pages.sum() // 8 + 2 * len(self.pages))
