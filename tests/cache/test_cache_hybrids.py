"""Hybrids in small: states, index keys and scales survive a move, the host and a transfer, bit for
bit; so do rings with their cursors, which a transfer folds. On the CPU and, where there is one, on
a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import Feed, cache_of, some_tokens
from gpu_here import this_gpu
from torch import Tensor

from kvfactory.books import Segment
from kvfactory.books import Sequence as SequenceId
from kvfactory.cache import Cache
from kvfactory.errors import BooksError
from kvfactory.pools import copies

MLA = {
    "kind": "full",
    "geometry": "mla",
    "q_heads": 2,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "scale": 0.1,
}
GQA = {"kind": "full", "q_heads": 2, "kv_heads": 2, "head_dim": 32}
INDEX = {"kind": "sparse_index", "index_heads": 2, "head_dim": 128, "topk": 4}
BLOCKS = {**INDEX, "block_tokens": 4, "selects": "sparse", "topk": 2}
HEADS = {"head": 2, "key": 8, "value": 4}
GDN = {"kind": "linear", "recurrence": "gdn", "conv": [[40, 3]], "recurrent": HEADS}
KDA = {**GDN, "recurrence": "kda", "conv_window_first": True}
MAMBA2 = {
    "kind": "linear",
    "recurrence": "mamba2",
    "conv": [[24, 3]],
    "recurrent": {"head": 2, "value": 4, "key": 8},
}

MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {
        "latent": {**MLA, "layers": "0-2"},
        "index": {**INDEX, "layers": "0-2", "selects": "latent"},
    },
    "minimax_m3": {
        "full": {**GQA, "layers": [0]},
        "sparse": {**GQA, "layers": [1, 2]},
        "index": {**BLOCKS, "layers": [1]},
        "index_kv": {**BLOCKS, "layers": [2], "v_head_dim": 32},
    },
    "qwen3_next": {"full": {**GQA, "layers": [2]}, "state": {**GDN, "layers": [0, 1]}},
    "falcon_h1": {"full": {**GQA, "layers": "0-1"}, "state": {**MAMBA2, "layers": "0-1"}},
    "kimi_linear": {"latent": {**MLA, "layers": [2]}, "state": {**KDA, "layers": [0, 1]}},
}
QUANT = {"k": "mxfp8", "v": "int8_token_head", "latent": "fp8_tile128", "index_k": "fp8_tile128"}
LAYOUTS = {
    "nhd": {"tokens": "nhd", "index": "nhd", "state": "state_split"},
    "hnd": {"tokens": "hnd", "index": "paged_kv", "state": "slot_major"},
    "paged_kv": {"tokens": "paged_kv", "index": "record"},
    "page_major": {"tokens": "page_major", "index": "page_major", "state": "slot_major"},
    "token_major": {"tokens": "token_major", "index": "token_major"},
    "record": {"tokens": "record", "index": "hnd", "state": "layer page plane ..."},
    "vectorized": {"tokens": "vectorized", "state": "page layer plane ..."},
}
RINGS = {
    "decode_ring": {"state_replay": "decode_ring", "replay_tokens": 4},
    "verify_ring": {"state_replay": "verify_ring", "replay_tokens": 8, "draft_tokens": 2},
}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


def hybrid(model: str, device: str, layout: str, engine: dict[str, Any]) -> Cache:
    parts: dict[str, Any] = {}
    if device == "cuda":
        parts = {"device": this_gpu(), "backend": {"name": "torch"}}
    kv = {"quant": QUANT, "layout": LAYOUTS[layout], "page_tokens": 16}
    return cache_of(MODELS[model], model={"num_layers": 3}, kv=kv, engine=engine, **parts)


class Session:
    """A cache with sequences that have tokens in pages, states and rings."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.feed = cache, Feed(cache)
        self.a, self.b = cache.open(2)
        self.step({self.a: some_tokens(21, 1), self.b: some_tokens(9, 2)})
        self.step({self.a: [5], self.b: [6]})
        self.step({self.a: [7]})

    def step(self, new: dict[SequenceId, list[int]]) -> Tensor:
        step = self.cache.extend(list(new), [len(tokens) for tokens in new.values()])
        out = self.feed.run(step, [token for tokens in new.values() for token in tokens])
        self.cache.commit(step)
        return out

    def planes(self, sequence: SequenceId, rings: bool = True) -> dict[str, Tensor]:
        """Every byte that a sequence can see: pages, index keys, scales, states, rings."""
        return planes(self.cache, self.cache.books.view(sequence), rings)


def planes(cache: Cache, view: Segment, rings: bool) -> dict[str, Tensor]:
    found = {}
    for group, pool in cache._parts.stored():
        if group.table in view.slots:
            ids = torch.tensor([view.slots[group.table]])
        else:
            tokens = torch.arange(view.stop)
            pages = torch.from_numpy(view.parts[group.table].pages)
            ids = pages[tokens // group.page_slots] * group.page_slots + tokens % group.page_slots
        if rings or not group.name.endswith(".ring"):
            for key, value in pool.gather(ids).items():
                found[f"{group.name}.{key}"] = value.contiguous().view(torch.uint8).cpu()
    return found


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert value.any(), f"{key} holds nothing"
        assert torch.equal(got[key], value), key


CELLS = [(model, layout, {}) for model in MODELS for layout in LAYOUTS]
CELLS += [
    (model, layout, ring)
    for model in ("qwen3_next", "falcon_h1", "kimi_linear")
    for layout in ("nhd", "page_major")
    for ring in RINGS.values()
]
IDS = [f"{model}-{layout}-{ring.get('state_replay', 'plain')}" for model, layout, ring in CELLS]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("model", "layout", "engine"), CELLS, ids=IDS)
def test_the_host_and_back(model: str, layout: str, engine: dict[str, Any], device: str) -> None:
    """Offload, others in its place, load; and it goes on as one that never left."""
    session = Session(hybrid(model, device, layout, engine))
    stayed = Session(hybrid(model, device, layout, engine))
    before = {s: session.planes(s) for s in (session.a, session.b)}
    image = session.cache.offload([session.b, session.a])
    (thief,) = session.cache.open()
    session.step({thief: some_tokens(30, 9)})
    b, a = session.cache.load(image)
    same(session.planes(a), before[session.a])
    same(session.planes(b), before[session.b])
    for token in (3, 8, 2):
        got = session.step({a: [token], b: [token + 1]})
        want = stayed.step({stayed.a: [token], stayed.b: [token + 1]})
        assert torch.equal(got, want)
    same(session.planes(a), stayed.planes(stayed.a))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("model", "layout", "engine"), CELLS, ids=IDS)
def test_moves(model: str, layout: str, engine: dict[str, Any], device: str) -> None:
    """Pages and whole states to other places, overlapping ones: a chain of moves in one call."""
    session = Session(hybrid(model, device, layout, engine))
    cache, before = session.cache, session.planes(session.a)
    view = cache.books.view(session.a)
    for table in cache.plan.tables:
        pages = view.parts[table.name].pages
        free = [page for page in range(1, table.num_pages) if page not in pages][:1]
        target = [*pages[1:], *free]
        for group, pool in cache._parts.stored():
            if group.table == table.name:
                pool.move_pages(target, pages.tolist())
        view.parts[table.name].pages[:] = target
    for state in cache.plan.states:
        slot = view.slots[state.name]
        cache.states.move(state.name, [slot + 2], [slot])
        view.slots[state.name] = slot + 2  # type: ignore[index]
    same(planes(cache, view, rings=True), before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("model", "layout", "engine"), CELLS, ids=IDS)
def test_transfers(model: str, layout: str, engine: dict[str, Any], device: str) -> None:
    """To another cache, by its regions alone; what was in its slots before does no harm."""
    source, target = (Session(hybrid(model, device, layout, engine)) for _ in range(2))
    target.cache.close([target.a, target.b])
    for group, pool in source.cache._parts.stored():
        theirs = target.cache._parts.pools[group.name]
        assert not pool.manifest().mismatches(theirs.manifest())
    for name, pool in target.cache._parts.pools.items():
        if name.endswith(".ring"):
            pool.bound.planes["cursor"].fill_(1)
    sent = source.cache.regions(source.a)
    folded = source.planes(source.a, rings=False)
    received = target.cache.receive(23)
    for name, pool in target.cache._parts.pools.items():
        if name.endswith(".ring"):
            slot = target.cache.books.state_slots(received)["state"]
            assert not pool.bound.planes["cursor"][:, slot].any()
    places = target.cache.regions(received)
    assert sent.keys() == places.keys()
    ours, theirs = source.cache._parts.arena, target.cache._parts.arena
    for name, regions in sent.items():
        for begin, to, size in copies(regions, places[name]):
            theirs[to : to + size] = ours[begin : begin + size]
    same(target.planes(received, rings=False), folded)
    for tokens in ([3], [8, 1], [2]):
        got, want = target.step({received: tokens}), source.step({source.a: tokens})
        assert torch.equal(got, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ring", RINGS)
def test_a_transfer_waits_for_open_steps_and_flushes(ring: str, device: str) -> None:
    session = Session(hybrid("qwen3_next", device, "nhd", RINGS[ring]))
    cache = session.cache
    with pytest.raises(BooksError, match="replay ring"):
        cache.fork(session.a, 1)
    step = cache.extend([session.a], 1)
    with pytest.raises(BooksError, match="open"):
        cache.regions(session.a)
    session.feed.run(step, [4])
    cache.commit(step)
    assert not any(name.endswith((".ring", ".snapshots")) for name in cache.regions(session.a))
    cache.fork(session.a, 1)
