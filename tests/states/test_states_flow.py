"""Recurrent layers through the cache: prefill, chunks and decode equal one go from a zero state."""

from __future__ import annotations

import pytest
import torch
from states_support import REPLAYED, RULES, Loop

from kvfactory.verify.recurrent import LinearInputs

CELLS = [(rule, "none") for rule in RULES] + [(rule, "decode_ring") for rule in REPLAYED]


@pytest.mark.parametrize(("rule", "replay"), CELLS)
def test_chunks_and_decodes_equal_one_go(rule: str, replay: str) -> None:
    loop = Loop(rule, engine={"state_replay": replay, "replay_tokens": 4})
    a, b = loop.open(2)
    outs = [loop.step([a, b], [7, 3]), loop.step([a], [5]), loop.step([b], [0])]
    outs += [loop.step([b, a], [1, 1]) for _ in range(6)]
    for sequence in (a, b):
        loop.check(sequence)
    layer = loop.layers[2]
    history = loop.history[a][2]
    want = layer.run(layer.fresh(), history, one_by_one=True).out
    got = torch.cat([outs[0][2][:7], outs[1][2], *(out[2][1:] for out in outs[3:])])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_long_prefill_in_blocks(rule: str) -> None:
    loop = Loop(rule)
    (sequence,) = loop.open()
    loop.step([sequence], [40])
    loop.step([sequence], [23])
    for layer in loop.layers:
        state, want = loop.state(sequence, layer), loop.replayed(sequence, layer)
        for name, value in want.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-4)


def test_a_reused_slot_starts_from_zero() -> None:
    loop = Loop("gdn", engine={"max_requests": 4})
    first = loop.open(4)
    loop.step(first, [6] * 4)
    loop.cache.close(first)
    second = loop.open(4)
    step = loop.cache.extend(second, [3] * 4)
    views = loop.cache.state(0, step)
    assert views.fresh.tolist() == [1] * 4
    for tensor in views.tensors.values():
        assert not tensor[views.slots.long()].any()
    _, inputs = loop.forward(step)
    loop.commit(step, second, inputs)
    for sequence in second:
        loop.check(sequence)


def test_a_step_ahead_of_its_commit() -> None:
    loop = Loop("mamba2")
    (sequence,) = loop.open()
    first = loop.cache.extend([sequence], [6])
    _, one = loop.forward(first)
    second = loop.cache.extend([sequence], [1])
    _, two = loop.forward(second)
    loop.commit(first, [sequence], one)
    loop.commit(second, [sequence], two)
    loop.check(sequence)


def test_inputs_cut_and_join() -> None:
    layer = next(iter(Loop("gdn").layers.values()))
    inputs = layer.draw(5)
    again: LinearInputs = inputs.part(0, 2).join(inputs.part(2, 5))
    for x, y in zip(again.conv, inputs.conv, strict=True):
        assert torch.equal(x, y)
    assert all(torch.equal(again.drawn[name], x) for name, x in inputs.drawn.items())
