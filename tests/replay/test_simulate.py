"""The simulation against the books it drives, on small traces of both kinds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from replay_support import run, serve, small_model, small_spec, trace_of

from kvfactory.books import Books
from kvfactory.planner import plan
from kvfactory.replay import Simulation, Trace, load_of, spec_for
from kvfactory.spec import Spec

GROUPS = [("full",), ("local",), ("full", "local"), ("full", "chunked"), ("full", "linear")]


def _random_trace(seed: int, requests: int = 60, shared: bool = False) -> Trace:
    """Bursts of prompts of up to 2,000 tokens; ``shared`` ones begin like others."""
    random = np.random.default_rng(seed)
    arrivals = np.sort(random.integers(0, 4000, requests)) // 300 * 300
    prompts = random.integers(1, 2000, requests)
    outputs = random.integers(0, 120, requests)
    rows = list(zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True))
    if not shared:
        return trace_of(rows)
    fresh = itertools.count(1000)
    blocks = []
    for prompt in prompts.tolist():
        depth = int(random.integers(0, 4))
        ids = [10 * block + int(random.integers(0, 2)) for block in range(depth)]
        whole = -(-prompt // 512)
        blocks.append(tuple((ids + [next(fresh) for _ in range(whole)])[:whole]))
    return trace_of(rows, blocks)


def _spec(groups: tuple[str, ...], requests: int = 3, **parts: object) -> Spec:
    engine = {"prefill_chunk_tokens": 256}
    return small_spec(*groups, engine=engine, workload={"requests": requests}, **parts)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
def test_everybody_finishes_and_the_books_balance(groups: tuple[str, ...], shared: bool) -> None:
    trace = _random_trace(1, shared=shared)
    _, outcome = serve(_spec(groups), trace)
    assert outcome.finished == outcome.arrivals == 60
    assert outcome.running_peak == 3
    assert outcome.leaked == {}
    assert outcome.refused == {}
    computed = outcome.prompt_tokens + outcome.prefix_hit_tokens
    assert computed == trace.prompt.sum()
    assert outcome.generated_tokens == trace.output.sum()
    assert (outcome.prefix_hit_tokens > 0) == shared
    assert (outcome.window_pages_released > 0) == bool({"local", "chunked"} & {*groups})


def test_the_same_trace_gives_the_same_replay() -> None:
    first, second = (serve(_spec(GROUPS[2]), _random_trace(5, shared=True))[1] for _ in range(2))
    for field in ("steps", "virtual_s", "prefix_hit_tokens", "running_peak", "fills"):
        assert vars(first)[field] == vars(second)[field]


@pytest.mark.parametrize("groups", [("full", "local"), ("chunked",)])
def test_the_accounts_mirror_the_books(groups: tuple[str, ...]) -> None:
    """Lengths, owned pages and what is spare are what the books say, at every tick."""
    spec = _spec(groups)
    load = load_of(_random_trace(2), spec)
    simulation = Simulation(plan(spec_for(load, spec)), load)
    while simulation.done < len(load.trace):
        simulation.tick()
        _compare(simulation)


def _compare(simulation: Simulation) -> None:
    books, accounts, rows = simulation.books, simulation.accounts, simulation._rows
    assert (books.committed(simulation._handles) == accounts.committed[rows]).all()
    capacity = books.capacity()
    for i, table in enumerate(accounts.tables):
        owned = (books.rows(table.name) > 0).sum(axis=1)[rows]
        begun = -(-accounts.reserved[rows] // table.page_tokens)
        assert (owned == begun - accounts._first[i, rows]).all()
        held = capacity[f"tables.{table.name}"].held
        assert held == owned.sum()
        used = held * table.page_tokens - accounts.slack(i, rows)
        assert 0 <= used <= accounts.reserved[rows].sum()
        assert capacity[f"tables.{table.name}"].free >= accounts.growth(i, rows).sum()


def test_window_pages_are_counted_as_the_books_release_them() -> None:
    """One request alone: all its pages but those it owns at the end left the window."""
    spec = small_spec("full", "local", workload={"requests": 1})
    _, outcome = serve(spec, trace_of([(0, 400, 100)]))
    whole, owned = 500 // 8 + 1, -(-(500 - (500 - 39) // 8 * 8) // 8)
    assert outcome.window_pages_released == whole - owned


def test_chunks_share_the_step_and_two_steps_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more prompt tokens a step than the engine allows, never a third step open."""
    seen: list[tuple[int, int]] = []
    extend = Books.extend

    def spy(books: Books, sequences: object, counts: list[int]) -> object:
        seen.append((len(simulation._flights), sum(count for count in counts if count > 1)))
        return extend(books, sequences, counts)  # type: ignore[arg-type]

    monkeypatch.setattr(Books, "extend", spy)
    spec = _spec(("full", "local"))
    load = load_of(_random_trace(3), spec)
    simulation = Simulation(plan(spec_for(load, spec)), load)
    while simulation.done < len(load.trace):
        simulation.tick()
    assert max(flights for flights, _ in seen) == 1
    assert 200 < max(tokens for _, tokens in seen) <= 256


def test_first_come_first_served_and_time_stands_still_for_nobody() -> None:
    """Idle hours cost no steps; the second request waits for the first one's row."""
    trace = trace_of([(0, 8, 10), (0, 8, 2), (3_600_000, 8, 1)])
    spec = small_spec("full", workload={"requests": 1})
    _, outcome = serve(spec, trace)
    assert outcome.steps < 30
    assert outcome.virtual_s > 3600
    assert outcome.waiting_peak == 2
    assert outcome.longest_wait_s == pytest.approx(12 * 0.030)


# ---- limits ----------------------------------------------------------------------------------


def test_prompts_beyond_the_context_are_refused_and_outputs_cut() -> None:
    model = small_model("full", max_context=100)
    trace = trace_of([(0, 101, 5), (0, 100, 5), (0, 90, 20), (0, 90, 10)])
    _, outcome = serve(small_spec(model=model), trace)
    assert outcome.refused == {"prompt beyond model.max_context=100": 1}
    assert (outcome.finished, outcome.cut) == (3, 2)
    assert outcome.generated_tokens == 0 + 10 + 10


def test_tokens_that_somebody_set_are_the_limit() -> None:
    spec = small_spec("full", workload={"requests": 2, "tokens": 64})
    trace = trace_of([(0, 65, 5), (0, 60, 5)])
    simulation, outcome = serve(spec, trace)
    assert outcome.refused == {"prompt beyond workload.tokens=64": 1}
    assert (outcome.finished, outcome.cut) == (1, 1)
    assert simulation.plan.limits.tokens == 64


def test_a_trace_of_nothing_but_refusals() -> None:
    model = small_model("full", max_context=10)
    _, outcome = serve(small_spec(model=model), trace_of([(0, 11, 1), (5, 12, 1)]))
    assert (outcome.arrivals, outcome.finished, outcome.steps) == (2, 0, 0)
    assert sum(outcome.refused.values()) == 2


def test_the_plan_is_for_the_mean_and_holds_the_longest() -> None:
    spec = small_spec("full", memory={"budget": "1MiB"})
    load = load_of(trace_of([(0, 60, 4)] * 9 + [(0, 600, 40)]), spec)
    laid = plan(spec_for(load, spec))
    assert (laid.spec.workload.tokens, laid.spec.workload.mean_tokens) == (640, 122)
    worst = plan(small_spec("full", memory={"budget": "1MiB"}, workload={"tokens": 640}))
    assert laid.limits.admitted > 4 * worst.limits.admitted
    _, outcome = run(laid, load)
    assert outcome.finished == 10


# ---- shared prefixes -------------------------------------------------------------------------


def _turns(count: int) -> Trace:
    """A conversation: each prompt is the last one and 600 tokens more, a minute later."""
    prompts = [600 * (turn + 1) for turn in range(count)]
    ids = tuple(range(100))
    blocks = [(*ids[: p // 512], *((1000 + p,) * (p % 512 > 0))) for p in prompts]
    return trace_of([(60_000.0 * at, p, 3) for at, p in enumerate(prompts)], blocks)


@pytest.mark.parametrize("groups", [("full",), ("full", "local"), ("full", "linear")])
def test_a_conversation_computes_only_what_is_new(groups: tuple[str, ...]) -> None:
    _, outcome = serve(_spec(groups, requests=6), _turns(5))
    held = [600 * turn // 512 * 512 for turn in range(1, 5)]
    assert outcome.prefix_hit_tokens == sum(held)
    assert outcome.leaked == {}


def test_a_prompt_that_is_all_known_computes_its_last_token() -> None:
    blocks = [(7, 8), (7, 8)]
    trace = trace_of([(0, 1024, 2), (60_000, 1024, 2)], blocks)
    _, outcome = serve(_spec(("full", "local")), trace)
    assert outcome.prefix_hit_tokens in (0, 512)  # a whole match would leave nothing to compute
    assert outcome.finished == 2


def test_where_two_prompts_part_is_held_for_the_third() -> None:
    blocks = [(1, 2, 3), (1, 2, 4), (1, 2, 5)]
    trace = trace_of(
        [(60_000.0 * at, 1600, 2) for at in range(3)], [(*b, 90 + b[2]) for b in blocks]
    )
    _, outcome = serve(_spec(("full", "local"), requests=6), trace)
    assert outcome.prefix_hit_tokens == 1024


def test_segments_make_room_under_pressure() -> None:
    """Distinct prompts fill the pages with segments; those used least recently are released."""
    blocks = [(10 * at, 10 * at + 1) for at in range(30)]
    trace = trace_of([(2000.0 * at, 1000, 4) for at in range(30)], blocks)
    _, outcome = serve(_spec(("full", "local"), requests=2), trace)
    assert outcome.finished == 30
    assert outcome.segments_released > 20
    assert outcome.leaked == {}


def test_pages_wider_than_a_block() -> None:
    spec = _spec(("full", "local"), kv={"page_tokens": 1024})
    _, outcome = serve(spec, _turns(5))
    assert (outcome.finished, outcome.leaked) == (5, {})


def test_encoder_tokens_are_reserved_with_the_request() -> None:
    cross = {"kind": "cross", "layers": "1-1", "q_heads": 2, "kv_heads": 2, "head_dim": 16}
    model = small_model("full")
    model["groups"]["cross"] = cross | {"encoder_tokens": 50}
    _, outcome = serve(small_spec(model=model, workload={"requests": 2}), _random_trace(4, 10))
    assert (outcome.finished, outcome.leaked) == (10, {})


def test_growth_at_equal_batches() -> None:
    """Long after the first requests, a step costs what it did: no state piles up."""
    trace = trace_of([(300.0 * at, 64, 20) for at in range(400)])
    _, outcome = serve(_spec(("full", "local")), trace)
    assert outcome.times.growth < 2
