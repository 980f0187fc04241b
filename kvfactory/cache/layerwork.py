"""The work of one layer in a step: write what is new, select, attend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from kvfactory.backends import AttendExtra, AttentionRunner, SelectRunner
from kvfactory.books import Sequence as SequenceId
from kvfactory.cache.arguments import Query, check_step
from kvfactory.cache.gate import Gate, Gates
from kvfactory.cache.parts import Parts
from kvfactory.cache.retraction import page_ids
from kvfactory.cache.routing import Route, Router
from kvfactory.errors import BooksError, BuildError, Problem, SpecError, did_you_mean
from kvfactory.planning.cacheplan import Attention, GroupPlan, Select
from kvfactory.pools import Write
from kvfactory.pools.checks import tensors
from kvfactory.steps.entries import entry_slots
from kvfactory.steps.step import Step

ATTENTION_ROWS = ("k", "v")
INDEX_ROWS = ("index_k", "index_v")
Bound = TypeVar("Bound")
New = tuple[Tensor | None, Tensor | None]
"""K and V of the new tokens as they came, or nothing of both."""


class LayerWork:
    """Writes, selections and attention of a cache's layers."""

    def __init__(self, parts: Parts, gates: Gates) -> None:
        self._parts, self._gates = parts, gates
        self.router = Router(parts.plan)
        asked = [g for g in parts.plan.groups if isinstance(g.work, Attention | Select)]
        self._queries = {group.name: Query.of(group) for group in asked}

    def gate(self, layers: Sequence[int] | None, sequences: Sequence[SequenceId] | None) -> Gate:
        """A closed gate before ``layers``, or all that keep something of their own."""
        kept = [layer for group in self._parts.plan.groups for layer in group.layers]
        chosen = kept if layers is None else _layers(layers)
        if wrong := [layer for layer in chosen if layer not in kept]:
            raise SpecError(Problem("gate(layers)", repr(wrong[0]), "layers that keep something"))
        ids = None
        if sequences is not None:
            ids = page_ids([self._parts.books.view(sequence) for sequence in sequences])
        gate = Gate(chosen, self._parts.arena.device, ids)
        self._gates.add(gate)
        return gate

    # ---- writing -----------------------------------------------------------------------------

    def write(self, layer: int, step: Step, rows: Mapping[str, Tensor | None], group: str) -> None:
        """``Cache.write``: all is checked, and the gates are passed, before anything is written."""
        check_step(step, self._parts.buffers)
        given = {name: value for name, value in rows.items() if value is not None}
        for name in given:
            if name not in ATTENTION_ROWS + INDEX_ROWS:
                known = ATTENTION_ROWS + INDEX_ROWS
                need = f"one of {', '.join(known)}"
                close = did_you_mean(name, known)
                raise SpecError(Problem(f"write({name}=)", "an unknown row", need, close))
        tensors(**given)
        writes: list[Write] = []
        routes: list[Route] = []
        if not given.keys().isdisjoint(ATTENTION_ROWS):
            routes.append(self.router.attention(layer, group))
            writes.append(self._ready(routes[-1], step, given, ATTENTION_ROWS))
        if not given.keys().isdisjoint(INDEX_ROWS):
            routes.append(self.router.index(layer))
            writes.append(self._ready(routes[-1], step, given, INDEX_ROWS))
        for route in routes:
            self.pass_gates(route)
        self._parts.write(writes)

    def _ready(
        self, route: Route, step: Step, given: Mapping[str, Tensor], names: tuple[str, str]
    ) -> Write:
        values = [given[name] for name in names if name in given]
        route.check_writable(len(values))
        self._check_entries(route.group, step)
        rows = {
            tensor.name: value.unsqueeze(1) if value.dim() == 2 else value
            for tensor, value in zip(route.group.tensors, values, strict=True)
        }
        slots = entry_slots(route.group, step)
        return self._parts.pools[route.group.name].ready(route.index, slots, **rows)

    def _check_entries(self, group: GroupPlan, step: Step) -> None:
        """Refuse entries of several tokens where the host cannot know which tokens complete one.

        Raises:
            BooksError: the step was made while drafts before it were undecided.
        """
        if group.tokens_per_entry == 1 or step.host.settled.all():
            return
        if self._parts.plan.limits.draft_tokens:
            got = f"{group.tokens_per_entry} tokens an entry, behind drafts that were undecided"
            need = "a step made when the lengths before it are known"
            fix = "commit that step first"
            raise BooksError(Problem(f"write(group {group.name})", got, need, fix))

    def check_tree(self) -> None:
        """Refuse draft trees where an entry would be made of tokens of several branches.

        Raises:
            SpecError: a group has more than one token per entry.
        """
        wrong = [
            Problem(
                f"extend(parents=), group {group.name}",
                f"{group.tokens_per_entry} tokens an entry",
                "drafts in a chain",
            )
            for group in self._parts.plan.groups
            if group.tokens_per_entry > 1
        ]
        if wrong:
            raise SpecError(*wrong)

    # ---- reading -----------------------------------------------------------------------------

    def check_attend(
        self, route: Route, q: Tensor, new: New, step: Step, extra: AttendExtra
    ) -> None:
        """Refuse what ``attend`` cannot use, before anything is written.

        Raises:
            BooksError: a step of another cache, or one that is over; or a mask that the backend
                does not take in such a step.
            SpecError: tensors that do not fit the group and the step, or its backend.
            BuildError: the memory stores nothing to attend over.
        """
        check_step(step, self._parts.buffers)
        if new[0] is None and new[1] is not None:
            raise SpecError(Problem("attend(k=)", "None beside v", "k and v, or neither"))
        self._queries[route.group.name].check(q, step, extra)
        self.runner(route.group).check(step, extra)

    def check_select(self, route: Route, q: Tensor, step: Step, weights: Tensor | None) -> None:
        """The same for ``select``.

        Raises:
            BooksError, SpecError: as ``check_attend``.
        """
        check_step(step, self._parts.buffers)
        query = self._queries[route.group.name]
        query.check(q, step)
        query.check_weights(weights, step)

    def select(self, route: Route, q: Tensor, step: Step, weights: Tensor | None) -> Tensor:
        """Selection over the index keys of ``route``."""
        runner = self.selector(route.group)
        self.pass_gates(route)
        return runner.select(route.index, q, step, weights)

    def attend(
        self,
        route: Route,
        q: Tensor,
        step: Step,
        new: New,
        extra: AttendExtra,
    ) -> Tensor:
        """Attention over what ``route`` holds; ``new`` are K and V as they came."""
        runner = self.runner(route.group)
        self.pass_gates(route)
        if runner.takes_new:
            extra = replace(extra, new_k=new[0], new_v=new[1])
        return runner.attend(route.index, q, step, extra)

    def runner(self, group: GroupPlan) -> AttentionRunner:
        """The backend that attends over ``group``.

        Raises:
            BuildError: the memory stores nothing to attend over.
        """
        return _bound(self._parts.runners, group, "attend over")

    def selector(self, group: GroupPlan) -> SelectRunner:
        """The backend that selects among the index keys of ``group``.

        Raises:
            BuildError: the memory stores nothing to select from.
        """
        return _bound(self._parts.selectors, group, "select from")

    def pass_gates(self, route: Route) -> None:
        """Wait, in the order of the current stream, for what is still being loaded."""
        self._gates.wait((route.group.layers[route.index],))


def _layers(given: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(given)
    except TypeError:
        need = "a list of layers, or None for all"
        raise SpecError(Problem("gate(layers)", repr(given), need)) from None


def _bound(by_group: Mapping[str, Bound], group: GroupPlan, use: str) -> Bound:
    if group.name not in by_group:
        got, need = "memory that stores nothing", f"memory with storage to {use}"
        raise BuildError(Problem(f"group {group.name}", got, need, "memory=auto"))
    return by_group[group.name]
