"""Handing sequences over: to ranks of other sizes and back, layer by layer behind a gate."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from cache_support import FULL, STATE, Driver, cache_of, close_to, scratch, some_tokens
from torch import Tensor

from kvfactory.cache import Cache
from kvfactory.errors import BooksError, OutOfPages, SpecError
from kvfactory.pools import copies

ENGINE = {"state_replay": "decode_ring", "replay_tokens": 4}


def sized(ranks: int, **parts: Any) -> Cache:
    """Four K/V heads and state heads, two key heads; or a rank's share of them."""
    heads, keys = 4 // ranks, 2 // ranks
    groups = {
        "full": {**FULL, "q_heads": 4, "kv_heads": heads, "layers": [0]},
        "state": {
            **STATE,
            "layers": [0, 1],
            "conv": [[2 * keys * 8 + heads * 4, 3]],
            "recurrent": {"head": heads, "key": 8, "value": 4},
        },
    }
    return cache_of(groups, engine=ENGINE, kv={"quant": {"k": "int8_token_head"}}, **parts)


def send(source: Cache, target: Cache, sent: Any, got: Any) -> None:
    assert sent.keys() == got.keys() == {"full", "state"}
    for name, regions in sent.items():
        for begin, to, size in copies(regions, got[name]):
            data = source._parts.arena[begin : begin + size]
            target._parts.arena[to : to + size] = data


def state_of(cache: Cache, sequence: Any, name: str) -> Tensor:
    pool, index = cache.pool(1, "state")
    slot = cache.books.state_slots(sequence)["state"]
    return pool.views(index)[name][slot]


def test_two_ranks_get_their_heads_and_give_them_back() -> None:
    whole = sized(1)
    driver = Driver(whole)
    (sequence,) = driver.open()
    driver.step({sequence: some_tokens(19)})
    driver.step({sequence: [3]})
    ranks = [sized(2), sized(2)]
    back = whole.receive(20)
    for part, rank in enumerate(ranks):
        received = rank.receive(20)
        sent = whole.regions(sequence, share=(part, 2))
        send(whole, rank, sent, rank.regions(received, share=(0, 1)))
        recurrent = state_of(whole, sequence, "recurrent").chunk(2)[part]
        assert torch.equal(state_of(rank, received, "recurrent"), recurrent)
        blocks = state_of(whole, sequence, "conv0").split([16, 16, 16])
        window = torch.cat([block.chunk(2)[part] for block in blocks])
        assert torch.equal(state_of(rank, received, "conv0"), window)
        send(rank, whole, rank.regions(received, share=(0, 1)), whole.regions(back, (part, 2)))
    driver.tokens[back] = list(driver.tokens[sequence])
    outs = driver.step({back: [4, 5], sequence: [4, 5]})
    assert torch.equal(outs[back], outs[sequence])
    close_to(outs[back], scratch(whole, driver.tokens[back])[-2:])


def test_what_cannot_be_sent_or_received() -> None:
    cache = sized(1)
    driver = Driver(cache)
    (sequence,) = driver.open()
    driver.step({sequence: some_tokens(9)})
    with pytest.raises(SpecError, match="parts=3"):
        cache.regions(sequence, share=(0, 3))
    with pytest.raises(BooksError, match="tokens"):
        cache.receive(1000)
    cache.close([sequence])
    with pytest.raises(BooksError, match="handle"):
        cache.regions(sequence)
    full = [cache.receive(64) for _ in range(4)]
    with pytest.raises(OutOfPages, match="requests"):
        cache.receive(1)
    cache.close(full)
    assert all(not room.held for room in cache.books.capacity().values())


def test_states_wait_for_their_layer() -> None:
    cache = sized(1)
    step = cache.extend(cache.open(), 2)
    gate, done = cache.gate([1]), []
    cache.state(0, step)

    def read() -> None:
        cache.state(1, step)
        done.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    reader.join(0.05)
    assert done == []
    gate.open(1)
    reader.join(5)
    assert done == [1]
