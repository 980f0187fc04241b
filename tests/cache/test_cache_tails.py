"""Entries of several tokens, made of a tail: the last tokens that no entry speaks for yet.

The tail is an ordinary recurrent group, a window of the last ``tokens_per_entry - 1`` inputs; with
it an entry is the mean of its tokens however they came: in chunks, drafts, after a fork or a load.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from cache_support import INDEX, MLA, VOCABULARY, cache_of, some_tokens
from torch import Tensor

from kvfactory.books import Sequence as SequenceId
from kvfactory.cache import Cache
from kvfactory.errors import BooksError
from kvfactory.spec import LinearGroup
from kvfactory.steps.step import Step
from kvfactory.verify.recurrent import LinearInputs, LinearLayer

RATIO, DIM = 4, 16
GROUPS = {
    "latent": {**MLA, "layers": [0, 1]},
    "index": {**INDEX, "layers": [0, 1], "selects": "latent", "tokens_per_entry": RATIO},
    "tail": {
        "kind": "linear",
        "layers": [0, 1],
        "conv": [[DIM, RATIO - 1]],
        "recurrence": "none",
    },
}


class Pooled:
    """An engine that pools index keys over its tail."""

    def __init__(self, **engine: int) -> None:
        self.cache: Cache = cache_of(GROUPS, engine=engine)
        self.group = self.cache.plan.by_name["tail"]
        spec = self.cache.plan.spec.model.groups["tail"]
        assert isinstance(spec, LinearGroup)
        self.layers = {n: LinearLayer(self.group, spec, n, "float32") for n in (0, 1)}
        self.keys = {n: torch.randn(VOCABULARY, DIM) for n in self.layers}
        self.tokens: dict[SequenceId, list[int]] = {}

    def open(self) -> SequenceId:
        (sequence,) = self.cache.open()
        self.tokens[sequence] = []
        return sequence

    def run(self, step: Step, tokens: list[int]) -> None:
        bounds = step.host.q_indptr.tolist()
        for layer, flow in self.layers.items():
            views = self.cache.state(layer, step, group="tail")
            raw, entries = self.keys[layer][tokens], []
            for entry, (start, stop) in enumerate(itertools.pairwise(bounds)):
                tail = views.tensors["conv0"][int(views.slots[entry])].T
                known = torch.cat([tail, raw[start:stop]])
                before = int(step.host.prefix[entry])
                done = [n for n in range(stop - start) if (before + n + 1) % RATIO == 0]
                entries += [known[n : n + RATIO].mean(0) for n in done]
            keys = torch.stack(entries) if entries else torch.zeros(0, DIM)
            self.cache.write(layer, step, index_k=keys)
            flow.advance(views, LinearInputs((raw,), {}), step)

    def step(self, sequence: SequenceId, tokens: list[int], accepted: int | None = None) -> None:
        step = self.cache.extend([sequence], len(tokens))
        self.run(step, tokens)
        self.cache.commit(step, None if accepted is None else [accepted])
        self.tokens[sequence] += tokens[:accepted]

    def check(self, sequence: SequenceId) -> None:
        """Every entry is the mean of the keys of its tokens."""
        tokens = self.tokens[sequence]
        view = self.cache.books.view(sequence)
        count = len(tokens) // RATIO
        for layer, keys in self.keys.items():
            pool, index = self.cache.pool(layer, "index")
            pages = torch.from_numpy(view.parts["latent"].pages)
            got = pool.read(index, pages[:count])["index_k"].flatten(1)
            want = keys[tokens[: count * RATIO]].view(count, RATIO, DIM).mean(1)
            torch.testing.assert_close(got, want)
            assert torch.equal(self.tail(layer, view.slots["tail"]), self.last(keys, tokens))

    def tail(self, layer: int, slot: int) -> Tensor:
        pool, index = self.cache.pool(layer, "tail")
        return pool.views(index)["conv0"][slot].T

    def last(self, keys: Tensor, tokens: list[int]) -> Tensor:
        known = torch.cat([torch.zeros(RATIO - 1, DIM), keys[tokens]])
        return known[-(RATIO - 1) :]


@pytest.mark.parametrize("first", range(1, 9))
def test_any_chunks_give_the_same_entries(first: int) -> None:
    pooled = Pooled()
    sequence = pooled.open()
    for count in (first, 1, 2, 5, 1, 1, 1, 4, 3):
        pooled.step(sequence, some_tokens(count, count))
        pooled.check(sequence)


@pytest.mark.parametrize("before", range(5, 9))
def test_rejected_drafts_leave_tail_and_entries_alone(before: int) -> None:
    pooled = Pooled(draft_tokens=5)
    sequence = pooled.open()
    pooled.step(sequence, some_tokens(before + 4, 1))
    for accepted in range(7):
        pooled.step(sequence, some_tokens(6, 10 + accepted), accepted)
        pooled.check(sequence)


def test_forks_prefixes_and_images_bring_their_tails() -> None:
    pooled = Pooled()
    first = pooled.open()
    pooled.step(first, some_tokens(6, 1))
    segment = pooled.cache.hold(first, 6)
    (fork,) = pooled.cache.fork(first, 1)
    (heir,) = pooled.cache.open(1, [segment])
    for sequence in (fork, heir):
        pooled.tokens[sequence] = list(pooled.tokens[first])
    for number, sequence in enumerate((first, fork, heir)):
        pooled.step(sequence, some_tokens(3, 20 + number))
    (back,) = pooled.cache.load(pooled.cache.offload([fork]))
    pooled.tokens[back] = pooled.tokens[fork]
    pooled.step(back, some_tokens(7, 30))
    for sequence in (first, heir, back):
        pooled.check(sequence)


def test_what_numbers_later_entries_must_be_known() -> None:
    """A step that was made behind undecided drafts cannot say which tokens complete an entry."""
    pooled = Pooled(draft_tokens=5)
    sequence = pooled.open()
    pooled.step(sequence, some_tokens(7, 1))
    step = pooled.cache.extend([sequence], 3)
    pooled.run(step, some_tokens(3, 2))
    later = pooled.cache.extend([sequence], 2)
    pooled.cache.commit(step, [2])
    with pytest.raises(BooksError, match="4 tokens an entry"):
        pooled.run(later, some_tokens(2, 3))
    pooled.cache.commit(later, [0])
    pooled.tokens[sequence] += some_tokens(3, 2)[:2]
    pooled.step(sequence, some_tokens(4, 4))
    pooled.check(sequence)
