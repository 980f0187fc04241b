"""What a cache must hold, whatever happened to it: a function of the tokens of each sequence.

Rows of K, V and index keys depend on the token alone, so that every stored byte at a position is
known beforehand. States are computed token by token, beside the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from cache_support import VOCABULARY, Feed
from torch import Tensor

from kvfactory.books import Segment
from kvfactory.builder import build
from kvfactory.cache import Cache
from kvfactory.planning.cacheplan import Annex, GroupPlan, Recurrence
from kvfactory.states.planes import device_ids, fetch, store
from kvfactory.steps.step import Step
from kvfactory.verify.meter import round_trip
from kvfactory.verify.recurrent import State

States = dict[tuple[str, int], State]
"""(group, layer) -> the state of one sequence."""


@dataclass(frozen=True)
class Life:
    """A sequence as it must be: its ``tokens``; its state is that number ``root`` of the oracle
    (0: zeros), then every token from ``since`` on.
    """

    tokens: tuple[int, ...] = ()
    root: int = 0
    since: int = 0

    def then(self, new: Sequence[int]) -> Life:
        """Some tokens later."""
        return replace(self, tokens=(*self.tokens, *new))

    def part(self, stop: int) -> Life:
        """Some tokens earlier."""
        assert stop >= self.since
        return replace(self, tokens=self.tokens[:stop])


class Oracle:
    """Answers for one cache, and writes to it what an engine would."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.feed = cache, Feed(cache)
        self.paged = [g for g in cache.plan.groups if g.page_slots > 1]
        self.recurrent = [g for g in cache.plan.groups if isinstance(g.work, Recurrence)]
        self._codes = {(g.name, i): self._encoded(g, i) for g in self.paged for i in g.layers}
        zeros: States = {}
        self._states: dict[tuple[int, tuple[int, ...]], States] = {(0, ()): zeros}
        self._roots = 1
        for group in self.recurrent:
            for layer in group.layers:
                zeros[group.name, layer] = self.feed.linear(group, layer)[0].fresh()

    def _encoded(self, group: GroupPlan, layer: int) -> dict[str, Tensor]:
        """Plane -> [vocabulary, *axes]: every token's bytes, from a pool of its own."""
        pool, index = build(self.cache.plan).pool(layer, group.group)
        slots, found = torch.arange(pool.num_slots), []
        for ids in torch.arange(VOCABULARY).split(pool.num_slots):
            rows = {t.name: self.feed.rows(layer, group, t.name, ids) for t in group.tensors}
            pool.write(index, slots[: len(ids)], **rows)
            found.append(pool.gather(slots[: len(ids)], index))
        return {key: torch.cat([part[key] for part in found]) for key in found[0]}

    # ---- an engine's part ----------------------------------------------------------------------

    def write(self, step: Step, tokens: Sequence[int]) -> None:
        """Store the rows of the step's new tokens and advance the states."""
        ids = torch.tensor(tokens, dtype=torch.int64)
        for layer in self.feed.layers:
            rows: dict[str, Any] = {}
            for group in self.cache.groups(layer):
                if isinstance(group.work, Recurrence):
                    self.feed.advance(layer, group, step, ids)
                else:
                    rows |= {
                        t.name: self.feed.rows(layer, group, t.name, ids) for t in group.tensors
                    }
            if rows:
                self.cache.write(layer, step, **rows)

    def store_state(self, slots: dict[str, int], life: Life) -> None:
        """What a layer does that writes a tracked state."""
        for group in self.recurrent:
            for index, layer in enumerate(group.layers):
                pool = self.cache.pool(layer, group.group)[0]
                state, slot = self.states(life)[group.name, layer], slots[group.table]
                for name, value in state.items():
                    store(pool, index, device_ids(pool, [slot]), name, value.unsqueeze(0))

    # ---- what must be --------------------------------------------------------------------------

    def states(self, life: Life) -> States:
        """The states after ``life``, token by token."""
        own = life.tokens[life.since :]
        known = len(own)
        while (life.root, own[:known]) not in self._states:
            known -= 1
        for stop in range(known, len(own)):
            before, after = self._states[life.root, own[:stop]], {}
            for group in self.recurrent:
                for layer in group.layers:
                    driven, inputs = self.feed.linear(group, layer)
                    token = inputs.part(own[stop], own[stop] + 1)
                    after[group.name, layer] = driven.run(before[group.name, layer], token).state
            self._states[life.root, own[: stop + 1]] = after
        return self._states[life.root, own]

    def saved(self, life: Life) -> Life:
        """``life`` with the state that comes back from a checkpoint."""
        found: States = {}
        for (name, layer), state in self.states(life).items():
            annex = self._annex(name)
            found[name, layer] = {
                key: round_trip(annex.tensor(key), value.unsqueeze(0))[0].to(value.dtype)
                for key, value in state.items()
            }
        root, self._roots = self._roots, self._roots + 1
        self._states[root, ()] = found
        return Life(life.tokens, root, len(life.tokens))

    def _annex(self, name: str) -> GroupPlan:
        (annex,) = (
            g
            for g in self.cache.plan.annexes
            if isinstance(g.work, Annex) and (g.work.of, g.work.use) == (name, "checkpoints")
        )
        return annex

    # ---- what is -------------------------------------------------------------------------------

    def check(self, view: Segment, life: Life) -> None:
        """Every byte that ``view``, of all tokens of ``life``, still has to show."""
        assert view.stop == len(life.tokens)
        for group in self.paged:
            table, part = self.cache.plan.table(group.table), view.parts[group.table]
            seen = np.arange(table.lifetime.first_visible(view.stop), view.stop)
            pages = part.pages[seen // table.page_tokens - part.first]
            slots = torch.from_numpy(pages * table.page_tokens + seen % table.page_tokens)
            ids = torch.tensor(life.tokens, dtype=torch.int64)[torch.from_numpy(seen)]
            for layer in group.layers:
                pool, index = self.cache.pool(layer, group.group)
                codes = self._codes[group.name, layer]
                for key, stored in pool.gather(slots, index).items():
                    same = bits(stored) == bits(codes[key][ids])
                    assert same.all(), f"{group.name}, layer {layer}, {key}"
        for group in self.recurrent:
            if view.slots[group.table]:
                self._check_state(group, view.slots[group.table], life)

    def _check_state(self, group: GroupPlan, place: int, life: Life) -> None:
        (table,) = (s for s in self.cache.plan.states if s.name == group.table)
        if place >= table.num_slots:
            return  # a checkpoint: checked when it comes back
        for index, layer in enumerate(group.layers):
            pool = self.cache.pool(layer, group.group)[0]
            slot = device_ids(pool, [place])
            state = {t.name: fetch(pool, index, slot, t.name)[0] for t in group.tensors}
            if ring := self.cache.states.ring(group):
                state["recurrent"] = ring.current(index, slot)[0]
            for name, want in self.states(life)[group.name, layer].items():
                said = f"{group.name}, layer {layer}, {name}, root {life.root}"
                torch.testing.assert_close(
                    state[name], want, rtol=1e-5, atol=1e-6, msg=lambda text, said=said: said + text
                )

    def raw(self, view: Segment, ring: bool = True) -> dict[str, Tensor]:
        """All planes at the pages and slots of ``view``: states and index keys, rings too."""
        found, skipped = {}, () if ring else (Annex,)
        for group in self.cache.plan.groups:
            if group.table in view.slots and not isinstance(group.work, skipped):
                pool = self.cache._parts.pools[group.name]
                for key, x in pool.gather(torch.tensor([view.slots[group.table]])).items():
                    found[f"{group.name}.{key}"] = x
        return found


def bits(x: Tensor) -> Tensor:
    """The bytes of ``x``."""
    return x.contiguous().view(torch.uint8)
