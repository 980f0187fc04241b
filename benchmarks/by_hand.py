"""FlashInfer as an engine drives it without the factory: its wrappers, its plan(), its append."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention_scene import DIM, KV_HEADS, PAGE, Q_HEADS, Scene
from benchmarks.timing import graphed

WORKSPACE = 512 * 2**20


class HandDecode:
    """Decode steps of the sequences of a scene, over the same pages."""

    def __init__(self, scene: Scene, sequences: Sequence[Any], graph: bool) -> None:
        import flashinfer

        self.scene, self.batch = scene, len(sequences)
        rows = [sequence.row for sequence in sequences]
        self.table = scene.cache.books.rows("full")[rows].astype(np.int32)
        self.lengths = scene.cache.books.committed(sequences).astype(np.int64) + 1
        self.dtype = scene.kv(0)[0].dtype
        space = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
        room = self.batch * self.table.shape[1]
        self.indptr = torch.zeros(self.batch + 1, dtype=torch.int32, device="cuda")
        self.indices = torch.zeros(room, dtype=torch.int32, device="cuda")
        self.last = torch.ones(self.batch, dtype=torch.int32, device="cuda")
        self.positions = torch.zeros(self.batch, dtype=torch.int32, device="cuda")
        self.entries = torch.arange(self.batch, dtype=torch.int32, device="cuda")
        buffers = (self.indptr, self.indices, self.last) if graph else (None, None, None)
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            space, "NHD", graph, True, *buffers, backend="fa2"
        )

    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        """Page lists on the host."""
        pages = -(-self.lengths // PAGE)
        indptr = np.zeros(self.batch + 1, np.int32)
        np.cumsum(pages, out=indptr[1:])
        inside = np.arange(self.table.shape[1]) < pages[:, None]
        last = ((self.lengths - 1) % PAGE + 1).astype(np.int32)
        arrays = (indptr, self.table[inside], last)
        return tuple(torch.from_numpy(array) for array in arrays)  # type: ignore[return-value]

    def plan(self, fast: bool = False) -> None:
        """FlashInfer's plan from host lengths, the page lists copied to the device."""
        import flashinfer

        indptr, indices, last = self.lists()
        there = indices.to("cuda", non_blocking=True)
        sizes = (self.scene.q_heads, KV_HEADS, DIM, PAGE)
        types = {"q_data_type": torch.bfloat16, "kv_data_type": self.dtype}
        if not fast:
            self.wrapper.plan(indptr, there, last, *sizes, **types)
            return
        self.indptr.copy_(indptr, non_blocking=True)
        self.last.copy_(last, non_blocking=True)
        self.indices[: len(there)].copy_(there)
        flashinfer.fast_decode_plan(
            self.wrapper, indptr, there, last, *sizes, **types, global_override_indptr_cpu=indptr
        )

    def plan_us(self, rounds: int = 60) -> float:
        """Median host microseconds of ``plan()`` alone, page lists given."""
        lists = self.lists()
        lists = (lists[0], lists[1].cuda(), lists[2])
        sizes = (self.scene.q_heads, KV_HEADS, DIM, PAGE)
        found = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self.wrapper.plan(*lists, *sizes, q_data_type=torch.bfloat16, kv_data_type=self.dtype)
            found.append(time.perf_counter() - begin)
        return statistics.median(found) * 1e6

    def run(self, layer: int, q: Tensor) -> Tensor:
        """Attend over one layer."""
        found: Tensor = self.wrapper.run(q, self.scene.kv(layer), k_scale=1.0, v_scale=1.0)
        return found

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the new token of every request."""
        import flashinfer

        flashinfer.append_paged_kv_cache(
            *(k, v, self.entries, self.positions, self.scene.kv(layer)),
            *(self.indices, self.indptr, self.last),
        )

    def step(self, fast: bool) -> Callable[[], None]:
        """A whole step: lists, plan, replay of all layers."""
        scene = self.scene
        q = scene.normal(self.batch, Q_HEADS, DIM)
        k, v = (scene.normal(self.batch, KV_HEADS, DIM) for _ in range(2))
        self.plan()

        def layers() -> None:
            for layer in range(scene.layers):
                self.append(layer, k, v)
                self.run(layer, q)

        graph = graphed([layers], 1)

        def one() -> None:
            self.lengths = self.lengths + 1
            self.positions.copy_(torch.from_numpy((self.lengths - 1).astype(np.int32)))
            self.plan(fast)
            graph.replay()

        self.table = np.maximum(self.table, 1)
        return one


def hand_xqa(scene: Scene, hand: HandDecode, q: Tensor) -> list[Callable[[], object]]:
    """XQA over all layers."""
    import flashinfer

    tables = torch.from_numpy(hand.table).cuda()
    lengths = torch.from_numpy(hand.lengths.astype(np.int32)).cuda()
    space = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
    out = torch.empty_like(q)

    def call(layer: int) -> Callable[[], object]:
        return lambda: flashinfer.decode.xqa_batch_decode_with_kv_cache(
            q,
            scene.kv(layer),
            space,
            tables,
            lengths,
            tables.shape[1] * PAGE,
            bmm1_scale=1 / math.sqrt(DIM),
            out=out,
        )

    return [call(layer) for layer in range(scene.layers)]


def hand_prefill(
    scene: Scene, sequences: Sequence[Any], new: int, q: Tensor
) -> list[Callable[[], object]]:
    """FlashInfer's own choice for Hopper over pages, planned once."""
    import flashinfer

    rows = [sequence.row for sequence in sequences]
    table = scene.cache.books.rows("full")[rows].astype(np.int32)
    lengths = np.full(len(rows), int(scene.cache.books.committed(sequences)[0]) + new)
    pages = -(-lengths // PAGE)
    indptr = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(pages, out=indptr[1:])
    indices = table[np.arange(table.shape[1]) < pages[:, None]]
    space = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa3")
    q_indptr = np.arange(len(rows) + 1, dtype=np.int32) * new
    last = ((lengths - 1) % PAGE + 1).astype(np.int32)
    lists = (torch.from_numpy(x).cuda() for x in (q_indptr, indptr, indices, last))
    wrapper.plan(*lists, Q_HEADS, KV_HEADS, DIM, PAGE, causal=True, q_data_type=torch.bfloat16)
    return [partial(wrapper.run, q, scene.kv(layer)) for layer in range(scene.layers)]
