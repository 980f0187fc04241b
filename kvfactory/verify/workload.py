"""The built-in workload: random queries and rows of which errors of answers can be foretold.

Keys and values are drawn from N(0, 1), and queries such that logits are N(0, 1) whatever the
group's scale, so that the error of an answer follows from those of the stored keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfactory.planning.cacheplan import Attention, CachePlan, GroupPlan, Select
from kvfactory.quant.numerics import torch_dtype

KEY_ROLES = frozenset({"k", "latent", "rope", "index_k"})
"""Roles of the tensors that queries meet."""


@dataclass(frozen=True)
class Inputs:
    """Queries [tokens, heads, dim] and new rows by tensor name [entries, heads, dim].

    In the compute type; ``tensors`` is empty where nothing is written. ``weights`` float32
    [tokens, heads] come with index queries.
    """

    q: Tensor
    tensors: Mapping[str, Tensor]
    weights: Tensor | None = None

    @property
    def kv(self) -> tuple[Tensor | None, Tensor | None]:
        """What ``Cache.attend`` takes as k and v: latent rows without their head axis."""
        rows = [
            x.squeeze(1) if name in ("latent", "rope") else x for name, x in self.tensors.items()
        ]
        return (*rows, None, None)[0], (*rows, None, None)[1]


class Workload:
    """Random inputs for the groups of ``plan``; equal seeds and calls give equal numbers."""

    def __init__(self, plan: CachePlan, seed: int = 0, device: str = "cpu") -> None:
        self.plan, self.seed, self.device = plan, seed, device
        self.dtype = torch_dtype(plan.spec.model.dtype)
        self._random = torch.Generator().manual_seed(seed)

    def draw(self, group: GroupPlan, tokens: int, entries: int) -> Inputs:
        """Queries of ``tokens`` and ``entries`` new rows of every tensor of ``group``."""
        tensors = {
            tensor.name: self._normal(entries, *(extent for _, extent in tensor.logical.axes))
            for tensor in group.tensors
            if entries
        }
        dim = sum(t.logical.extent("dim") for t in group.tensors if t.logical.role in KEY_ROLES)
        if isinstance(group.work, Select):
            heads = group.work.index_heads
            weights = torch.rand(tokens, heads, generator=self._random).to(self.device)
            return Inputs(self._normal(tokens, heads, dim), tensors, weights)
        assert isinstance(group.work, Attention)
        unit = 1 / (group.work.scale * dim**0.5)
        return Inputs(self._normal(tokens, group.work.q_heads, dim, scale=unit), tensors)

    def sinks(self, group: GroupPlan, layer: int) -> Tensor | None:
        """Sink logits float32 [q_heads] of a layer, the same at every call; None without sinks."""
        work = group.work
        if not isinstance(work, Attention) or not work.sinks:
            return None
        random = torch.Generator().manual_seed(self.seed + 1 + layer)
        return torch.randn(work.q_heads, generator=random).to(self.device)

    def _normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self._random) * scale
        return drawn.to(self.device, self.dtype)
