"""Reserved bytes: they hold every plan that FlashInfer may make, and grow with neither batch."""

from __future__ import annotations

from typing import Any

import pytest
from flashinfer_batches import HEADS, ROOMY, group_of, plan_batches
from flashinfer_plans import prefill_plan
from flashinfer_scene import FP8, GROUP, WINDOW, Scene, plan_of

from kvfactory.backends.flashinfer.partials import MOST_BYTES, Grid
from kvfactory.backends.flashinfer.runner import Runner


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "x".join(map(str, heads)))
@pytest.mark.parametrize("quant", ["plain", "fp8_e4m3"])
@pytest.mark.parametrize("window", [None, 1000])
def test_reserved_bytes_hold_every_plan(
    heads: tuple[int, int], quant: str, window: int | None
) -> None:
    """The double refuses what outgrows them, by FlashInfer's own arithmetic."""
    group = group_of(heads)
    if window:
        group = {**group, "kind": "swa", "window_tokens": window}
    kv = {**ROOMY["kv"], "quant": {"k": quant, "v": quant}}
    scene = Scene(plan_of({"main": group}, **{**ROOMY, "kv": kv}))
    assert plan_batches(scene, rounds=12) > 12
    splits = [sizes for key, sizes in scene.double.plans if key.kernel == "fa2" and sizes.split]
    assert any(prefill_plan(sizes, 132).split for sizes in splits)


def test_wide_heads_have_a_block_per_sm_for_decoding() -> None:
    scene = Scene(plan_of({"main": group_of((64, 1), 256)}, **ROOMY))
    runner = scene.parts.runners["main"]
    assert isinstance(runner, Runner)
    grid = runner.scheduler.planner.grid
    assert MOST_BYTES < grid.num_bytes < 5 * MOST_BYTES
    assert 132 <= grid.decode_parts(1, graph=True) <= 264
    plan_batches(scene, rounds=4)


@pytest.mark.parametrize("quant", ["plain", "fp8_e4m3"])
@pytest.mark.parametrize("q_heads", [2, 8, 64])
def test_partial_results_do_not_grow_with_requests(q_heads: int, quant: str) -> None:
    kv = {"quant": {"k": quant, "v": quant}}
    found = [
        partial_bytes({**GROUP, "q_heads": q_heads}, kv=kv, engine={"max_requests": requests})
        for requests in (6, 600, 6000)
    ]
    assert found[0] == found[1] == found[2]


def partial_bytes(group: dict[str, Any], **options: Any) -> int:
    plan = plan_of({"main": group}, **options)
    found = [space.num_bytes for space in plan.workspaces if space.use == "partial results"]
    return found[0] if found else 0


def test_nothing_is_split_and_nothing_kept_for_it_in_deterministic_mode() -> None:
    assert partial_bytes(GROUP, backend={"deterministic": True}) == 0


def test_blocks_that_are_kept_from_flashinfer_bound_the_parts() -> None:
    plan = plan_of({"main": {**GROUP, "q_heads": 64, "kv_heads": 2}}, kv={"quant": FP8})
    runner = Scene(plan).parts.runners["main"]
    assert isinstance(runner, Runner)
    shape = runner.scheduler.shape
    small = Grid(shape, 132, 20 * 64 * 64 * 4 * 65)
    assert small.decode_parts(3, graph=False) == 20
    assert (2 * 132 - small.idle_blocks(20)) // 2 == 20
    assert small.decode_parts(20, graph=False) == 0
    assert small.decode_parts(14, graph=True) == 0


def test_whole_decodes_are_planned_once_for_any_lengths() -> None:
    """With as many requests as thread blocks nothing is split, so a plan names no lengths."""
    groups = {
        "full": {**GROUP, "q_heads": 16, "kv_heads": 4},
        "local": {**WINDOW, "q_heads": 16, "kv_heads": 4, "layers": "2-3"},
    }
    workload = {"requests": 140, "tokens": 200}
    engine = {"max_requests": 140, "prefill_chunk_tokens": 14000}
    scene = Scene(plan_of(groups, workload=workload, engine=engine))
    sequences = scene.cache.open(140)
    scene.advance(sequences, [1 + n % 30 for n in range(140)])
    before = len(scene.double.plans)
    for _ in range(5):
        scene.advance(sequences, [1] * 140)
    made = scene.double.plans[before:]
    assert len(made) == 2 * scene.plan.limits.steps_in_flight
    assert not any(sizes.split or sizes.graph for _, sizes in made)
