"""Small models with one kind of recurrence each, driven through a cache and replayed alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvfactory.books import Sequence as SequenceId
from kvfactory.builder import build
from kvfactory.cache import Cache
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import Recurrence
from kvfactory.spec import LinearGroup, Spec
from kvfactory.states.planes import fetch
from kvfactory.steps.step import Step
from kvfactory.verify.recurrent import LinearInputs, LinearLayer, State

HEADS = {"head": 4, "key": 8, "value": 6}
RULES: dict[str, dict[str, Any]] = {
    "gdn": {"recurrence": "gdn", "conv": [[2 * 2 * 8 + 4 * 6, 3]], "recurrent": HEADS},
    "kda": {"recurrence": "kda", "conv": [[2 * 4 * 8 + 4 * 6, 3]], "recurrent": HEADS},
    "mamba2": {
        "recurrence": "mamba2",
        "conv": [[4 * 6 + 2 * 8, 3]],
        "recurrent": {"head": 4, "value": 6, "key": 8},
    },
    "mamba1": {
        "recurrence": "mamba1",
        "conv": [[12, 3]],
        "recurrent": {"channel": 12, "state": 4},
    },
    "lightning": {"recurrence": "lightning", "recurrent": HEADS},
    "none": {"recurrence": "none", "conv": [[10, 3], [6, 3]]},
    "first": {"recurrence": "none", "conv": [[10, 2]], "conv_window_first": True},
}
REPLAYED = ("gdn", "kda", "mamba2", "lightning")


def spec_of(rule: str, **parts: Mapping[str, Any]) -> Spec:
    """Two recurrent layers and one that attends; few requests of few tokens."""
    linear = {"kind": "linear", "layers": [0, 2], **RULES[rule]}
    full = {"kind": "full", "layers": [1], "q_heads": 1, "kv_heads": 1, "head_dim": 8}
    model = {"name": "tiny", "num_layers": 3, "groups": {"full": full, "state": linear}}
    defaults: dict[str, Any] = {"workload": {"requests": 4, "tokens": 96}, "kv": {"page_tokens": 4}}
    return Spec.parse({"model": model, **defaults, **parts})


class Loop:
    """An engine's loop over one cache, with the inputs that every sequence has been given."""

    def __init__(self, rule: str, **parts: Mapping[str, Any]) -> None:
        self.cache: Cache = build(plan(spec_of(rule, **parts)))
        (self.group,) = (g for g in self.cache.plan.groups if isinstance(g.work, Recurrence))
        spec = self.cache.plan.spec.model.groups["state"]
        assert isinstance(spec, LinearGroup)
        self.layers = {
            layer: LinearLayer(self.group, spec, layer, device=self.cache.plan.spec.device.type)
            for layer in self.group.layers
        }
        self.history: dict[SequenceId, dict[int, LinearInputs]] = {}

    def open(self, count: int = 1) -> list[SequenceId]:
        sequences = self.cache.open(count)
        for sequence in sequences:
            self.history[sequence] = {i: layer.draw(0) for i, layer in self.layers.items()}
        return sequences

    def step(
        self,
        sequences: Sequence[SequenceId],
        counts: Sequence[int],
        paths: Sequence[Sequence[int]] | None = None,
        parents: Sequence[int] | None = None,
    ) -> dict[int, Tensor]:
        """Extend, run and commit; ``paths`` are the accepted nodes. Outputs by layer."""
        step = self.cache.extend(sequences, list(counts), parents)
        outs, inputs = self.forward(step)
        self.commit(step, sequences, inputs, paths)
        return outs

    def forward(self, step: Step) -> tuple[dict[int, Tensor], dict[int, LinearInputs]]:
        outs, inputs = {}, {}
        for layer, flow in self.layers.items():
            inputs[layer] = flow.draw(int(step.host.q_indptr[-1]))
            outs[layer] = flow.advance(self.cache.state(layer, step), inputs[layer], step)
        return outs, inputs

    def commit(
        self,
        step: Step,
        sequences: Sequence[SequenceId],
        inputs: dict[int, LinearInputs],
        paths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        bounds = step.host.q_indptr.tolist()
        trees = step.host.parents is not None
        accepted: Any = paths if trees or paths is None else [len(path) for path in paths]
        self.cache.commit(step, accepted)
        for number, sequence in enumerate(sequences):
            start, stop = bounds[number : number + 2]
            nodes = range(stop - start) if paths is None else paths[number]
            for layer, new in inputs.items():
                taken = [new.part(start + node, start + node + 1) for node in nodes]
                for token in taken:
                    self.history[sequence][layer] = self.history[sequence][layer].join(token)

    # ---- what is there, and what should be ---------------------------------------------------

    def state(self, sequence: SequenceId, layer: int) -> State:
        """The stored state, replay ring folded in."""
        return self.state_at(self.cache.books.view(sequence).slots["state"], layer)

    def state_at(self, place: int, layer: int) -> State:
        pool, index = self.cache.pool(layer, "state")
        slot = torch.tensor([place], device=pool.bound.arena.device)
        state = {t.name: fetch(pool, index, slot, t.name)[0] for t in self.group.tensors}
        ring = self.cache.states._rings.get("state")
        if ring:
            state["recurrent"] = ring.current(index, slot)[0]
        return state

    def replayed(self, sequence: SequenceId, layer: int, tokens: int | None = None) -> State:
        """The state after the sequence's tokens, one by one from zero, cache or no cache."""
        flow, inputs = self.layers[layer], self.history[sequence][layer]
        state = flow.fresh()
        for token in range(inputs_tokens(inputs) if tokens is None else tokens):
            state = flow.run(state, inputs.part(token, token + 1)).state
        return state

    def check(self, sequence: SequenceId, exact: bool = False) -> None:
        for layer in self.layers:
            compare(self.state(sequence, layer), self.replayed(sequence, layer), exact)


def compare(got: State, want: State, exact: bool = False) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        rtol, atol = (0.0, 0.0) if exact else (1e-5, 1e-5)
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=atol)


def inputs_tokens(inputs: LinearInputs) -> int:
    return len(next(iter((*inputs.conv, *inputs.drawn.values()))))
