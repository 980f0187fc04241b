"""Plans of latent attention that get new lengths: what they cover, how long they last."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flashinfer_double import H200_SMS
from flashinfer_plans import latent_lengths, latent_plan
from flashinfer_scene import LATENT, Scene, plan_of

from kvfactory.backends.flashinfer.calls import Sizes
from kvfactory.backends.flashinfer.latent import GROWTH, runs_of
from kvfactory.books import Sequence
from kvfactory.books.ids import indptr

PAGE = 8


def sizes_of(tokens: np.ndarray, q_heads: int) -> Sizes:
    """Decodes of ``tokens`` each."""
    return Sizes(
        q_indptr=torch.arange(len(tokens) + 1, dtype=torch.int32),
        kv_indptr=torch.from_numpy(indptr(-(-tokens // PAGE))),
        kv_tokens=torch.from_numpy(tokens.astype(np.int32)),
        rows=len(tokens),
        q_heads=q_heads,
        kv_heads=1,
        page_tokens=PAGE,
        dim=512,
        v_dim=512,
        graph=False,
        causal=False,
        window_left=-1,
        split=False,
        idle_blocks=0,
        soft_cap=0.0,
    )


@pytest.mark.parametrize("q_heads", [16, 64, 128, 256])
@pytest.mark.parametrize(
    ("batch", "most"), [(1, 60_000), (3, 9_000), (32, 4_000), (256, 1_500), (700, 300)]
)
def test_new_lengths_are_covered_and_nothing_else(batch: int, most: int, q_heads: int) -> None:
    random = np.random.default_rng(batch)
    tokens = random.integers(most // 2, most, batch)
    laid = latent_plan(sizes_of(tokens, q_heads), H200_SMS)
    pinned, ints = torch.from_numpy(laid.ints.copy()), torch.from_numpy(laid.ints.copy())
    runs = runs_of(laid.fields, pinned, tokens)
    assert runs is not None
    assert runs.spare_tokens > 0
    for _ in range(3):
        longer = tokens + random.integers(0, runs.spare_tokens + 1, batch)
        assert runs.fits(longer)
        first = indptr(-(-longer // PAGE))
        runs.write(pinned, ints, first, longer)
        got_first, got_tokens = latent_lengths(ints, laid.fields, batch)
        assert got_first.tolist() == first[:-1].tolist()
        assert got_tokens.tolist() == longer.tolist()
    for change in (-1, runs.spare_tokens + 1):
        other = tokens.copy()
        other[batch // 2] += change
        assert not runs.fits(other), "shorter than a run may begin, or out of balance"


def test_runs_that_begin_within_a_tile_get_no_other_lengths() -> None:
    """The kernels would leave keys of a longer last run unmasked."""
    tokens = np.array([70, 40])
    laid = latent_plan(sizes_of(tokens, 16), H200_SMS)
    assert runs_of(laid.fields, torch.from_numpy(laid.ints), tokens) is None


def prefilled() -> tuple[Scene, list[Sequence]]:
    """Three requests of latent attention, of 900, 500 and 700 tokens."""
    scene = Scene(
        plan_of(
            {"full": LATENT},
            engine={"prefill_chunk_tokens": 2200},
            workload={"requests": 4, "tokens": 1200},
        )
    )
    sequences = scene.cache.open(3)
    scene.advance(sequences, [900, 500, 700])
    return scene, sequences


def test_a_latent_plan_lasts_while_requests_grow() -> None:
    scene, sequences = prefilled()
    cache = scene.cache
    before = len(scene.double.plans)
    steps = 30
    for number in range(steps):
        step = cache.extend(sequences if number % 5 else sequences[::-1], 1)
        scene.check(step, 3)
        cache.commit(step)
    made = len(scene.double.plans) - before
    turns = 2 * steps // 5
    assert 1 <= made <= turns + steps // (64 // GROWTH) + 1
    assert made < steps


def test_a_latent_graph_takes_new_lengths_too() -> None:
    scene, sequences = prefilled()
    cache = scene.cache
    graph = scene.graph(3)
    group = scene.plan.groups[0]
    inputs = scene.inputs(group, 3)
    graph.capture(lambda step: cache.attend(group.layers[0], *inputs, step))
    before = len(scene.double.plans)
    for _ in range(12):
        step = cache.extend(sequences, 1)
        cache.fill(graph, step)
        found = graph.replay()
        wanted = scene.oracle(group, *inputs, step)
        torch.testing.assert_close(found.double(), wanted.double(), rtol=0.02, atol=0.02)
        cache.commit(step)
    assert len(scene.double.plans) - before <= 2
