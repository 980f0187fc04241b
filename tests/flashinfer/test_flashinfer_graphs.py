"""Graphs and plans over the double: padding, reuse, buffers that are shared, two open steps."""

from __future__ import annotations

from typing import Any

import pytest
from flashinfer_scene import FP8, GROUP, LATENT, WINDOW, Scene, close, plan_of
from torch import Tensor

from kvfactory.cache.graphs import Graph
from kvfactory.errors import SpecError
from kvfactory.steps.step import Step

HYBRID = {"full": GROUP, "local": {**WINDOW, "layers": "2-3"}}


class Model:
    """Inputs at fixed addresses, and a function of a graph's step that attends in every group."""

    def __init__(self, scene: Scene, rows: int) -> None:
        self.scene = scene
        self.inputs = {g.name: scene.inputs(g, rows) for g in scene.plan.groups}

    def __call__(self, step: Step) -> dict[str, Tensor]:
        return {
            group.name: self.scene.cache.attend(group.layers[0], *self.inputs[group.name], step)
            for group in self.scene.plan.groups
        }

    def set(self, tokens: int) -> None:
        """Fresh values for the first ``tokens`` rows; old ones stay behind them."""
        for group in self.scene.plan.groups:
            for old, new in zip(
                self.inputs[group.name], self.scene.inputs(group, tokens), strict=True
            ):
                if old is not None and new is not None:
                    old[:tokens] = new


def captured(
    scene: Scene, batch: int, tokens: int = 1, total: int | None = None
) -> tuple[Graph, Model]:
    graph = scene.graph(batch, tokens, total)
    model = Model(scene, graph.shape.rows)
    graph.capture(model)
    return graph, model


def replayed(scene: Scene, graph: Graph, model: Model, step: Step, tokens: int) -> None:
    """One replay against the oracle."""
    model.set(tokens)
    scene.cache.fill(graph, step)
    found = graph.replay()
    for group in scene.plan.groups:
        q, k, v = (None if x is None else x[:tokens] for x in model.inputs[group.name])
        wanted = scene.oracle(group, q, k, v, step)
        close(found[group.name][:tokens], wanted, scene.tolerance())


@pytest.mark.parametrize("quant", ["plain", "fp8_e4m3"])
def test_decode_replays_padded_and_with_fewer_requests_than_before(quant: str) -> None:
    scene = Scene(plan_of(HYBRID, kv={"quant": {"k": quant, "v": quant}}))
    cache = scene.cache
    sequences = cache.open(4)
    scene.advance(sequences, [60, 7, 8, 25])
    graph, model = captured(scene, 4)
    for some in ([0, 1, 2, 3], [2], [1, 3], [0, 1, 2, 3], [3], [0]):
        step = cache.extend([sequences[n] for n in some], 1)
        replayed(scene, graph, model, step, len(some))
        cache.commit(step)


def test_graphs_of_several_sizes_take_turns() -> None:
    scene = Scene(plan_of(HYBRID))
    cache = scene.cache
    sequences = cache.open(4)
    scene.advance(sequences, [30, 7, 8, 25])
    graphs = {size: captured(scene, size) for size in (1, 2, 4)}
    for size in (4, 1, 2, 1, 4, 4, 2):
        step = cache.extend(sequences[:size], 1)
        replayed(scene, *graphs[size], step, size)
        cache.commit(step)


@pytest.mark.parametrize("groups", [HYBRID, {"full": LATENT}], ids=["hybrid", "latent"])
def test_verification_and_whole_prefills_in_graphs(groups: dict[str, Any]) -> None:
    scene = Scene(plan_of(groups, engine={"draft_tokens": 3}))
    cache = scene.cache
    sequences = cache.open(3)
    prefill, model = captured(scene, 4, total=120)
    for counts in ([60, 1, 30], [5, 0, 1], [1, 1, 1]):
        step = cache.extend(sequences, counts)
        replayed(scene, prefill, model, step, sum(counts))
        cache.commit(step)
    verify, model = captured(scene, 4, tokens=3)
    for some in (3, 1, 2):
        step = cache.extend(sequences[:some], 3)
        replayed(scene, verify, model, step, 3 * some)
        cache.commit(step)


def test_what_a_graph_does_not_hold_is_refused() -> None:
    scene = Scene(plan_of(HYBRID))
    graph, _ = captured(scene, 2)
    sequences = scene.cache.open(3)
    step = scene.cache.extend(sequences, [1, 1, 1])
    with pytest.raises(SpecError, match="at most the graph's 2"):
        scene.cache.fill(graph, step)
    scene.cache.commit(step)
    step = scene.cache.extend(sequences[:1], 2)
    with pytest.raises(SpecError, match="the graph's 1 each"):
        scene.cache.fill(graph, step)
    for wrong in ({"batch": 7}, {"batch": 0}, {"batch": 2, "total": 100_000}):
        with pytest.raises(SpecError, match="as planned"):
            scene.cache.graph(**wrong)


def test_constants_set_after_capture_are_refused() -> None:
    scene = Scene(plan_of({"full": GROUP}, kv={"quant": FP8}))
    graph, _ = captured(scene, 2)
    sequences = scene.cache.open(1)
    scene.pools["full"].set_constants({(0, "k", "scale"): 0.5})
    step = scene.cache.extend(sequences, 1)
    with pytest.raises(SpecError, match="older constants"):
        scene.cache.fill(graph, step)
    scene.check(step, 1)


def test_two_open_steps_keep_their_plans() -> None:
    scene = Scene(plan_of(HYBRID))
    cache = scene.cache
    sequences = cache.open(3)
    scene.advance(sequences, [40, 9, 3])
    for _ in range(3):
        first = cache.extend(sequences, 1)
        scene.check(first, 3)
        group = scene.plan.groups[0]
        inputs = scene.inputs(group, 3)
        cache.attend(group.layers[0], *inputs, first)
        second = cache.extend(sequences, [2, 1, 1])
        scene.check(second, 4)
        found = cache.attend(group.layers[0], inputs[0], None, None, first)
        close(found, scene.oracle(group, *inputs, first), 5e-3)
        cache.commit(first)
        cache.commit(second)


# ---- plans -----------------------------------------------------------------------------------


def test_groups_of_equal_shape_share_one_plan_a_step() -> None:
    recipes = {"ends": {"layers": [0, 3], "quant": {"k": "plain", "v": "plain"}}}
    scene = Scene(plan_of({"full": {**GROUP, "layers": "0-3"}}, kv={"recipes": recipes}))
    assert len(scene.plan.groups) == 2
    step = scene.cache.extend(scene.cache.open(2), [20, 3])
    assert not scene.double.plans
    scene.check(step, 23)
    scene.check(step, 23)
    assert len(scene.double.plans) == 1


def test_decode_plans_are_used_again_while_requests_grow() -> None:
    scene = Scene(plan_of({"full": GROUP}))
    cache = scene.cache
    sequences = cache.open(3)
    scene.advance(sequences, [70, 9, 30])
    before = len(scene.double.plans)
    for _ in range(32):
        step = cache.extend(sequences, 1)
        scene.check(step, 3)
        cache.commit(step)
    made = len(scene.double.plans) - before
    assert 2 <= made <= 12
    key, sizes = scene.double.plans[-1]
    assert key.kernel == "fa2"
    assert sizes.split
    assert sizes.rows == 3


def test_plans_take_host_lengths_and_windows_begin_where_pages_are_owned() -> None:
    scene = Scene(plan_of({"local": WINDOW}))
    cache = scene.cache
    sequences = cache.open(1)
    scene.advance(sequences, [100])
    step = cache.extend(sequences, 5)
    scene.begin(step)
    first = int(step.host.tables["local"].first_page[0])
    assert first == (100 - 23) // 8
    key, sizes = scene.double.plans[-1]
    assert (key.kernel, sizes.window_left, sizes.causal) == ("fa3", 23, True)
    assert sizes.kv_tokens.tolist() == [105 - 8 * first]
    assert sizes.kv_indptr.tolist() == [0, 14 - first]
    assert sizes.q_indptr.tolist() == [0, 5]
    lists = step.tables["local"].lists
    assert lists is not None
    pages = step.tables["local"].pages[int(step.rows[0]), first:14]
    assert lists.indices[: 14 - first].tolist() == pages.tolist()
    assert lists.last_page.tolist() == [1]


def test_steps_that_a_graph_replays_are_not_planned_by_themselves() -> None:
    scene = Scene(plan_of({"full": GROUP}))
    sequences = scene.cache.open(2)
    scene.advance(sequences, [20, 3])
    graph, model = captured(scene, 2)
    before = len(scene.double.plans)
    for _ in range(3):
        step = scene.cache.extend(sequences, 1)
        replayed(scene, graph, model, step, 2)
        scene.cache.commit(step)
    assert all(sizes.graph for _, sizes in scene.double.plans[before:])


def test_a_foreign_step_is_not_taken_for_one_with_its_number() -> None:
    scene = Scene(plan_of({"full": GROUP}))
    cache = scene.cache
    (sequence,) = cache.open(1)
    scene.advance([sequence], [30])
    cache.close([sequence])
    step = cache.step({"full": [[3, 4, 5, 6]]}, [0], [27])
    assert step.host.serial == 0
    scene.check(step, 27)


# ---- deterministic mode ----------------------------------------------------------------------


def test_deterministic_steps_are_planned_apart_by_their_own_tokens() -> None:
    backend = {"deterministic": True}
    scene = Scene(plan_of(HYBRID, backend=backend))
    scene.turns([(60, 3, 1), (1, 9, 40), (1, 1, 1), (2, 1, 1)])
    assert set(scene.double.kernels()) == {"fa2"}
    assert not any(sizes.split for _, sizes in scene.double.plans)


def test_deterministic_answers_do_not_depend_on_the_batch_or_on_graphs() -> None:
    """By the tile that each launch is planned with, which is all that may vary."""
    scene = Scene(plan_of({"full": GROUP}, backend={"deterministic": True}))
    cache = scene.cache
    sequences = cache.open(3)
    scene.advance(sequences, [50, 9, 3])
    step = cache.extend(sequences, [1, 1, 30])
    scene.begin(step)
    tiles = [tile_of(sizes) for _, sizes in scene.double.plans[-2:]]
    assert tiles == [16, 128]
    scene.check(step, 32)
    cache.commit(step)
    graph, model = captured(scene, 3)
    assert tile_of(scene.double.plans[-1][1]) == 16
    step = cache.extend(sequences[:2], 1)
    replayed(scene, graph, model, step, 2)
    assert tile_of(scene.double.plans[-1][1]) == 16


def tile_of(sizes: Any) -> int:
    """FlashInfer's query tile for a plan (PrefillSplitQOKVIndptr)."""
    batch, group = len(sizes.kv_tokens), sizes.q_heads // sizes.kv_heads
    longest = sizes.rows - batch + 1 if sizes.graph else int(sizes.q_indptr[-1]) // batch
    packed = longest * group
    return 128 if packed > 64 and sizes.v_dim < 256 else 64 if packed > 16 else 16
