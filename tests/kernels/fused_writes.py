"""A layer's rows in two groups, in one launch: the bytes of two writes in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvfactory.kernels import ErrorWords, FusedWrites, kernel_ops
from kvfactory.kernels.launch import Kernel
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.pools import Pool, TorchOps, Write
from kvfactory.spec import Spec

INDEX = {"kind": "sparse_index", "layers": [1, 3], "selects": "main", "index_heads": 4, "topk": 8}
DSA: dict[str, Any] = {
    "main": {
        "kind": "full", "layers": [0, 1, 2, 3], "geometry": "mla", "q_heads": 2, "scale": 0.07,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    },
    "index": INDEX | {"head_dim": 128},
}  # fmt: skip
MINIMAX: dict[str, Any] = {
    "main": {
        "kind": "full", "layers": [1, 3], "q_heads": 2, "kv_heads": 2, "head_dim": 128,
        "v_head_dim": 64,
    },
    "index": INDEX | {"head_dim": 64, "v_head_dim": 32},
}  # fmt: skip
FORMATS = {
    "DSA": (DSA, {"latent": "fp8_tile128", "index_k": "fp8_tile128"}, "record"),
    "DSA plain": (DSA, {}, "nhd"),
    "MiniMax": (MINIMAX, {"k": "fp8_e4m3", "v": "nvfp4", "index_k": "int8_token_head"}, "hnd"),
}


def fused_plan(name: str, ratio: int = 1) -> CachePlan:
    groups, quant, layout = FORMATS[name]
    groups = groups | {"index": groups["index"] | {"tokens_per_entry": ratio}}
    return plan(
        Spec.parse(
            {
                "model": {"name": "fused", "num_layers": 5, "groups": groups},
                "kv": {"quant": quant, "layout": {"tokens": layout}, "page_tokens": 64},
                "workload": {"requests": 1, "tokens": 3 * 64},
                "engine": {"prefill_chunk_tokens": 1},
            }
        )
    )


class Layers:
    """The same arena twice: under torch, and under kernels on ``device``."""

    def __init__(self, laid: CachePlan, device: str) -> None:
        torch.manual_seed(0)
        self.plan = laid
        poison = torch.randint(0, 256, (laid.bytes,), dtype=torch.uint8)
        self.want, self.got = poison.clone(), poison.to(device)
        errors = ErrorWords([laid.tables[0].name], self.got.device)
        self.torch = {g.name: Pool(g, self.want, TorchOps) for g in laid.groups}
        self.kernels = {g.name: Pool(g, self.got, kernel_ops(errors)) for g in laid.groups}
        self.fused = FusedWrites(self.got)

    def rows(self, n: int, strided: bool = False) -> dict[str, dict[str, Tensor]]:
        """Group -> tensor -> [n, *axes] in bfloat16."""
        found: dict[str, dict[str, Tensor]] = {}
        for group in self.plan.groups:
            found[group.name] = {}
            for tensor in group.tensors:
                shape = [extent for _, extent in tensor.logical.axes]
                wide = torch.randn(n, 3, *shape).bfloat16()
                found[group.name][tensor.name] = wide[:, 1] if strided else wide[:, 1].contiguous()
        return found

    def write(self, rows: dict[str, dict[str, Tensor]], slots: Tensor, layers: list[int]) -> None:
        """Layer ``layers[i]`` of group i, in torch and in one call of the kernels."""
        writes: list[Write] = []
        there = slots.to(self.got.device)
        for group, layer in zip(self.plan.groups, layers, strict=True):
            self.torch[group.name].write(layer, slots, **rows[group.name])
            given = {k: x.to(self.got.device) for k, x in rows[group.name].items()}
            writes.append(self.kernels[group.name].ready(layer, there, **given))
        self.fused.run(writes)
        assert torch.equal(self.got.cpu(), self.want)


def counted(patch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that are launched from now on."""
    names: list[str] = []
    launch = Kernel.launch

    def counting(self: Kernel, programs: int, *values: Any) -> None:
        names.append(self.function.__name__)
        launch(self, programs, *values)

    patch.setattr(Kernel, "launch", counting)
    return names


def check_fused(device: str, patch: pytest.MonkeyPatch) -> None:
    """All formats, several layers, strided rows, empty steps; one launch each."""
    for name in FORMATS:
        made = Layers(fused_plan(name), device)
        launches = counted(patch)
        for n, strided, layers in ((5, False, [1, 0]), (37, True, [0, 1]), (0, False, [1, 1])):
            slots = torch.randperm(3 * 64)[:n] + 64
            before = len(launches)
            made.write(made.rows(n, strided), slots, layers)
            assert len(launches) == before + 1, name


def check_apart(device: str, patch: pytest.MonkeyPatch) -> None:
    """Groups whose entries differ are written one after the other."""
    made = Layers(fused_plan("DSA plain", ratio=4), device)
    latent, index = (g.name for g in made.plan.groups)
    rows, slots = made.rows(8), torch.arange(64, 72)
    writes = []
    launches = counted(patch)
    for name, where in ((latent, slots), (index, torch.arange(16, 18))):
        given = {key: x[: len(where)] for key, x in rows[name].items()}
        made.torch[name].write(1, where, **given)
        there = {key: x.to(device) for key, x in given.items()}
        writes.append(made.kernels[name].ready(1, where.to(device), **there))
    made.fused.run(writes)
    assert torch.equal(made.got.cpu(), made.want)
    assert len(launches) == 2
