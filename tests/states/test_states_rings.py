"""What the host knows of replay rings, and slots whose last owner left records in its ring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states_support import REPLAYED, RULES, Loop

from kvfactory.errors import BooksError
from kvfactory.states.planes import device_ids, store
from kvfactory.states.rings import Mirror

VERIFY = {"state_replay": "verify_ring", "replay_tokens": 8, "draft_tokens": 2}
DECODE = {"state_replay": "decode_ring", "replay_tokens": 4}


class Truth:
    """The ring of one slot, as the device has it: steps run in the order of their commits."""

    def __init__(self, tokens: int, drafts: int) -> None:
        self.pending, self.tokens, self.drafts = 0, tokens, drafts

    def run(self, new: int, accepted: int) -> bool:
        """A step; whether it folds."""
        if new > self.drafts:
            self.pending = 0
            return False
        pending = self.pending + accepted
        full = pending > self.tokens - self.drafts
        self.pending = 0 if full else pending
        return full


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 7), st.booleans(), st.booleans())))
def test_a_mirror_never_knows_of_too_few_records(
    history: list[tuple[int, int, bool, bool]],
) -> None:
    """Counts may stay on the device, and a step may begin before the one before it is committed."""
    mirror, truth, slot = Mirror(3, 8, 3, has_cursor=True), Truth(8, 3), np.array([2])
    open_steps: list[tuple[int, int, bool]] = []

    def commit() -> None:
        new, accepted, late = open_steps.pop(0)
        folds = mirror.commit(slot, np.array([new]), None if late else np.array([accepted]))
        assert not truth.run(new, accepted) or 0 in folds
        if not open_steps:
            assert mirror.at(2) >= truth.pending
            assert not mirror.exact[2] or mirror.at(2) == truth.pending

    for new, accepted, late, ahead in history:
        taken = new if new > 3 else min(accepted, new)
        mirror.begin(slot, np.array([new]), np.array([not open_steps]))
        open_steps.append((new, taken, late))
        while len(open_steps) > ahead:
            commit()
    while open_steps:
        commit()


def _stale(loop: Loop) -> None:
    """Give every slot that somebody has a record in its ring, and give them all back."""
    sequences = loop.open(4)
    loop.step(sequences, [5] * 4)
    loop.step(sequences, [1] * 4)
    loop.cache.close(sequences)
    loop.history.clear()


@pytest.mark.parametrize("ring", [VERIFY, DECODE], ids=["verify", "decode"])
@pytest.mark.parametrize("rule", REPLAYED)
def test_a_state_that_a_layer_tracks_has_no_records(rule: str, ring: dict[str, Any]) -> None:
    loop = Loop(rule, engine={**ring, "state_tracking": "one"})
    _stale(loop)
    (sequence,) = loop.open()
    loop.step([sequence], [6])
    step = loop.cache.extend([sequence], [5])
    place = loop.cache.states.track(sequence, 9)["state"]
    _, inputs = loop.forward(step)
    for layer, flow in loop.layers.items():
        history = loop.history[sequence][layer].join(inputs[layer].part(0, 3))
        pool, index = loop.cache.pool(layer, "state")
        for name, value in flow.run(flow.fresh(), history).state.items():
            store(pool, index, device_ids(pool, [place]), name, value.unsqueeze(0))
    loop.commit(step, [sequence], inputs)
    segment = loop.cache.states.donate(sequence)
    (heir,) = loop.cache.open(1, [segment])
    loop.cache.release(segment)  # the heir takes the slot over: nothing is copied
    loop.history[heir] = {i: x.part(0, 9) for i, x in loop.history[sequence].items()}
    loop.cache.fork(heir, 1)
    for each in (sequence, heir):
        loop.check(each)
    loop.step([heir], [1])
    loop.check(heir)


@pytest.mark.parametrize("ring", [VERIFY, DECODE], ids=["verify", "decode"])
def test_what_has_no_state_yet_is_flushed(ring: dict[str, Any]) -> None:
    """An empty sequence in a slot of stale records; one whose state is still a checkpoint."""
    loop = Loop("gdn", engine=ring, memory={"checkpoints": 1})
    _stale(loop)
    (empty,) = loop.open()
    (child,) = loop.cache.fork(empty, 1)
    loop.cache.close([child])
    loop.step([empty], [6])
    segment = loop.cache.states.checkpoint(empty, 6)
    (restored,) = loop.cache.open(1, [segment])
    loop.cache.fork(restored, 1)
    loop.cache.states.flush([restored])
    for layer in loop.layers:
        got, want = loop.state(restored, layer), loop.state(empty, layer)
        torch.testing.assert_close(got["recurrent"], want["recurrent"], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("ring", [VERIFY, DECODE], ids=["verify", "decode"])
@pytest.mark.parametrize("rule", REPLAYED)
def test_a_moved_state_takes_its_ring_along(rule: str, ring: dict[str, Any]) -> None:
    loop = Loop(rule, engine=ring)
    a, b = loop.open(2)
    loop.step([a, b], [7, 5])
    loop.step([a, b], [1, 1])
    slots = [loop.cache.books.state_slots(each)["state"] for each in (a, b)]
    loop.cache.states.move("state", slots, slots[::-1])
    for each, place in ((a, slots[1]), (b, slots[0])):
        for layer in loop.layers:
            state = loop.state_at(place, layer)
            for name, value in loop.replayed(each, layer).items():
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafts", [0, 2])
def test_tokens_that_no_state_forgets_cannot_be_rejected(rule: str, drafts: int) -> None:
    """Only a step of up to 1 + draft_tokens leaves the state as it was."""
    loop = Loop(rule, engine={"draft_tokens": drafts})
    a, b = loop.open(2)
    loop.step([a, b], [2 + drafts, 1])
    step = loop.cache.extend([a, b], [2 + drafts, 1 if drafts else 0])
    _, inputs = loop.forward(step)
    for wrong in ([1 + drafts, 0], [0, 0], np.array([1, 0])):
        with pytest.raises(BooksError, match=rf"accepted\[0\].*draft_tokens={1 + drafts}"):
            loop.cache.commit(step, wrong)
    loop.commit(step, [a, b], inputs, [range(2 + drafts), []])
    for sequence in (a, b):
        loop.check(sequence)
