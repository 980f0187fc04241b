"""``action=run`` checks every group, finds what is wrong, and takes seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_support import MODELS, cache_of, spec_of
from torch import Tensor

from kvfactory.actions.run import execute, schedule
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import Recurrence, Select
from kvfactory.sizing import chunk_tokens
from kvfactory.verify.attention import Verdict
from kvfactory.verify.effort import SECONDS, choose, sample, seconds
from kvfactory.verify.index import IndexChecker
from kvfactory.verify.loop import Loop
from kvfactory.verify.workload import Workload

INT8 = {"quant": {"k": "int8_token_head", "latent": "int8_token_head", "index_k": "fp8_e4m3"}}


@pytest.mark.parametrize("kv", [{}, INT8], ids=["plain", "int8"])
@pytest.mark.parametrize("model", MODELS)
def test_every_group_gets_a_verdict(model: str, kv: dict[str, Any]) -> None:
    laid = plan(spec_of(MODELS[model], kv=kv))
    result = execute(laid)
    assert [verdict.group for verdict in result.verdicts] == [group.name for group in laid.groups]
    assert result.passed, result.verdicts
    assert result.tokens == result.attended_tokens == 16 + 32 + 48 + 64
    for group, verdict in zip(laid.groups, result.verdicts, strict=True):
        assert verdict.numbers
        if isinstance(group.work, Select):
            assert "recall" in verdict.note
            assert ("recall 1.0000" in verdict.note) == (not kv)


@pytest.mark.parametrize("steps_in_flight", [1, 3])
@pytest.mark.parametrize("model", ["windows", "hybrid"])
def test_any_number_of_steps_in_flight(model: str, steps_in_flight: int) -> None:
    laid = plan(spec_of(MODELS[model], engine={"steps_in_flight": steps_in_flight}))
    assert execute(laid).passed


@pytest.mark.parametrize("model", ["pooled", "full"])
def test_drafts_beside_entries_of_any_number_of_tokens(model: str) -> None:
    assert execute(plan(spec_of(MODELS[model], engine={"draft_tokens": 3}))).passed


@pytest.mark.parametrize("requests", [24, 32])
def test_many_requests_share_the_pages_of_a_window(requests: int) -> None:
    """There are none for whole chunks of all of them at once."""
    crowd = {"requests": requests, "tokens": 64}
    groups = {"local": {**MODELS["windows"]["local"], "layers": [0]}}
    laid = plan(spec_of(groups, workload=crowd, engine={"prefill_chunk_tokens": 512}))
    assert chunk_tokens(laid.tables, laid.spec, 4) == 512
    assert chunk_tokens(laid.tables, laid.spec, requests) <= 64
    assert execute(laid).passed


@pytest.mark.parametrize(
    ("tokens", "mean_tokens"), [(64, 1), (64, 16), (64, 30), (64, 63), (3, 2), (3, 1)]
)
@pytest.mark.parametrize("model", ["full", "windows"])
def test_requests_keep_to_the_mean_that_is_planned(
    model: str, tokens: int, mean_tokens: int
) -> None:
    """Pages are of four tokens, more than the shortest requests have."""
    crowd = {"requests": 6, "tokens": tokens, "mean_tokens": mean_tokens}
    laid = plan(spec_of(MODELS[model], workload=crowd))
    lengths = choose(laid).lengths
    assert max(lengths) == tokens
    assert sum(lengths) <= max(tokens, 6 * mean_tokens)
    assert execute(laid).passed


def _verdict(change: Any, model: str = "dsa") -> Verdict:
    """What the index checker says of selections that ``change`` made of the right ones."""
    cache = cache_of(model)
    index = next(group for group in cache.plan.groups if isinstance(group.work, Select))
    checker = IndexChecker(cache.plan, Workload(cache.plan))
    layer = index.layers[0]
    step = cache.extend(cache.open(), 40)
    inputs = checker.inputs(index, layer, step)
    keys = inputs.tensors["index_k"]
    got = cache.select(layer, inputs.q, keys, step, weights=inputs.weights)
    checker.compare(index, layer, step, inputs, change(got))
    return checker.verdict(index)


def _other(got: Tensor) -> Tensor:
    wrong = got.clone()
    wrong[39] = torch.arange(got.shape[1])
    return wrong


def _short(got: Tensor) -> Tensor:
    return torch.where(torch.arange(got.shape[1]) == got.shape[1] - 1, -1, got)


def _future(got: Tensor) -> Tensor:
    return torch.where(torch.arange(len(got))[:, None] == 20, got + 30, got)


@pytest.mark.parametrize("model", ["dsa", "minimax", "pooled"])
def test_wrong_selections_are_found(model: str) -> None:
    assert _verdict(lambda got: got, model).passed
    for change in (_other, _short, _future, torch.zeros_like):
        assert not _verdict(change, model).passed, change


def test_a_lost_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    laid = plan(spec_of(MODELS["hybrid"]))
    spots: list[int] = []

    def lose(loop: Loop, counts: list[int], attended: bool = True) -> None:
        spots.append(1)
        if len(spots) == 5:
            group = next(g for g in laid.groups if isinstance(g.work, Recurrence))
            loop.cache.pool(group.layers[0], group.group)[0].zero([1])
        step(loop, counts, attended)

    step = Loop.step
    monkeypatch.setattr(Loop, "step", lose)
    verdicts = {verdict.group: verdict.passed for verdict in execute(laid).verdicts}
    assert verdicts == {"full": True, "state": False}


def test_effort_keeps_a_layer_of_each_group_and_what_it_needs() -> None:
    groups = {
        "full": {**MODELS["full"]["full"], "layers": "0-59"},
        "index": {**MODELS["dsa"]["index"], "layers": [0, 20, 40], "selects": "full"},
        "local": {**MODELS["windows"]["local"], "layers": "60-89"},
    }
    model = {"num_layers": 100, "aliases": [[90, 60], [91, 60], [92, 89]]}
    laid = plan(spec_of(groups, model=model))
    assert sample(laid, 1) == (20, 30, 75)
    assert sample(laid, 2) == (0, 40, 59, 60, 89, 90, 91, 92)
    assert len(sample(laid, 1000)) == 93


@pytest.mark.parametrize("tokens", [64, 4000, 100_000])
def test_effort_stays_within_its_aim(tokens: int) -> None:
    groups = {"full": {**MODELS["full"]["full"], "layers": "0-5", "q_heads": 64}}
    laid = plan(spec_of(groups, workload={"requests": 8, "tokens": tokens}))
    effort = choose(laid)
    assert max(effort.lengths) == tokens
    assert tokens > 4000 or seconds(laid, effort) <= SECONDS


def test_a_schedule_covers_every_token() -> None:
    for quiet in (0.0, 0.5, 0.95):
        steps = schedule([5, 40, 100], 30, quiet)
        assert [sum(counts) for counts in zip(*(c for c, _ in steps), strict=True)] == [5, 40, 100]
        assert [attended for _, attended in steps] == sorted(attended for _, attended in steps)
        assert max(sum(counts) for counts, _ in steps) <= 30 + 3
        silent = [counts for counts, attended in steps if not attended]
        assert bool(silent) == bool(quiet)
