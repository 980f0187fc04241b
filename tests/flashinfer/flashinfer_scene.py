"""A cache planned for a GPU, built on the CPU over the double; NaN where nothing was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from flashinfer_double import Double
from flashinfer_tape import TapeRecorder
from torch import Tensor

from kvfactory.backends import AttendExtra, Resources
from kvfactory.backends.flashinfer import FlashInferBackend
from kvfactory.backends.flashinfer.bind import bind
from kvfactory.backends.flashinfer.calls import Library
from kvfactory.backends.flashinfer.runner import Runner
from kvfactory.books import Books
from kvfactory.books.shape import books_shape
from kvfactory.builder import indexer_of
from kvfactory.cache import Cache
from kvfactory.cache.gate import Gates
from kvfactory.cache.graphs import Graph, GraphPlace, graph_shape
from kvfactory.cache.parts import Parts
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan, GroupPlan, TensorPlan
from kvfactory.pools import Pool
from kvfactory.reference import Oracle
from kvfactory.spec import Spec
from kvfactory.steps.buffers import StepBuffers
from kvfactory.steps.step import Step

H200 = {"name": "h200", "type": "cuda", "sm": 90, "num_sms": 132}
GROUP = {"kind": "full", "layers": "0-1", "q_heads": 8, "kv_heads": 2, "head_dim": 64}
WINDOW = {**GROUP, "kind": "swa", "window_tokens": 24}
LATENT = {
    "kind": "full", "layers": "0-1", "geometry": "mla", "q_heads": 8,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "scale": 0.07,
}  # fmt: skip
FP8 = {"k": "fp8_e4m3", "v": "fp8_e4m3"}


def make_spec(
    groups: Mapping[str, Any],
    kv: Mapping[str, Any] | None = None,
    backend: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    device: Mapping[str, Any] | None = None,
    workload: Mapping[str, Any] | None = None,
) -> Spec:
    return Spec.parse(
        {
            "model": {"name": "toy", "num_layers": 8, "dtype": "bfloat16", "groups": dict(groups)},
            "kv": {"page_tokens": 8, **(kv or {})},
            "device": {**H200, **(device or {})},
            "backend": {"name": "flashinfer", **(backend or {})},
            "engine": {"prefill_chunk_tokens": 256, "max_requests": 6, **(engine or {})},
            "workload": {"requests": 4, "tokens": 160, **(workload or {})},
        }
    )


def plan_of(groups: Mapping[str, Any], **options: Any) -> CachePlan:
    return plan(make_spec(groups, **options))


@dataclass
class Scene:
    """One cache, its double, and what has been written: layer -> sequence -> (k, v) rows."""

    plan: CachePlan
    double: Double = field(default_factory=Double)
    library: Library | None = None
    device: str = "cpu"
    graphs: int = 0
    parts: Parts = field(init=False)
    cache: Cache = field(init=False)
    pools: dict[str, Pool] = field(init=False)
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __post_init__(self) -> None:
        arena = torch.zeros(self.plan.bytes, dtype=torch.uint8, device=self.device)
        self.pools = {group.name: Pool(group, arena) for group in self.plan.groups}
        for group in self.plan.groups:
            arena[group.offset : group.offset + group.num_bytes] = 0xFF
            self.pools[group.name].zero([0])
            self._set_constants(self.pools[group.name])
        spaces = {w.use: arena[w.offset :][: w.num_bytes] for w in self.plan.workspaces}
        served = FlashInferBackend().served(self.plan.groups, self.plan.spec)
        resources = Resources(self.plan, self.pools, spaces)
        self.parts = Parts(
            plan=self.plan,
            arena=arena,
            books=Books(books_shape(self.plan)),
            pools=self.pools,
            runners=bind(served, resources, self.library or self.double),
            buffers=StepBuffers(self.plan, arena, indexer_of(self.plan, arena)),
        )
        self.cache = Cache(self.parts)

    def graph(self, batch: int, tokens: int = 1, total: int | None = None) -> Graph:
        """A graph of the cache; on the CPU one that repeats device work as CUDA graphs do."""
        if self.device != "cpu":
            return self.cache.graph(batch, tokens, total)
        self.graphs += 1
        shape = graph_shape(self.plan, batch, tokens, total)
        place = GraphPlace(self.plan, self.parts.buffers, self.graphs, Gates())
        return Graph(place, shape, self.parts.runners.values(), TapeRecorder(self.double))

    def begin(self, step: Step) -> None:
        """Plan an eager step, as its first attend would."""
        for runner in self.parts.runners.values():
            assert isinstance(runner, Runner)
            runner.scheduler.begin(step)

    def _set_constants(self, pool: Pool) -> None:
        values: dict[Any, Any] = {}
        for layer, tensor, name in sorted(pool.constant_keys()):
            shape = pool.constants(pool.group.layers.index(layer))[tensor][name].shape
            noise = torch.randn(shape, generator=self.random)
            scales = name.endswith("scale")
            values[layer, tensor, name] = 0.01 * noise.exp() if scales else noise
        if values:
            pool.set_constants(values)

    # ---- running -----------------------------------------------------------------------------

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).bfloat16().to(self.device)

    def inputs(self, group: GroupPlan, tokens: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """q, k and v of a step's new tokens."""
        rows = [self._rows(group, tensor, tokens) for tensor in group.tensors]
        latent = group.has("latent")
        rows = [x.squeeze(1) if latent else x for x in rows]
        dim = sum(t.logical.extent("dim") for t in group.tensors) if latent else rows[0].shape[-1]
        q = self.normal(tokens, group.work.q_heads, dim)
        return q, rows[0], rows[1] if len(rows) > 1 else None

    def _rows(self, group: GroupPlan, tensor: TensorPlan, tokens: int) -> Tensor:
        """Rows of a tensor around its center: what a center is for."""
        found = self.normal(tokens, *(extent for _, extent in tensor.logical.axes))
        constants = self.pools[group.name].constants(0)[tensor.name]
        return (found + constants["center"]).bfloat16() if "center" in constants else found

    def check(self, step: Step, tokens: int, **extra: Any) -> None:
        """Every group's first layer against the oracle over the same pool and step."""
        for group in self.plan.groups:
            q, k, v = self.inputs(group, tokens)
            found = self.cache.attend(group.layers[0], q, k, v, step, group=group.group, **extra)
            wanted = self.oracle(group, q, k, v, step, **extra)
            close(found, wanted, self.tolerance(), f"{group.name}, {tokens} tokens")

    def oracle(
        self, group: GroupPlan, q: Tensor, k: Tensor, v: Tensor | None, step: Step, **extra: Any
    ) -> Tensor:
        exact = self.plan.spec.backend.new_tokens == "exact"
        given = AttendExtra(new_k=k if exact else None, new_v=v if exact else None, **extra)
        return Oracle(group, self.pools[group.name]).attend(0, q.double(), step, given)

    def tolerance(self) -> float:
        """Of a few rows; the 8-bit arithmetic of ``fast`` is held to 4e-2 over many."""
        return 5e-2 if self.plan.spec.backend.accuracy == "fast" else 5e-3

    def turns(self, lengths: Sequence[Sequence[int]]) -> None:
        """Steps of new tokens per sequence, each checked and committed."""
        sequences = self.cache.open(len(lengths[0]))
        for counts in lengths:
            self.advance(sequences, counts)
        self.cache.close(sequences)

    def advance(self, sequences: Sequence[Any], counts: Sequence[int]) -> None:
        """One step, checked and committed."""
        step = self.cache.extend(sequences, list(counts))
        self.check(step, sum(counts))
        self.cache.commit(step)


def close(found: Tensor, wanted: Tensor, tolerance: float, what: str = "") -> None:
    """Relative error in the Frobenius norm; NaN never passes."""
    error = relative_error(found, wanted)
    assert error < tolerance, f"relative error {error:.2e} {what}"


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """In the Frobenius norm."""
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-9))
