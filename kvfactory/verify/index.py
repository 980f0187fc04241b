"""Verification of selections: what ``Cache.select`` answers against a dense top-k.

The dense top-k is written apart from the oracle: float64 scores of all entries that were ever
written, as their format stores them. A selection is right when it consists of whole units, has as
many as there are to choose from, up to ``topk``, and each of them scores no less than the last one
of the dense top-k, within rounding. What the format of the index keys costs is told apart: the
``recall`` is the share of chosen units that score no less than the last one of a top-k over the
unquantized keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvfactory.planning.cacheplan import CachePlan, GroupPlan, Select
from kvfactory.steps.step import Step
from kvfactory.verify.attention import Verdict, new_entries
from kvfactory.verify.meter import Constants, round_trip
from kvfactory.verify.workload import Inputs, Workload

ROUNDING = 1e-5


@dataclass
class _Keys:
    """Index keys [entries, dim] of one request and layer: as given, and as stored."""

    given: list[Tensor] = field(default_factory=list)
    stored: list[Tensor] = field(default_factory=list)


@dataclass
class _Count:
    """Units over all queries: chosen, wrong, open to choice, and those that recall counts."""

    chosen: int = 0
    wrong: int = 0
    choices: int = 0
    recalled: int = 0
    visible: int = 0


class IndexChecker:
    """Draws what index groups are given in each step, and checks what was selected.

    ``constants`` by group name are what the cache stores with; defaults otherwise.
    """

    def __init__(
        self,
        plan: CachePlan,
        workload: Workload,
        constants: Mapping[str, Constants] | None = None,
    ) -> None:
        self.plan, self.workload = plan, workload
        self._constants = constants or {}
        self._keys: dict[tuple[str, int, int], _Keys] = {}
        self._counts: dict[str, _Count] = {}

    def inputs(self, group: GroupPlan, layer: int, step: Step, queries: bool = True) -> Inputs:
        """Index queries and weights of the step's new tokens, and keys of its new entries."""
        counts = new_entries(group, step)
        drawn = self.workload.draw(group, len(step.positions) if queries else 0, sum(counts))
        if sum(counts):
            tensor = group.tensor("index_k")
            constants = self._constants.get(group.name, {}).get(tensor.name)
            given = drawn.tensors[tensor.name]
            stored = round_trip(tensor, given, constants, "float32")
            parts = zip(torch.split(given, counts), torch.split(stored, counts), strict=True)
            for row, (raw, kept) in zip(step.rows.tolist(), parts, strict=True):
                keys = self._keys.setdefault((group.name, layer, row), _Keys())
                keys.given.append(raw.flatten(1))
                keys.stored.append(kept.flatten(1))
        return drawn

    def compare(
        self, group: GroupPlan, layer: int, step: Step, inputs: Inputs, selected: Tensor
    ) -> None:
        """Count ``selected`` int32 [tokens, width], positions that were selected in ``layer``."""
        count = self._counts.setdefault(group.name, _Count())
        borders = step.q_indptr.tolist()
        for number, row in enumerate(step.rows.tolist()):
            part = slice(borders[number], borders[number + 1])
            keys = self._keys.get((group.name, layer, row))
            if part.stop > part.start and keys is not None:
                weights = None if inputs.weights is None else inputs.weights[part]
                dense = DenseTopK(group, inputs.q[part], step.positions[part], weights)
                _check(dense, keys, selected[part], count)

    def verdict(self, group: GroupPlan) -> Verdict:
        """The share of wrong units of ``group``, of which none may be."""
        count = self._counts.get(group.name, _Count())
        error = count.wrong / max(1, count.chosen)
        assert isinstance(group.work, Select)
        note = f"topk={group.work.topk} was never short: nothing to choose"
        if count.choices:
            share = count.chosen / count.visible
            note = (
                f"{share:.0%} of what is visible, recall {count.recalled / count.choices:.4f}"
                " of unquantized keys"
            )
        return Verdict(group.name, count.chosen, error, 0.0, 0.0, 0.0, note)


def _check(dense: DenseTopK, keys: _Keys, selected: Tensor, count: _Count) -> None:
    units, malformed = dense.units(selected, sum(len(k) for k in keys.stored))
    scores = dense.scores(torch.cat(keys.stored))
    count.wrong += malformed + dense.missing(scores, units) + int(dense.worse(scores, units).sum())
    count.chosen += int(units.sum())
    seen = scores > -torch.inf
    count.visible += int(seen.sum())
    short = seen.sum(1) > dense.topk
    if short.any():
        better = units & ~dense.worse(dense.scores(torch.cat(keys.given)), units)
        count.choices += int(units[short].sum())
        count.recalled += int(better[short].sum())


class DenseTopK:
    """All scores of queries [tokens, heads, dim] at ``positions`` int64 [tokens], in float64."""

    def __init__(
        self, group: GroupPlan, q: Tensor, positions: Tensor, weights: Tensor | None
    ) -> None:
        assert isinstance(group.work, Select)
        self.topk, self.per_entry = group.work.topk, group.tokens_per_entry
        self.unit_tokens = max(group.work.block_tokens, self.per_entry)
        self.blocks = self.unit_tokens > self.per_entry
        self.q, self.positions = q.double(), positions
        self.weights = None if weights is None or self.blocks else weights.double()

    def scores(self, keys: Tensor) -> Tensor:
        """Scores [tokens, units], -inf where a query sees none of a unit, +inf where it must."""
        last = (torch.arange(len(keys)) + 1) * self.per_entry - 1
        logits: Tensor = (
            torch.einsum("thd,ed->the", self.q, keys.double()) / self.q.shape[-1] ** 0.5
        )
        hidden = last.to(keys.device) > self.positions[:, None]
        if not self.blocks:
            logits = logits.clamp(min=0)
            if self.weights is not None:
                logits = logits * self.weights[..., None]
            return logits.sum(1).masked_fill(hidden, -torch.inf)
        best = logits.max(1).values.masked_fill(hidden, -torch.inf)
        entries = self.unit_tokens // self.per_entry
        pieces = [piece.max(1).values for piece in torch.split(best, entries, dim=1)]
        found = torch.stack(pieces, 1)
        own = torch.arange(found.shape[1], device=keys.device) == (
            self.positions[:, None] // self.unit_tokens
        )
        return found.masked_fill(own & (found > -torch.inf), torch.inf)

    def missing(self, scores: Tensor, units: Tensor) -> int:
        """How many units [tokens, units] are too few, or too many."""
        wanted = (scores > -torch.inf).sum(1).clamp(max=self.topk)
        return int((wanted - units.sum(1)).abs().sum())

    def worse(self, scores: Tensor, units: Tensor) -> Tensor:
        """Units that score less than the last one of the top-k, bool [tokens, units]."""
        if not scores.shape[1]:
            return units
        top = torch.topk(scores, min(self.topk, scores.shape[1]), dim=1).values
        last = top.masked_fill(top == -torch.inf, torch.inf).amin(1, keepdim=True)
        size = scores.masked_fill(scores.abs() == torch.inf, 0).abs().amax(1, keepdim=True)
        return units & (scores < last - ROUNDING * size)

    def units(self, selected: Tensor, entries: int) -> tuple[Tensor, int]:
        """Units that positions int [tokens, width] name, bool [tokens, units]; and how many
        positions are too many or missing: a unit is chosen whole, up to the query, and tokens that
        no entry speaks for yet always are.
        """
        tokens = int(self.positions.max()) + 1
        own = self.positions[:, None]
        place = torch.arange(tokens, device=selected.device)
        inside = (selected >= 0) & (selected < tokens)
        named = torch.zeros(len(selected), tokens + 1, dtype=torch.bool, device=selected.device)
        named = named.scatter_(1, torch.where(inside, selected, tokens).long(), True)[:, :tokens]
        tail = (place >= (own + 1) // self.per_entry * self.per_entry) & (place <= own)
        unit = place // self.unit_tokens
        count = -(-entries * self.per_entry // self.unit_tokens)
        marks = torch.zeros(len(selected), max(count, int(unit.max()) + 1), dtype=torch.int64)
        marks = marks.to(selected.device).index_add_(1, unit, (named & ~tail).long())
        chosen = marks > 0
        expected = (chosen[:, unit] & (place <= own) & ~tail) | tail
        beyond = (selected >= tokens).sum() + chosen[:, count:].sum()
        return chosen[:, :count], int((expected ^ named).sum() + beyond)
