"""What attention and selection are given, checked before anything is written or read.

The usual case costs a few comparisons; only a refusal looks closer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvfactory.backends import AttendExtra
from kvfactory.errors import BooksError, Problem, SpecError
from kvfactory.planning.cacheplan import Attention, GroupPlan, Select
from kvfactory.pools.checks import FLOATS, tensor_problem, tensors
from kvfactory.steps.buffers import StepBuffers
from kvfactory.steps.step import Step


def check_step(step: Step, buffers: StepBuffers) -> None:
    """Refuse what is no step of this cache, or one whose arrays a later step has taken over.

    Raises:
        BooksError: which of both.
    """
    if not isinstance(step, Step):
        need = "a step that extend(), step() or a graph of this cache returned"
        raise BooksError(Problem("step", f"a {type(step).__name__}", need))
    if not buffers.holds(step):
        got = "a step of another cache, or one whose place a later step has taken"
        raise BooksError(Problem("step", got, "an open step of this cache"))


def check_on_host(given: object, name: str) -> None:
    """Refuse the argument ``name`` of ``extend`` on a device: reading it would wait.

    Raises:
        SpecError: it is one.
    """
    if isinstance(given, Tensor) and given.device.type != "cpu":
        got, need = f"a tensor on {given.device}", "integers on the host"
        raise SpecError(Problem(f"extend({name}=)", got, need, f"{name}.cpu()"))


@dataclass(frozen=True)
class Query:
    """What a group is asked with: tensors of ``heads`` x ``dim`` for each new token."""

    group: GroupPlan
    heads: int
    dim: int

    @classmethod
    def of(cls, group: GroupPlan) -> Query:
        """The query of a group that attends or selects; of MLA over latent and rope together."""
        dims = [tensor.logical.extent("dim") for tensor in group.tensors]
        if isinstance(group.work, Attention):
            latent = group.work.geometry == "mla"
            return cls(group, group.work.q_heads, sum(dims) if latent else dims[0])
        assert isinstance(group.work, Select)
        return cls(group, group.work.index_heads, dims[0])

    def check(self, q: Tensor, step: Step, extra: AttendExtra | None = None) -> None:
        """Refuse a query, or what comes with it, that does not fit ``step``.

        Raises:
            SpecError: all of it.
        """
        wrong = list(self._query_problems(q, step))
        if extra is not None and not wrong:
            given = {"mask": extra.mask, "sinks": extra.sinks, "select": extra.select}
            tensors(**{name: value for name, value in given.items() if value is not None})
            wrong += self._sink_problems(extra.sinks, step)
            if extra.mask is not None:
                wrong += self._mask_problems(extra.mask, step)
            if extra.select is not None:
                wrong += _select_problems(extra.select, step)
        if wrong:
            raise SpecError(*wrong)

    def check_weights(self, weights: Tensor | None, step: Step) -> None:
        """Refuse ``weights`` that are not float [tokens, heads].

        Raises:
            SpecError: what they are.
        """
        if weights is None:
            return
        shape = (len(step.positions), self.heads)
        tensors(weights=weights)
        if weights.shape != shape or weights.dtype not in FLOATS or _elsewhere(weights, step):
            need = f"float {list(shape)} on {step.positions.device}"
            raise SpecError(Problem("weights", _shown(weights), need))

    def _query_problems(self, q: Tensor, step: Step) -> Iterator[Problem]:
        shape = (len(step.positions), self.heads, self.dim)
        if problem := tensor_problem("q", q):
            yield replace(problem, need=f"{problem.need} {list(shape)}")
        elif q.shape != shape or q.dtype not in FLOATS or _elsewhere(q, step):
            need = f"float {list(shape)} on {step.positions.device}, for group {self.group.name}"
            yield Problem("q", _shown(q), need)

    def _sink_problems(self, sinks: Tensor | None, step: Step) -> Iterator[Problem]:
        work = self.group.work
        if sinks is None or not isinstance(work, Attention):
            return
        if not work.sinks:
            path, fix = f"model.groups.{self.group.group}.sinks", "=true"
            got = f"sinks for group {self.group.name}, planned without"
            yield Problem("sinks", got, "None", path + fix)
        elif sinks.shape != (self.heads,) or sinks.dtype not in FLOATS or _elsewhere(sinks, step):
            yield Problem(
                "sinks", _shown(sinks), f"float [{self.heads}] on {step.positions.device}"
            )

    def _mask_problems(self, mask: Tensor, step: Step) -> Iterator[Problem]:
        if mask.dtype != torch.bool or mask.dim() != 1 or _elsewhere(mask, step):
            yield Problem("mask", _shown(mask), f"bool [bits] on {step.positions.device}")
        elif step.graph is None and step.host.settled.all():
            visible = step.host.tables[self.group.table].kv_lengths
            bits = int((np.diff(step.host.q_indptr) * visible).sum())
            if len(mask) != bits:
                need = f"[{bits}]: of each request its new tokens times its length"
                yield Problem("mask", f"bool [{len(mask)}]", need)


def _select_problems(select: Tensor, step: Step) -> Iterator[Problem]:
    tokens = len(step.positions)
    if select.dtype != torch.int32 or select.dim() != 2 or len(select) != tokens:
        yield Problem("select", _shown(select), f"int32 [{tokens}, topk] token positions")
    elif _elsewhere(select, step):
        yield Problem("select", _shown(select), f"a tensor on {step.positions.device}")


def _elsewhere(given: Tensor, step: Step) -> bool:
    return given.device != step.positions.device


def _shown(given: Tensor) -> str:
    dtype = str(given.dtype).removeprefix("torch.")
    return f"{dtype} {list(given.shape)} on {given.device}"
