"""Verification of recurrent states: step by step through the cache against all tokens in one go.

Outputs of all tokens and the final states of every request are compared with a recurrence over the
whole input from a zero state, which knows nothing of chunks, slots or steps. Arithmetic in another
order costs ``ROUNDING``; a format that rounds what it stores costs its error at every step.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from kvfactory.planning.cacheplan import CachePlan, GroupPlan
from kvfactory.quant.numerics import torch_dtype
from kvfactory.spec import LinearGroup
from kvfactory.states import StateViews
from kvfactory.steps.step import Step
from kvfactory.verify.attention import Verdict
from kvfactory.verify.meter import ErrorMeter, round_trip
from kvfactory.verify.recurrent import LinearInputs, LinearLayer

ROUNDING = 2e-3


class StateChecker:
    """Drives recurrent layers with random inputs, and remembers what went in and came out."""

    def __init__(self, plan: CachePlan, seed: int = 0) -> None:
        self.plan, self.seed = plan, seed
        self.meter = ErrorMeter()
        self._steps = 0
        self._layers: dict[tuple[str, int], LinearLayer] = {}
        self._past: dict[tuple[str, int, int], list[tuple[LinearInputs, Tensor]]] = {}

    def advance(self, group: GroupPlan, layer: int, views: StateViews, step: Step) -> None:
        """One layer of a step over its states."""
        driven = self._layer(group, layer)
        inputs = driven.draw(len(step.positions))
        out = driven.advance(views, inputs, step)
        self._steps = max(self._steps, step.host.serial + 1)
        borders = step.q_indptr.tolist()
        for number, row in enumerate(step.rows.tolist()):
            start, stop = borders[number], borders[number + 1]
            if stop > start:
                past = self._past.setdefault((group.name, layer, row), [])
                past.append((inputs.part(start, stop), out[start:stop]))

    def finish(self, group: GroupPlan, layer: int, row: int, state: dict[str, Tensor]) -> None:
        """Compare a request's outputs and its final ``state`` (tensor -> [*axes]); forget it."""
        past = self._past.pop((group.name, layer, row), [])
        if not past:
            return
        driven = self._layer(group, layer)
        whole = reduce(LinearInputs.join, (inputs for inputs, _ in past))
        want = driven.run(driven.fresh(), whole)
        self.meter.add(group.name, torch.cat([out for _, out in past]), want.out)
        for name, tensor in want.state.items():
            self.meter.add(group.name, state[name], tensor)

    def verdict(self, group: GroupPlan) -> Verdict:
        """The error of outputs and states of ``group``."""
        stored = max(_storage_error(group), 0.0)
        bound = ROUNDING + 1.25 * stored * max(1, self._steps) ** 0.5
        error, numbers = self.meter.relative(group.name), self.meter.count(group.name)
        return Verdict(group.name, numbers, error, bound, stored, 0.0, "outputs and final states")

    def _layer(self, group: GroupPlan, layer: int) -> LinearLayer:
        key = group.name, layer
        if key not in self._layers:
            model = self.plan.spec.model
            spec = model.groups[group.group]
            assert isinstance(spec, LinearGroup)
            device = self.plan.spec.device.type
            self._layers[key] = LinearLayer(group, spec, layer, model.dtype, self.seed, device)
        return self._layers[key]


def _storage_error(group: GroupPlan, seed: int = 0) -> float:
    """The largest relative error of a stored tensor of ``group``, on float32 values of N(0, 1).

    Windows of convolutions hold inputs in the type in which they come.
    """
    meter, random = ErrorMeter(), torch.Generator().manual_seed(seed)
    for tensor in group.tensors:
        x = torch.randn(1, *(extent for _, extent in tensor.logical.axes), generator=random)
        if tensor.name != "recurrent":
            x = x.to(torch_dtype(tensor.logical.dtype))
        meter.add(tensor.name, round_trip(tensor, x), x)
    return max(meter.relative(tensor.name) for tensor in group.tensors)
