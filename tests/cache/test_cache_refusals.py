"""What a cache refuses in words, with nothing written, taken or closed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusal_support import FULL, SPEC, all_bytes, inputs, plan_of, refused, small_cache

from kvfactory import Cache, build, compose, plan
from kvfactory.errors import (
    BooksError,
    BuildError,
    KVFactoryError,
    OutOfMemory,
    SpecError,
)
from kvfactory.spec import Spec


@pytest.fixture
def cache() -> Cache:
    return small_cache()


# ---- building ------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "fix"), [("cuda", "device=auto"), ("meta", "device=cpu")])
def test_a_plan_for_another_device_names_one_that_can_be_chosen(device: str, fix: str) -> None:
    with pytest.raises(BuildError, match=f"which the plan is for; try {fix}$"):
        build(plan_of(), device)


def test_too_little_memory_is_told_from_other_failures() -> None:
    laid = plan_of(kv={"page_tokens": 4096}, memory={"budget": 2**48})
    with pytest.raises(OutOfMemory, match=r"a smaller memory\.budget"):
        build(laid)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: build(SPEC), "got a Spec, need a CachePlan; try build(plan(spec))"),
        (lambda: plan("model=qwen3"), "got a str, need a Spec; try plan(compose(...))"),
        (lambda: compose(["model=qwen3"]), "overrides: got ['model=qwen3'], need text"),
        (lambda: Spec.parse({"model": "qwen3"}), 'try kvfactory.compose("model=qwen3")'),
    ],
)
def test_each_door_names_the_one_before_it(call: Any, text: str) -> None:
    with pytest.raises(SpecError) as caught:
        call()
    assert text in str(caught.value)


def test_images_are_what_offload_returned(cache: Cache) -> None:
    one = cache.open()
    wrong: Any = one
    refused(cache, lambda: cache.load(wrong), SpecError, "image: got a list, need the image that")
    wrong = one[0]
    text = "need a list of handles, as open() returns them"
    refused(cache, lambda: cache.offload(wrong), BooksError, text)


# ---- layers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "group", "text"),
    [
        (3, "", "layer: got 3, need 0 to 2"),
        (-1, "", "layer: got -1, need 0 to 2"),
        (
            2,
            "full",
            "got 2, group 'full', which is in sunk, need a layer of an attention group: 0-1",
        ),
        (0, "fall", "which is in full, need a layer of an attention group; this model has none of"),
    ],
)
def test_layers_are_the_models_and_of_the_group(
    cache: Cache, layer: int, group: str, text: str
) -> None:
    step = cache.extend(cache.open(), 5)
    q, k, v = inputs(5)
    refused(cache, lambda: cache.attend(layer, q, k, v, step, group=group), SpecError, text)
    refused(cache, lambda: cache.write(layer, step, k=k, v=v, group=group), SpecError, text)


def test_what_no_layer_keeps_is_named(cache: Cache) -> None:
    step = cache.extend(cache.open(), 5)
    text = "layer: got 0, which is in full, need a layer of a {} group; this model has none"
    call: Any = lambda: cache.select(0, Q, None, step)  # noqa: E731
    refused(cache, call, SpecError, text.format("sparse_index"))
    refused(cache, lambda: cache.state(0, step), SpecError, text.format("linear"))


# ---- the books -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [-1, 1.5, "2", None, True, [1]])
def test_counts_are_whole_numbers(cache: Cache, count: Any) -> None:
    """A count of -1 once took a row from under an open sequence."""
    (sequence,) = cache.open()
    refused(cache, lambda: cache.open(count), BooksError, "count: got ")
    refused(cache, lambda: cache.fork(sequence, count), BooksError, "count: got ")
    assert cache.books.capacity()["requests"].held == 1


@pytest.mark.parametrize(
    "new_tokens",
    [
        -1,
        1.5,
        "a",
        None,
        [1.5, 1],
        [None, 1],
        [[1], [2]],
        {},
        [10**30, 1],
        torch.tensor([0.5, 1.0]),
    ],
)
def test_new_tokens_are_whole_numbers(cache: Cache, new_tokens: Any) -> None:
    pair = cache.open(2)
    refused(cache, lambda: cache.extend(pair, new_tokens), BooksError, "new_tokens: got ")


@pytest.mark.parametrize("new_tokens", [10**12, [10**12, 1], [2**31, 2**31]])
def test_a_step_of_too_many_tokens_takes_no_memory(cache: Cache, new_tokens: Any) -> None:
    pair = cache.open(2)
    refused(cache, lambda: cache.extend(pair, new_tokens), BooksError, "need at most 20 in a step")


def test_numbers_of_a_step_are_taken_from_the_host(cache: Cache) -> None:
    sequences, there = cache.open(2), torch.ones(2, dtype=torch.int64, device="meta")
    text = "got a tensor on meta, need integers on the host; try "
    extend = cache.extend
    refused(cache, lambda: extend(sequences, there), SpecError, f"{text}new_tokens.cpu()")
    refused(cache, lambda: extend(sequences, 1, there), SpecError, f"{text}parents.cpu()")
    step = extend(sequences, torch.tensor([3, 1]), torch.tensor([-1, 0, 0, -1]))
    assert step.positions.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("parents", [["a"], [None], [1.5], [[-1]], [10**30], "x"])
def test_parents_are_whole_numbers(cache: Cache, parents: Any) -> None:
    one = cache.open()
    refused(cache, lambda: cache.extend(one, 1, parents), BooksError, "parents: got ")


@pytest.mark.parametrize(
    "accepted", [3, "ab", [1.5, 2], ["a", 1], [None, None], [[0], 1], [[0.5], [0]], {}]
)
def test_accepted_are_counts_or_paths(cache: Cache, accepted: Any) -> None:
    pair = cache.open(2)
    step = cache.extend(pair, [3, 2])
    refused(cache, lambda: cache.commit(step, accepted), BooksError, "accepted: got ")
    assert cache.commit(step, [2, 0]).accepted is not None


def test_handles_are_what_open_returned(cache: Cache) -> None:
    (one,) = cache.open()
    wrongs: list[Any] = [one, [None], [1], None, [(1,)], "ab"]
    for wrong in wrongs:
        refused(cache, lambda given=wrong: cache.close(given), BooksError, "sequences")  # type: ignore[misc]
    cache.close([one])


def test_segments_are_what_hold_returned(cache: Cache) -> None:
    (one,) = cache.open()
    cache.commit(cache.extend([one], 8))
    wrongs: list[Any] = [3, [None]]
    for wrong in wrongs:
        refused(cache, lambda given=wrong: cache.open(1, given), BooksError, "prefix")  # type: ignore[misc]
    refused(cache, lambda: cache.release(None), BooksError, "a NoneType")  # type: ignore[arg-type]
    refused(cache, lambda: cache.hold(one, 1.5), BooksError, "tokens: got 1.5")  # type: ignore[arg-type]
    cache.release(cache.hold(one, 8))


# ---- steps -----------------------------------------------------------------------------------


def test_a_step_of_another_cache_is_refused(cache: Cache) -> None:
    other = small_cache()
    steps = [one.extend(one.open(2), [3, 2]) for one in (cache, other)]
    q, k, v = inputs(5)
    before = all_bytes(cache)
    wrong = steps[1]
    graph = cache.graph(batch=2, total=5, tokens=1)
    for call in (
        lambda: cache.attend(0, q, k, v, wrong),
        lambda: cache.write(0, wrong, k=k, v=v),
        lambda: cache.commit(wrong),
        lambda: cache.fill(graph, wrong),
    ):
        refused(cache, call, BooksError, "step: got a step of another cache")
    assert all(map(torch.equal, before, all_bytes(cache)))
    cache.attend(0, q, k, v, steps[0])


def test_a_step_whose_place_is_taken_is_refused(cache: Cache) -> None:
    one = cache.open()
    old = cache.extend(one, 1)
    cache.commit(old)
    for _ in range(2):
        cache.commit(cache.extend(one, 1))
    q, k, v = inputs(1)
    before = all_bytes(cache)
    refused(cache, lambda: cache.attend(0, q, k, v, old), BooksError, "a later step has taken")
    assert all(map(torch.equal, before, all_bytes(cache)))


@pytest.mark.parametrize("wrong", [None, 3, "step"])
def test_what_is_no_step(cache: Cache, wrong: Any) -> None:
    q, k, v = inputs(1)
    refused(cache, lambda: cache.attend(0, q, k, v, wrong), BooksError, "step: got a ")
    refused(cache, lambda: cache.commit(wrong), BooksError, "step: got a ")


# ---- attention -------------------------------------------------------------------------------

Q = torch.zeros(5, 4, 32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "q",
    [
        Q[:4],
        torch.cat((Q, Q)),
        Q.reshape(5, 128),
        Q[:, :3],
        Q[..., :16],
        Q.int(),
        Q.bool(),
        Q.to(torch.complex64),
        Q.to(torch.float8_e4m3fn),
        Q.to("meta"),
        None,
        [1],
    ],
)
def test_queries_fit_the_step_before_anything_is_written(cache: Cache, q: Any) -> None:
    step = cache.extend(cache.open(2), [3, 2])
    _, k, v = inputs(5)
    before = all_bytes(cache)
    refused(cache, lambda: cache.attend(0, q, k, v, step), SpecError, "q: got ")
    assert all(map(torch.equal, before, all_bytes(cache)))


@pytest.mark.parametrize(
    ("layer", "extra", "text"),
    [
        (0, {"mask": torch.ones(3, dtype=torch.bool)}, "need [13]: of each request"),
        (0, {"mask": torch.ones(13)}, "mask: got float32 [13]"),
        (0, {"sinks": torch.ones(4)}, "try model.groups.full.sinks=true"),
        (2, {"sinks": torch.ones(3)}, "sinks: got float32 [3]"),
        (0, {"select": torch.zeros(5, 2)}, "select: got float32 [5, 2]"),
        (0, {"select": torch.zeros(4, 2, dtype=torch.int32)}, "select: got int32 [4, 2]"),
    ],
)
def test_what_comes_with_a_query_fits(cache: Cache, layer: int, extra: Any, text: str) -> None:
    step = cache.extend(cache.open(2), [3, 2])
    q, k, v = inputs(5)
    before = all_bytes(cache)
    refused(cache, lambda: cache.attend(layer, q, k, v, step, **extra), SpecError, text)
    assert all(map(torch.equal, before, all_bytes(cache)))


def test_a_value_without_its_key_is_not_dropped(cache: Cache) -> None:
    step = cache.extend(cache.open(), 5)
    q, _, v = inputs(5)
    refused(cache, lambda: cache.attend(0, q, None, v, step), SpecError, "k and v, or neither")


# ---- gates, graphs, foreign steps --------------------------------------------------------------


def test_gates_and_graphs_of_what_there_is(cache: Cache) -> None:
    refused(cache, lambda: cache.gate([9]), SpecError, "gate(layers): got 9")
    refused(cache, lambda: cache.gate([0]).open(1), SpecError, "need a layer of the gate: 0")
    refused(cache, lambda: cache.graph(batch=1.5), BooksError, "graph(batch=): got 1.5")  # type: ignore[arg-type]
    with pytest.raises(SpecError) as caught:
        cache.graph(batch=0)
    assert "max_requests=0" not in str(caught.value)
    graph = cache.graph(batch=1)
    refused(cache, graph.replay, BooksError, "need capture(run) before it")


@pytest.mark.parametrize(
    ("argument", "wrong"), [("tables", None), ("tables", [1]), ("states", 5), ("cross_tokens", 5)]
)
def test_foreign_ids_come_by_name(cache: Cache, argument: str, wrong: Any) -> None:
    given = {"tables": {"full": [[1]]}, "before": [0], "after": [1], argument: wrong}
    refused(cache, lambda: cache.step(**given), KVFactoryError, f"step({argument}=): got ")


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ([0] * 4, [2**62] * 4, "got 18446744073709551616 new tokens"),
        ([0] * 2, [2**63 - 1] * 2, "new tokens"),
        ([-(2**63)], [2**63 - 1], "new tokens"),
        ([2**31], [2**31], "lengths are int32"),
    ],
)
def test_foreign_lengths_do_not_wrap_around(
    cache: Cache, before: list[int], after: list[int], text: str
) -> None:
    tables = {table.name: [[1, 2, 3]] * len(before) for table in cache.plan.tables}
    refused(cache, lambda: cache.step(tables, before, after), SpecError, text)


def test_foreign_encoder_tokens_are_counted_from_0() -> None:
    cross = {**FULL, "kind": "cross", "layers": "1-1", "encoder_tokens": 8}
    model = {"name": "m", "num_layers": 2, "groups": {"full": FULL | {"layers": [0]}, "x": cross}}
    cache = build(plan_of(model=model))
    tables = {table.name: [[1, 2]] for table in cache.plan.tables}
    call = lambda: cache.step(tables, [0], [1], cross_tokens=[-1])  # noqa: E731
    refused(cache, call, SpecError, "step(cross_tokens): got [-1]")
    cache.step(tables, [0], [1], cross_tokens=[8])


@pytest.mark.parametrize(
    "pages", [[[1.5]], [[1], [2, 3]], None, "a", [["a"]], torch.tensor([[0.5]])]
)
def test_foreign_page_ids_are_integers(cache: Cache, pages: Any) -> None:
    tables = {"full": pages}
    refused(cache, lambda: cache.step(tables, [0], [1]), KVFactoryError, "step(tables['full'])")


def test_foreign_lengths_are_integers(cache: Cache) -> None:
    wrongs: list[Any] = [[0.5], 0, [10**30], None]
    for wrong in wrongs:
        with pytest.raises(BooksError, match=r"step\(before=\): got "):
            cache.step({}, wrong, [1])


def test_a_graph_replays_only_what_it_was_filled_with(cache: Cache) -> None:
    """All graphs of a cache share a set of arrays: the last one filled has them."""
    sequences = cache.open(2)
    steps = [cache.extend(sequences[:1], 1), cache.extend(sequences[1:], 1)]
    graphs = [cache.graph(batch=1) for _ in steps]
    for graph in graphs:
        graph.capture(lambda step: step.rows.tolist())
    for graph, step in zip(graphs, steps, strict=True):
        cache.fill(graph, step)
    assert graphs[1].replay() == steps[1].host.rows.tolist()
    refused(cache, graphs[0].replay, BooksError, "replay(): got arrays of another graph's step")
    cache.fill(graphs[0], steps[0])
    assert graphs[0].replay() == steps[0].host.rows.tolist()
    cache.fill(graphs[1], steps[0])  # a step in graphs of its pieces, all of one shape
    assert graphs[0].replay() == graphs[1].replay()


def test_a_refused_fill_leaves_the_one_before(cache: Cache) -> None:
    one, two = cache.open(2)
    steps = [cache.extend([one], 1), cache.extend([one, two], 1)]
    graph = cache.graph(batch=1)
    graph.capture(lambda step: step.rows.tolist())
    cache.fill(graph, steps[0])
    with pytest.raises(SpecError, match="2 requests"):
        cache.fill(graph, steps[1])
    assert graph.replay() == steps[0].host.rows.tolist()


def test_graphs_are_of_their_own_cache_and_of_functions(cache: Cache) -> None:
    step = cache.extend(cache.open(), 1)
    others = small_cache()
    for graph, got in ((others.graph(batch=1), "one of another cache"), (None, "a NoneType")):
        with pytest.raises(SpecError, match=rf"fill\(graph\): got {got}"):
            cache.fill(graph, step)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"capture\(run\): got a NoneType"):
        cache.graph(batch=1).capture(None)  # type: ignore[arg-type]
