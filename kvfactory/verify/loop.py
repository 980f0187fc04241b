"""An engine's loop in small, over random inputs, that has every answer checked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvfactory.cache import Cache
from kvfactory.planning.cacheplan import Attention, GroupPlan, Recurrence, Select
from kvfactory.steps.step import Step
from kvfactory.verify.attention import Verdict, Verifier
from kvfactory.verify.effort import Effort
from kvfactory.verify.index import IndexChecker
from kvfactory.verify.state import StateChecker
from kvfactory.verify.workload import Inputs


class Loop:
    """Serves requests through ``cache``; the next step is opened before the last is committed,
    where two may be in flight. Entries of several tokens cannot be written behind drafts that are
    undecided: where a step may have such, it is committed first.

    Each layer of ``effort`` does in a step what an engine would: states advance, K and V and index
    keys are written together, then the layer selects and attends.
    """

    def __init__(self, cache: Cache, effort: Effort) -> None:
        self.cache, self.layers = cache, effort.layers
        self.seconds = 0.0
        plan = cache.plan
        self._attention = Verifier(plan, device=plan.spec.device.type)
        self._index = IndexChecker(plan, self._attention.workload)
        self._states = StateChecker(plan)
        self._exact = plan.spec.backend.new_tokens == "exact"
        self._open: list[Step] = []
        limits, per_entry = plan.limits, [group.tokens_per_entry for group in plan.groups]
        drafted = limits.draft_tokens > 0 and max(per_entry) > 1
        self._one_at_a_time = limits.steps_in_flight == 1 or drafted
        count = len(effort.lengths)
        encoder = [t.lifetime.tokens for t in plan.tables if t.lifetime.name == "encoder"]
        self._sequences = cache.open(count, cross_tokens=encoder[:1] * count)

    def step(self, counts: Sequence[int], attended: bool = True) -> None:
        """A step of ``counts`` new tokens; one that is not ``attended`` is only written."""
        with self._cache_time():
            if self._one_at_a_time:
                self._decide()
            step = self.cache.extend(self._sequences, counts)
            self._decide()
        self._open.append(step)
        selections: dict[int, Tensor] = {}
        for layer in self.layers:
            groups = self.cache.groups(layer)
            for group in groups:
                if isinstance(group.work, Recurrence):
                    views = self.cache.state(layer, step, group=group.group)
                    self._states.advance(group, layer, views, step)
            self._tokens(layer, groups, step, selections, attended)

    def _decide(self) -> None:
        if self._open:
            self.cache.commit(self._open.pop())

    def finish(self) -> None:
        """Compare final states, and close everything."""
        self.cache.commit(self._open.pop())
        self.cache.states.flush(self._sequences)
        for group in self.cache.plan.groups:
            for layer in self.layers:
                if isinstance(group.work, Recurrence) and layer in group.layers:
                    self._final_states(group, layer)
        self.cache.close(self._sequences)

    def verdicts(self) -> tuple[Verdict, ...]:
        """One of each group that does something."""
        found = []
        for group in self.cache.plan.groups:
            match group.work:
                case Attention():
                    found.append(self._attention.verdict(group))
                case Select():
                    found.append(self._index.verdict(group))
                case Recurrence():
                    found.append(self._states.verdict(group))
        return tuple(found)

    # ---- one layer ---------------------------------------------------------------------------

    def _tokens(
        self,
        layer: int,
        groups: Sequence[GroupPlan],
        step: Step,
        selections: dict[int, Tensor],
        attended: bool,
    ) -> None:
        """Write what is new in all groups of ``layer``, select, and attend."""
        index = [g for g in groups if isinstance(g.work, Select) and layer in g.layers]
        asked = [self._index.inputs(group, layer, step, attended) for group in index]
        keys = {name: x for inputs in asked for name, x in inputs.tensors.items()}
        for group in groups:
            if isinstance(group.work, Attention):
                inputs = self._attention.inputs(group, layer, step, attended)
                with self._cache_time():
                    k, v = inputs.kv
                    self.cache.write(layer, step, group=group.group, k=k, v=v, **keys)
                keys = {}
                if attended:
                    for own, queries in zip(index, asked, strict=True):
                        selections[layer] = self._select(own, layer, step, queries)
                    self._attend(group, layer, step, inputs, selections)

    def _select(self, group: GroupPlan, layer: int, step: Step, inputs: Inputs) -> Tensor:
        with self._cache_time():
            selected = self.cache.select(layer, inputs.q, None, step, weights=inputs.weights)
        self._index.compare(group, layer, step, inputs, selected)
        return selected

    def _attend(
        self,
        group: GroupPlan,
        layer: int,
        step: Step,
        inputs: Inputs,
        selections: dict[int, Tensor],
    ) -> None:
        sinks = self._attention.workload.sinks(group, layer)
        owner = self.cache.selector_of(layer) if self._selected(group) else None
        select = None if owner is None else selections[owner]
        k, v = inputs.kv if self._exact else (None, None)
        with self._cache_time():
            out = self.cache.attend(
                layer, inputs.q, k, v, step, group=group.group, sinks=sinks, select=select
            )
        self._attention.compare(group, layer, step, inputs, out, select)

    def _selected(self, group: GroupPlan) -> bool:
        works = (other.work for other in self.cache.plan.groups)
        return any(isinstance(work, Select) and work.selects == group.group for work in works)

    def _final_states(self, group: GroupPlan, layer: int) -> None:
        pool, index = self.cache.pool(layer, group.group)
        for sequence in self._sequences:
            slot = self.cache.books.view(sequence).slots[group.table]
            where = torch.tensor([slot], device=pool.bound.arena.device)
            state = {name: x[0] for name, x in pool.read(index, where, torch.float32).items()}
            self._states.finish(group, layer, sequence.row, state)

    @contextmanager
    def _cache_time(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began
