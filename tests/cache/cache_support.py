"""Tiny models whose inputs are a function of the token alone, so that any schedule can be replayed.

A sequence is the list of its tokens. K, V, queries and recurrent inputs of a token are rows of
fixed tables; what a layer answers depends on the history and on nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvfactory.books import Sequence as SequenceId
from kvfactory.builder import build
from kvfactory.cache import Cache
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import Attention, GroupPlan, Recurrence, Select
from kvfactory.spec import LinearGroup, Spec
from kvfactory.steps.step import Step
from kvfactory.verify.recurrent import LinearInputs, LinearLayer

VOCABULARY = 97

FULL = {"kind": "full", "layers": [0, 1], "q_heads": 4, "kv_heads": 2, "head_dim": 16}
K_ONLY = {**FULL, "v_head_dim": 0}
WINDOW = {**FULL, "kind": "swa", "window_tokens": 9, "head_dim": 32, "v_head_dim": 16}
CHUNKED = {**FULL, "kind": "chunked", "chunk_tokens": 8}
MLA = {
    "kind": "full",
    "geometry": "mla",
    "layers": [0, 1],
    "q_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "scale": 0.15,
}
INDEX = {"kind": "sparse_index", "layers": [0], "index_heads": 2, "head_dim": 16, "topk": 6}
BLOCKS = {**INDEX, "topk": 3, "block_tokens": 4}
STATE = {
    "kind": "linear",
    "layers": [0, 2],
    "conv": [[40, 3]],
    "recurrent": {"head": 2, "key": 8, "value": 4},
    "recurrence": "gdn",
}

MODELS: dict[str, dict[str, Any]] = {
    "full": {"full": FULL},
    "k_only": {"full": K_ONLY},
    "windows": {"full": FULL, "local": {**WINDOW, "layers": [2, 3]}},
    "chunked": {"local": CHUNKED},
    "dsa": {"latent": MLA, "index": {**INDEX, "selects": "latent"}},
    "minimax": {
        "dense": {**FULL, "layers": [0]},
        "sparse": {**FULL, "layers": [1, 2]},
        "index": {**BLOCKS, "layers": [1], "selects": "sparse"},
        "index_kv": {**BLOCKS, "layers": [2], "selects": "sparse", "v_head_dim": 16},
    },
    "pooled": {
        "latent": {**MLA, "qk_rope_head_dim": 0},
        "index": {**INDEX, "selects": "latent", "topk": 3, "tokens_per_entry": 4},
    },
    "hybrid": {"full": {**FULL, "layers": [1, 2]}, "state": STATE},
    "all": {
        "full": {**FULL, "layers": [0, 2]},
        "local": {**WINDOW, "layers": [1]},
        "index": {**INDEX, "layers": [2], "selects": "full"},
        "state": {**STATE, "layers": [1, 3]},
    },
}


def spec_of(
    groups: Mapping[str, Any], model: Mapping[str, Any] | None = None, **parts: Any
) -> Spec:
    """A spec of up to six layers in float32, four requests of up to 64 tokens, pages of 4."""
    whole = {"name": "tiny", "num_layers": 6, "dtype": "float32", "groups": groups, **(model or {})}
    kv = {"page_tokens": 4, **parts.pop("kv", {})}
    workload = {"requests": 4, "tokens": 64, **parts.pop("workload", {})}
    return Spec.parse({"model": whole, "kv": kv, "workload": workload, **parts})


def cache_of(groups: Mapping[str, Any] | str, **parts: Any) -> Cache:
    """The cache of one of ``MODELS`` or of ``groups``, on the CPU."""
    return build(plan(spec_of(MODELS[groups] if isinstance(groups, str) else groups, **parts)))


class Feed:
    """The inputs of every layer and token, the same for caches of equal models."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.layers = range(cache.plan.spec.model.num_layers)
        self.device = cache.plan.spec.device.type
        self._tables: dict[tuple[int, str, str], Tensor] = {}
        self._linear: dict[tuple[str, int], tuple[LinearLayer, LinearInputs]] = {}

    def rows(self, layer: int, group: GroupPlan, name: str, tokens: Tensor) -> Tensor:
        """The rows of ``tokens`` of a stored tensor, or of queries ``q``: [tokens, heads, dim]."""
        key = layer, group.name, name
        if key not in self._tables:
            seed = sum(ord(letter) for letter in group.name + name) * 64 + layer
            shape = self._shape(group, name)
            random = torch.Generator().manual_seed(seed)
            self._tables[key] = torch.randn(VOCABULARY, *shape, generator=random).to(self.device)
        return self._tables[key][tokens]

    def _shape(self, group: GroupPlan, name: str) -> tuple[int, ...]:
        if name != "q":
            return tuple(extent for _, extent in group.tensor(name).logical.axes)
        work = group.work
        if isinstance(work, Select):
            return work.index_heads, group.tensor("index_k").logical.extent("dim")
        assert isinstance(work, Attention)
        names = ("latent", "rope") if work.geometry == "mla" else ("k",)
        dims = [t.logical.extent("dim") for t in group.tensors if t.name in names]
        return work.q_heads, sum(dims)

    def run(self, step: Step, tokens: Sequence[int]) -> Tensor:
        """All layers of ``step``, whose new tokens are ``tokens``: outputs [tokens, features]."""
        ids, outs = torch.tensor(tokens, dtype=torch.int64, device=self.device), []
        selections: dict[int, Tensor] = {}
        for layer in self.layers:
            groups = self.cache.groups(layer)
            for group in groups:
                if isinstance(group.work, Recurrence):
                    outs.append(self.advance(layer, group, step, ids))
            for group in groups:
                if isinstance(group.work, Select) and layer in group.layers:
                    selections[layer] = self._select(layer, group, step, ids)
            for group in groups:
                if isinstance(group.work, Attention):
                    outs.append(self._attend(layer, group, step, ids, selections))
        return torch.cat([out.flatten(1).float() for out in outs], 1)

    def linear(self, group: GroupPlan, layer: int) -> tuple[LinearLayer, LinearInputs]:
        """A recurrent layer and its inputs for every token of the vocabulary."""
        key = group.name, layer
        if key not in self._linear:
            spec = self.cache.plan.spec.model.groups[group.group]
            assert isinstance(spec, LinearGroup)
            driven = LinearLayer(group, spec, layer, "float32", device=self.device)
            self._linear[key] = driven, driven.draw(VOCABULARY)
        return self._linear[key]

    def advance(self, layer: int, group: GroupPlan, step: Step, ids: Tensor) -> Tensor:
        """A recurrent layer over its states, for the new tokens ``ids``."""
        driven, table = self.linear(group, layer)
        drawn = {name: x[ids] for name, x in table.drawn.items()}
        inputs = LinearInputs(tuple(x[ids] for x in table.conv), drawn)
        return driven.advance(self.cache.state(layer, step, group=group.group), inputs, step)

    def _select(self, layer: int, group: GroupPlan, step: Step, ids: Tensor) -> Tensor:
        q = self.rows(layer, group, "q", ids)
        entries = self._entries(group, step, ids)
        v = self.rows(layer, group, "index_v", entries) if group.has("index_v") else None
        keys = self.rows(layer, group, "index_k", entries)
        return self.cache.select(layer, q, keys, step, v_index=v)

    def _entries(self, group: GroupPlan, step: Step, ids: Tensor) -> Tensor:
        """The last token of each entry that the step completes."""
        host, ratio = step.host, group.tokens_per_entry
        done = [
            start + n
            for start, stop, before in zip(
                host.q_indptr[:-1], host.q_indptr[1:], host.prefix, strict=True
            )
            for n in range(stop - start)
            if (before + n + 1) % ratio == 0
        ]
        return ids[torch.tensor(done, dtype=torch.int64, device=self.device)]

    def _attend(
        self, layer: int, group: GroupPlan, step: Step, ids: Tensor, selections: dict[int, Tensor]
    ) -> Tensor:
        q = self.rows(layer, group, "q", ids)
        mask = tree_mask(step) if step.host.parents is not None else None
        owner = self.cache.selector_of(layer)
        select = None if owner is None else selections[owner]
        k = v = None
        if layer in group.layers:
            tensors = [self.rows(layer, group, t.name, ids) for t in group.tensors]
            k, v = (*tensors, None)[:2]
        return self.cache.attend(layer, q, k, v, step, group=group.group, mask=mask, select=select)


def tree_mask(step: Step) -> Tensor:
    """What the tokens of a draft tree see: everything before the step, and their ancestors."""
    host, parts = step.host, []
    assert host.parents is not None
    for number, before in enumerate(host.prefix.tolist()):
        start, stop = host.q_indptr[number : number + 2].tolist()
        seen = torch.zeros(stop - start, before + stop - start, dtype=torch.bool)
        seen[:, :before] = True
        for node, parent in enumerate(host.parents[start:stop].tolist()):
            if parent >= 0:
                seen[node] |= seen[parent]
            seen[node, before + node] = True
        parts.append(seen.flatten())
    return torch.cat(parts).to(step.positions.device)


class Driver:
    """An engine over one cache: sequences with the tokens that were accepted."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.feed = cache, Feed(cache)
        self.tokens: dict[SequenceId, list[int]] = {}

    def open(self, count: int = 1, **how: Any) -> list[SequenceId]:
        opened = self.cache.open(count, **how)
        prefix = how.get("prefix", ())
        assert not prefix or prefix[-1].stop
        self.tokens |= {sequence: [] for sequence in opened}
        return opened

    def step(self, new: Mapping[SequenceId, Sequence[int]]) -> dict[SequenceId, Tensor]:
        """One committed step: outputs of each sequence's new tokens."""
        step = self.cache.extend(list(new), [len(tokens) for tokens in new.values()])
        out = self.feed.run(step, [token for tokens in new.values() for token in tokens])
        self.cache.commit(step)
        for sequence, tokens in new.items():
            self.tokens[sequence] += tokens
        parts = torch.split(out, [len(tokens) for tokens in new.values()])
        return dict(zip(new, parts, strict=True))

    def fork(self, sequence: SequenceId, count: int) -> list[SequenceId]:
        forks = self.cache.fork(sequence, count)
        self.tokens |= {fork: list(self.tokens[sequence]) for fork in forks}
        return forks


def scratch(cache: Cache, tokens: Sequence[int]) -> Tensor:
    """What a fresh cache of the same plan answers for all ``tokens`` in one step."""
    driver = Driver(build(cache.plan))
    (sequence,) = driver.open()
    return driver.step({sequence: list(tokens)})[sequence]


def some_tokens(count: int, seed: int = 0) -> list[int]:
    """``count`` random tokens."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count,), generator=random).tolist()


def snapshot(cache: Cache) -> tuple[Any, ...]:
    """Everything that a refused call must leave alone: the books, and every byte."""
    rows = {table.name: cache.books.rows(table.name).copy() for table in cache.plan.tables}
    pools = {
        group.name: [
            view.clone()
            for view in cache.pool(group.layers[0], group.group)[0].bound.planes.values()
        ]
        for group in cache.plan.groups
    }
    return cache.books.capacity(), rows, pools


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two snapshots agree."""
    return (
        a[0] == b[0]
        and all((a[1][name] == b[1][name]).all() for name in a[1])
        and all(
            torch.equal(x.view(torch.uint8), y.view(torch.uint8))
            for name in a[2]
            for x, y in zip(a[2][name], b[2][name], strict=True)
        )
    )


def close_to(got: Tensor, want: Tensor) -> None:
    """Equal up to the order of sums in float32."""
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
