"""What is handed to FlashInfer, checked by what it makes of it: a double against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flashinfer_scene import FP8, GROUP, LATENT, WINDOW, Scene, close, plan_of

from kvfactory.errors import BooksError, SpecError

HYBRID = {"full": GROUP, "local": {**WINDOW, "layers": "2-3"}}
MODELS: dict[str, dict[str, Any]] = {
    "full": {"full": GROUP},
    "window": {"local": WINDOW},
    "hybrid": HYBRID,
}
PREFIXES = [0, 1, 7, 8, 9, 70]
SELECTION, MASK = torch.zeros(1, 4, dtype=torch.int32), torch.ones(1, dtype=torch.bool)


@pytest.mark.parametrize(
    "layout", ["nhd", "hnd", "paged_kv", "page_major", "token_major", "record"]
)
@pytest.mark.parametrize("page_tokens", [1, 8, 16])
def test_layouts_and_pages(layout: str, page_tokens: int) -> None:
    kv = {"layout": layout, "page_tokens": page_tokens, "quant": FP8}
    Scene(plan_of(HYBRID, kv=kv)).turns([(5, 40, 1), (1, 1, 1), (30, 1, 2), (1, 1, 1)])


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("quant", ["plain", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("model", list(MODELS))
def test_prefixes(model: str, quant: str, prefix: int) -> None:
    kv = {"quant": {"k": quant, "v": quant}}
    first = [(prefix, 3, prefix)] if prefix else []
    Scene(plan_of(MODELS[model], kv=kv)).turns([*first, (9, 1, 4), (1, 1, 1), (40, 30, 2)])


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("model", list(MODELS))
def test_exact_new_tokens_are_merged_with_the_stored_prefix(model: str, prefix: int) -> None:
    kv = {"quant": FP8}
    first = [(prefix, prefix, prefix)] if prefix else []
    scene = Scene(plan_of(MODELS[model], kv=kv, backend={"new_tokens": "exact"}))
    scene.turns([*first, (9, 9, 9), (1, 1, 1), (30, 2, 25), (3, 26, 1)])
    assert "fa3" in scene.double.kernels()


@pytest.mark.parametrize("model", list(MODELS))
def test_ragged_prefill_of_plain_storage(model: str) -> None:
    scene = Scene(plan_of(MODELS[model], backend={"prefill": "ragged"}))
    scene.turns([(30, 5, 1), (40, 1, 20), (1, 1, 1)])
    ragged = [lists is None for _, _, lists in scene.double.calls]
    assert any(ragged)
    assert not all(ragged)


@pytest.mark.parametrize("quant", ["plain", "fp8_e4m3"])
def test_centers(quant: str) -> None:
    centered = {"name": quant, "options": {"center": True}}
    scene = Scene(plan_of(HYBRID, kv={"quant": {"k": centered, "v": centered}}))
    scene.turns([(30, 5, 1), (1, 1, 1)])


def test_centers_reach_the_merge_and_the_sinks() -> None:
    centered = {"name": "fp8_e4m3", "options": {"center": True}}
    groups = {"full": {**GROUP, "sinks": True}}
    kv = {"quant": {"k": centered, "v": centered}}
    for backend in ({}, {"new_tokens": "exact"}):
        scene = Scene(plan_of(groups, kv=kv, backend=backend))
        sequences = scene.cache.open(2)
        for counts in ([20, 9], [3, 5], [1, 1]):
            step = scene.cache.extend(sequences, counts)
            scene.check(step, sum(counts), sinks=torch.randn(8))
            scene.cache.commit(step)


def test_soft_cap_and_sinks() -> None:
    groups = {
        "full": {**GROUP, "soft_cap": 5.0},
        "local": {**WINDOW, "layers": "2-3", "sinks": True},
    }
    scene = Scene(plan_of(groups))
    sequences = scene.cache.open(2)
    for counts in ([40, 9], [1, 1]):
        step = scene.cache.extend(sequences, counts)
        for group in scene.plan.groups:
            q, k, v = scene.inputs(group, sum(counts))
            extra = {"sinks": torch.randn(8)} if group.work.sinks else {}
            found = scene.cache.attend(group.layers[0], q, k, v, step, **extra)
            close(found, scene.oracle(group, q, k, v, step, **extra), 5e-3)
        scene.cache.commit(step)


def test_keys_alone_and_both_directions() -> None:
    groups = {
        "full": {**GROUP, "v_head_dim": 0},
        "both": {**GROUP, "layers": "2-3", "causal": False},
    }
    Scene(plan_of(groups)).turns([(30, 5), (1, 1), (9, 2)])


def test_cross_attention() -> None:
    cross = {**GROUP, "kind": "cross", "encoder_tokens": 40, "layers": "0-1"}
    scene = Scene(plan_of({"full": GROUP, "cross": cross}))
    sequences = scene.cache.open(2, cross_tokens=[13, 40])
    group = scene.plan.by_name["cross"]
    for number, counts in enumerate(([6, 3], [1, 1])):
        step = scene.cache.extend(sequences, counts)
        q, k, v = scene.inputs(group, 53)
        q = scene.normal(sum(counts), 8, 64)
        if number:
            k = v = None
        found = scene.cache.attend(0, q, k, v, step, group="cross")
        close(found, scene.oracle(group, q, k, v, step), 5e-3)
        scene.cache.commit(step)


@pytest.mark.parametrize("sm", [80, 90])
def test_latent_attention(sm: int) -> None:
    scene = Scene(plan_of({"full": LATENT}, device={"sm": sm}))
    scene.turns([(30, 5, 1), (1, 1, 1), (4, 1, 20)])
    assert set(scene.double.kernels()) == {"mla_fa3" if sm == 90 else "mla_fa2"}


@pytest.mark.parametrize("group", [GROUP, WINDOW, LATENT], ids=["full", "window", "latent"])
def test_formats_that_it_cannot_read_go_through_a_copy(group: dict[str, Any]) -> None:
    quant = {"k": "int8_token_head", "v": "fp8_e4m3_token_head", "latent": "fp8_tile128"}
    kv = {"quant": quant, "layout": "nhd"}
    plan = plan_of({"full": group}, kv=kv, backend={"options": {"dequantize": True}})
    assert any(row.what == "workspace dequantized" for row in plan.rows)
    Scene(plan).turns([(30, 5, 1), (1, 1, 1), (40, 1, 2)])


def test_xqa_decodes_eight_bits_where_fast_is_accepted() -> None:
    kv = {"quant": FP8, "page_tokens": 16}
    scene = Scene(plan_of(HYBRID, kv=kv, backend={"accuracy": "fast"}))
    scene.turns([(30, 5, 1), (1, 1, 1), (40, 1, 2), (1, 1, 1)])
    assert scene.double.kernels().count("xqa") == 4


def test_a_kernel_overlaps_none_that_may_have_made_its_lists() -> None:
    """FlashInfer's kernels read lists before they wait for the kernel before them."""
    scene = Scene(plan_of({"full": {**GROUP, "layers": "0-1"}}))
    cache, (group,) = scene.cache, scene.plan.groups
    step = cache.extend(cache.open(1), 9)
    for layer in (0, 1):
        q, k, v = scene.inputs(group, 9)
        cache.attend(layer, q, k, v, step)
    cache.attend(1, q, None, None, step)
    visible = torch.ones(81, dtype=torch.bool)
    cache.attend(1, q, None, None, step, mask=visible)
    cache.commit(step)
    graph = scene.graph(1)
    inputs = scene.inputs(group, 1)
    graph.capture(lambda step: cache.attend(0, *inputs, step))
    calls = [call for _, call, _ in scene.double.calls]
    assert [call.overlap for call in calls] == [False, True, True, False, True, True]


def test_small_groups_decode_on_cuda_cores() -> None:
    scene = Scene(plan_of({"full": {**GROUP, "q_heads": 4}}))
    scene.turns([(30, 5, 1), (1, 1, 1), (4, 2, 1)])
    assert scene.double.kernels() == ["fa3", "cuda_cores", "fa3"]


@pytest.mark.parametrize("model", list(MODELS))
def test_draft_trees(model: str) -> None:
    scene = Scene(plan_of(MODELS[model], engine={"draft_tokens": 4}))
    sequences = scene.cache.open(2)
    step = scene.cache.extend(sequences, [50, 11])
    scene.check(step, 61)
    scene.cache.commit(step)
    parents = [-1, 0, 0, 1, -1, 0, 1, 1, 2]
    step = scene.cache.extend(sequences, [4, 5], parents=parents)
    pieces = []
    for tree, prefix in ((parents[:4], 50), (parents[4:], 11)):
        seen = torch.zeros(len(tree), prefix + len(tree), dtype=torch.bool)
        seen[:, :prefix] = True
        for node, parent in enumerate(tree):
            if parent >= 0:
                seen[node] |= seen[parent]
            seen[node, prefix + node] = True
        pieces.append(seen.flatten())
    scene.check(step, 9, mask=torch.cat(pieces))


@pytest.mark.parametrize(
    ("model", "place", "extra", "error", "got"),
    [
        (GROUP, "decided", {"select": SELECTION}, SpecError, "a selection"),
        (LATENT, "decided", {"mask": MASK}, SpecError, "a mask"),
        (GROUP, "undecided", {"mask": MASK}, BooksError, "a mask over undecided lengths"),
        (GROUP, "graph", {"mask": MASK}, BooksError, "a mask in a graph"),
    ],
)
def test_what_no_kernel_takes_is_refused_before_anything_is_written(
    model: dict[str, Any], place: str, extra: dict[str, Any], error: type[Exception], got: str
) -> None:
    scene = Scene(plan_of({"full": model}, engine={"draft_tokens": 2}))
    sequences = scene.cache.open(1)
    step = scene.cache.extend(sequences, 1)
    if place == "undecided":
        step = scene.cache.extend(sequences, 1)
    elif place == "graph":
        graph = scene.graph(1)
        scene.cache.fill(graph, step)
        step = graph.step
    group = scene.plan.groups[0]
    q, k, v = scene.inputs(group, 1)
    region = scene.parts.arena[group.offset :][: group.num_bytes]
    before = region.clone()
    with pytest.raises(error, match=f"got {got}, need"):
        scene.cache.attend(0, q, k, v, step, **extra)
    assert torch.equal(before, region)


def test_empty_steps_and_requests_without_tokens() -> None:
    scene = Scene(plan_of(HYBRID))
    scene.turns([(0, 0), (5, 0), (0, 3), (1, 1), (0, 0), (0, 9)])


def test_latent_plans_refuse_lengths_that_are_not_decided() -> None:
    scene = Scene(plan_of({"full": LATENT}, engine={"draft_tokens": 2}))
    sequences = scene.cache.open(1)
    scene.cache.extend(sequences, 3)
    with pytest.raises(BooksError, match="still open"):
        scene.cache.extend(sequences, 3)
