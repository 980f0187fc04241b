"""Verification of attention: what a cache answers against dense attention over what it was given.

With the built-in workload the error of an answer is between 1.00 and 1.03 times the root of squares
of the errors of the stored keys and values. A group passes while its error stays below 1.25 times
that, and 0.003 for arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfactory.planning.cacheplan import Attention, CachePlan, GroupPlan
from kvfactory.quant.numerics import torch_dtype
from kvfactory.reference import dense_attention, visible_keys
from kvfactory.steps.step import Step
from kvfactory.verify.meter import Constants, ErrorMeter, storage_errors
from kvfactory.verify.workload import Inputs, Workload


def acceptance(key_error: float, value_error: float) -> float:
    """The largest relative error of attention over keys and values stored with these errors."""
    return 1.25 * math.hypot(key_error, value_error) + 3e-3


class History:
    """Everything that one request was given in one layer of a group, unquantized."""

    def __init__(self, group: GroupPlan, device: str = "cpu") -> None:
        assert isinstance(group.work, Attention)
        self.group, self.work = group, group.work
        self.entries = 0
        self._rows = {
            tensor.name: torch.empty(
                (0, *(extent for _, extent in tensor.logical.axes)),
                dtype=torch_dtype(tensor.logical.dtype),
                device=device,
            )
            for tensor in group.tensors
        }

    def append(self, tensors: Mapping[str, Tensor]) -> None:
        """Further rows [entries, heads, dim] by tensor name, of all tensors of the group."""
        new = len(next(iter(tensors.values()))) if tensors else 0
        for name, x in tensors.items():
            kept = self._rows[name]
            if len(kept) < self.entries + new:
                room = kept.new_empty(2 * (self.entries + new), *kept.shape[1:])
                room[: self.entries] = kept[: self.entries]
                self._rows[name] = kept = room
            kept[self.entries : self.entries + new] = x
        self.entries += new

    def attend(
        self,
        q: Tensor,
        positions: Tensor,
        sinks: Tensor | None = None,
        select: Tensor | None = None,
    ) -> Tensor:
        """Dense attention of queries at ``positions`` int64 [tokens]: float32, like ``q``.

        ``select`` int [tokens, topk] as for ``Cache.attend``.
        """
        rows = {name: x[: self.entries] for name, x in self._rows.items()}
        if self.work.geometry == "mla":
            v = rows["latent"]
            k = torch.cat([v, rows["rope"]], -1) if "rope" in rows else v
        else:
            k = rows["k"]
            v = rows.get("v", k)
        entry = torch.arange(self.entries, device=q.device)
        ends = (entry + 1) * self.group.tokens_per_entry - 1
        seen = visible_keys(self.work, positions, ends, select)
        return dense_attention(q, k, v, seen, self.work, sinks)


@dataclass(frozen=True)
class Verdict:
    """How a group did: ``error`` of its answers, the ``bound`` on it, and where it comes from.

    ``key_error`` and ``value_error`` are those of what is stored; ``note`` says more in words.
    """

    group: str
    numbers: int
    error: float
    bound: float
    key_error: float
    value_error: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether something was compared and its error is within the bound; NaN is not."""
        return self.numbers > 0 and self.error <= self.bound


class Verifier:
    """Draws the inputs of each step, remembers them, and compares the answers.

    ``constants`` by group name are what the cache stores with (one layer's; defaults otherwise).
    Requests are told apart by their row, so each row serves one.
    """

    def __init__(
        self,
        plan: CachePlan,
        seed: int = 0,
        device: str = "cpu",
        constants: Mapping[str, Constants] | None = None,
    ) -> None:
        self.plan, self.workload = plan, Workload(plan, seed, device)
        self.meter = ErrorMeter()
        self._constants = constants or {}
        self._histories: dict[tuple[str, int, int], History] = {}

    def inputs(self, group: GroupPlan, layer: int, step: Step, queries: bool = True) -> Inputs:
        """Queries of the step's new tokens in model ``layer``, and the rows that it writes.

        An alias writes nothing, and cross attention only at a request's first step. Without
        ``queries`` there are none: the step is only written.
        """
        counts = self._new_entries(group, layer, step)
        drawn = self.workload.draw(group, len(step.positions) if queries else 0, sum(counts))
        rows = {name: torch.split(x, counts) for name, x in drawn.tensors.items()}
        for number, row in enumerate(step.rows.tolist()):
            if counts[number]:
                self._history(group, layer, row).append({n: x[number] for n, x in rows.items()})
        return drawn

    def compare(
        self,
        group: GroupPlan,
        layer: int,
        step: Step,
        inputs: Inputs,
        out: Tensor,
        select: Tensor | None = None,
    ) -> None:
        """Count the answer ``out`` [tokens, q_heads, v_dim] against dense attention."""
        sinks = self.workload.sinks(group, layer)
        borders = step.q_indptr.tolist()
        for number, row in enumerate(step.rows.tolist()):
            part = slice(borders[number], borders[number + 1])
            if part.stop > part.start:
                chosen = None if select is None else select[part]
                history = self._history(group, layer, row)
                want = history.attend(inputs.q[part], step.positions[part], sinks, chosen)
                self.meter.add(group.name, out[part], want)

    def verdicts(self) -> tuple[Verdict, ...]:
        """One verdict per attention group."""
        groups = (group for group in self.plan.groups if isinstance(group.work, Attention))
        return tuple(self.verdict(group) for group in groups)

    def verdict(self, group: GroupPlan) -> Verdict:
        """The verdict of an attention group."""
        keys, values = storage_errors(group, self._constants.get(group.name))
        error, numbers = self.meter.relative(group.name), self.meter.count(group.name)
        return Verdict(group.name, numbers, error, acceptance(keys, values), keys, values)

    def _history(self, group: GroupPlan, layer: int, row: int) -> History:
        owner = dict(self.plan.spec.model.aliases).get(layer, layer)
        key = (group.name, owner, row)
        if key not in self._histories:
            self._histories[key] = History(group, self.workload.device)
        return self._histories[key]

    def _new_entries(self, group: GroupPlan, layer: int, step: Step) -> list[int]:
        if layer not in group.layers:
            return [0] * len(step.rows)
        if group.kind == "cross":
            lengths = step.tables[group.table].kv_lengths.tolist()
            fresh = (not self._history(group, layer, row).entries for row in step.rows.tolist())
            return [kv if new else 0 for kv, new in zip(lengths, fresh, strict=True)]
        return new_entries(group, step)


def new_entries(group: GroupPlan, step: Step) -> list[int]:
    """Entries of ``group`` that each request of the step completes."""
    ratio = group.tokens_per_entry
    after = step.prefix + step.q_indptr[1:] - step.q_indptr[:-1]
    counts: list[int] = (after // ratio - step.prefix // ratio).tolist()
    return counts
