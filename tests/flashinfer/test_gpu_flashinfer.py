"""FlashInfer's kernels on a Hopper GPU against the oracle over the same pool.

At most ten modules are compiled (``MODULES``); all other axes vary at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from flashinfer_batches import HEADS, ROOMY, group_of, plan_batches
from flashinfer_card import FULL, HYBRID, LOCAL, LONG, Groups, on_hopper, scene_of
from flashinfer_scene import FP8, LATENT, Scene, close, relative_error
from test_flashinfer_graphs import captured, replayed

from kvfactory.backends.flashinfer.calls import Library
from kvfactory.backends.flashinfer.choose import ModuleKey
from kvfactory.steps.step import Step

pytestmark = pytest.mark.gpu

BF16, E4M3 = "bfloat16", "float8_e4m3fn"
MODULES = [
    *(ModuleKey("fa2", BF16, BF16, 128, 128, w, False) for w in (False, True)),
    *(ModuleKey("fa3", BF16, BF16, 128, 128, w, False) for w in (False, True)),
    *(ModuleKey("fa2", BF16, E4M3, 128, 128, w, False) for w in (False, True)),
    ModuleKey("cuda_cores", BF16, BF16, 128, 128, False, False),
    ModuleKey("xqa", BF16, E4M3, 128, 128, False, False, page_tokens=16, group=4),
    ModuleKey("mla_fa3", BF16, BF16, 512, 64, False, False),
    ModuleKey("fa2", BF16, BF16, 256, 256, False, False),
]

MODELS: dict[str, Groups] = {"full": {"full": FULL}, "window": {"local": LOCAL}, "hybrid": HYBRID}
QUANTS = {"bf16": {"k": "plain", "v": "plain"}, "fp8": FP8}
LAYOUTS = ["nhd", "hnd", "paged_kv", "page_major", "token_major", "record"]


@pytest.fixture(scope="session")
def library() -> Library:
    return on_hopper(MODULES)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("quant", list(QUANTS))
def test_layouts_and_pages(library: Library, quant: str, page_tokens: int, layout: str) -> None:
    kv = {"layout": layout, "page_tokens": page_tokens, "quant": QUANTS[quant]}
    scene_of(library, HYBRID, kv=kv).turns(LONG)


@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 2000])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("quant", list(QUANTS))
@pytest.mark.parametrize("backend", [{}, {"new_tokens": "exact"}], ids=["stored", "exact"])
def test_prefixes(
    library: Library, backend: dict[str, Any], quant: str, model: str, prefix: int
) -> None:
    kv = {"page_tokens": 16, "quant": QUANTS[quant]}
    first = [(prefix, 3, prefix)] if prefix else []
    later = [(9, 1, 4), (1, 1, 1), (64, 64, 64), (300, 30, 2), (5, 5, 5)]
    scene_of(library, MODELS[model], kv=kv, backend=backend).turns([*first, *later])


@pytest.mark.parametrize("model", list(MODELS))
def test_ragged_prefill_of_plain_storage(library: Library, model: str) -> None:
    backend = {"prefill": "ragged"}
    scene_of(library, MODELS[model], backend=backend).turns([(500, 5, 1), (40, 1, 20), (1, 1, 1)])


def eager_and_in_a_graph(scene: Scene) -> None:
    """Long turns, then decodes of 3, 1 and 2 requests by a graph of 4."""
    scene.turns(LONG)
    sequences = scene.cache.open(3)
    scene.advance(sequences, [700, 3, 64])
    graph, model = captured(scene, 4)
    for some in (3, 1, 2):
        step = scene.cache.extend(sequences[:some], 1)
        replayed(scene, graph, model, step, some)
        scene.cache.commit(step)


@pytest.mark.parametrize("quant", list(QUANTS))
def test_decode_graphs_padded_and_smaller_than_before(library: Library, quant: str) -> None:
    scene = scene_of(library, HYBRID, kv={"page_tokens": 16, "quant": QUANTS[quant]})
    cache = scene.cache
    sequences = cache.open(4)
    scene.advance(sequences, [2000, 7, 16, 255])
    graph, model = captured(scene, 4)
    small, small_model = captured(scene, 2)
    assert graph.captured
    for some in ([0, 1, 2, 3], [2], [1, 3], [0, 1, 2, 3], [3], [0]):
        step = cache.extend([sequences[n] for n in some], 1)
        replayed(scene, graph, model, step, len(some))
        cache.commit(step)
        step = cache.extend([sequences[some[0]]], 1)
        replayed(scene, small, small_model, step, 1)
        cache.commit(step)


@pytest.mark.parametrize("quant", list(QUANTS))
def test_verification_and_whole_prefills_in_graphs(library: Library, quant: str) -> None:
    kv = {"page_tokens": 16, "quant": QUANTS[quant]}
    scene = scene_of(library, HYBRID, kv=kv, engine={"draft_tokens": 3})
    cache = scene.cache
    sequences = cache.open(3)
    prefill, model = captured(scene, 4, total=700)
    for counts in ([500, 1, 90], [5, 0, 1], [1, 1, 1], [130, 40, 129]):
        step = cache.extend(sequences, counts)
        replayed(scene, prefill, model, step, sum(counts))
        cache.commit(step)
    verify, model = captured(scene, 4, tokens=4)
    for some in (3, 1, 2):
        step = cache.extend(sequences[:some], 4)
        replayed(scene, verify, model, step, 4 * some)
        cache.commit(step)


def test_latent_attention(library: Library) -> None:
    scene = scene_of(library, {"full": {**LATENT, "q_heads": 16}}, kv={"page_tokens": 16})
    eager_and_in_a_graph(scene)


def test_latent_records_through_a_copy(library: Library) -> None:
    kv = {"page_tokens": 64, "quant": {"latent": "fp8_tile128"}, "layout": "record"}
    backend = {"options": {"dequantize": True}}
    group = {**LATENT, "q_heads": 16}
    scene_of(library, {"full": group}, kv=kv, backend=backend).turns(LONG)


def test_four_bits_through_a_copy(library: Library) -> None:
    kv = {"page_tokens": 16, "quant": {"k": "nvfp4", "v": "int8_token_head"}}
    scene_of(library, HYBRID, kv=kv, backend={"options": {"dequantize": True}}).turns(LONG)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "page_major"])
def test_xqa(library: Library, layout: str) -> None:
    kv = {"page_tokens": 16, "quant": FP8, "layout": layout}
    scene = scene_of(library, {"full": FULL}, kv=kv, backend={"accuracy": "fast"})
    eager_and_in_a_graph(scene)


@pytest.mark.parametrize("sm", [80, 90])
def test_head_dim_256(library: Library, sm: int) -> None:
    """By fa2, for decode and prefill; on Hopper as in deterministic mode."""
    backend = {"deterministic": sm == 90}
    group = {**FULL, "head_dim": 256}
    kv = {"page_tokens": 16}
    scene = scene_of(library, {"full": group}, kv=kv, backend=backend, device={"sm": sm})
    eager_and_in_a_graph(scene)


def test_cross_attention(library: Library) -> None:
    cross = {**FULL, "kind": "cross", "encoder_tokens": 400}
    scene = scene_of(library, {"full": FULL, "cross": cross}, kv={"page_tokens": 16})
    sequences = scene.cache.open(2, cross_tokens=[130, 400])
    group = scene.plan.by_name["cross"]
    for number, counts in enumerate(([60, 300], [1, 1], [5, 1])):
        step = scene.cache.extend(sequences, counts)
        _, k, v = scene.inputs(group, 530)
        q = scene.normal(sum(counts), 8, 128)
        new = (None, None) if number else (k, v)
        found = scene.cache.attend(0, q, *new, step, group="cross")
        close(found, scene.oracle(group, q, k, v, step), 5e-3)
        scene.cache.commit(step)


@pytest.mark.parametrize("change", [{"v_head_dim": 0}, {"causal": False}], ids=["k", "both"])
@pytest.mark.parametrize("quant", list(QUANTS))
def test_keys_alone_and_both_directions(
    library: Library, quant: str, change: dict[str, Any]
) -> None:
    kv = {"page_tokens": 16, "quant": QUANTS[quant]}
    scene_of(library, {"full": {**FULL, **change}}, kv=kv).turns(LONG)


@pytest.mark.parametrize("requests", [30, 140])
@pytest.mark.parametrize("quant", list(QUANTS))
def test_many_requests_split_or_whole(library: Library, quant: str, requests: int) -> None:
    """Fewer requests than blocks are split over keys; others keep one plan whatever they grow to.

    A graph of one size, and eager steps, while most requests stay away for some steps.
    """
    heads = {"q_heads": 32, "kv_heads": 8}
    groups = {name: {**group, **heads} for name, group in HYBRID.items()}
    workload = {"requests": requests, "tokens": 700}
    engine = {"max_requests": requests, "prefill_chunk_tokens": 8192}
    kv = {"page_tokens": 16, "quant": QUANTS[quant]}
    scene = scene_of(library, groups, kv=kv, workload=workload, engine=engine)
    cache = scene.cache
    sequences = cache.open(requests)
    scene.advance(sequences, [1 + 37 * n % 50 for n in range(requests)])
    for _ in range(5):
        scene.advance(sequences[:10], [100] * 10)
    graph, model = captured(scene, requests)
    for some in (requests, 7, requests, requests // 2):
        step = cache.extend(sequences[:some], 1)
        replayed(scene, graph, model, step, some)
        cache.commit(step)
        scene.advance(sequences[:some], [1] * some)


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: "x".join(map(str, heads)))
@pytest.mark.parametrize("quant", list(QUANTS))
def test_reserved_bytes_hold_every_plan(
    library: Library, quant: str, heads: tuple[int, int]
) -> None:
    """FlashInfer's own planners raise when a workspace is too small."""
    kv = {**ROOMY["kv"], "quant": QUANTS[quant]}
    options = {**ROOMY, "kv": kv, "workload": {"requests": 4, "tokens": 160}}
    scene = scene_of(library, {"main": group_of(heads)}, **options)
    assert plan_batches(scene, rounds=12) > 12


def test_the_accuracy_class_of_xqa(library: Library) -> None:
    """Over many rows of N(0, 1)."""
    kv = {"page_tokens": 16, "quant": FP8}
    workload = {"requests": 32, "tokens": 1100}
    options = {"kv": kv, "workload": workload, "engine": {"max_requests": 32}}
    scene = scene_of(library, {"full": FULL}, backend={"accuracy": "fast"}, **options)
    sequences = scene.cache.open(32)
    for first in range(0, 32, 4):
        scene.advance(sequences[first : first + 4], [1000] * 4)
    step, group = scene.cache.extend(sequences, 1), scene.plan.groups[0]
    q, k, v = scene.inputs(group, 32)
    found = scene.cache.attend(0, q, k, v, step)
    error = relative_error(found, scene.oracle(group, q, k, v, step))
    assert 1e-2 < error < 4e-2


def test_cuda_cores(library: Library) -> None:
    scene = scene_of(library, {"full": {**FULL, "q_heads": 4}}, kv={"page_tokens": 16})
    scene.turns(LONG)
    assert scene.cache.plan.groups[0].work.q_heads == 4


def test_sinks_centers_and_trees(library: Library) -> None:
    centered = {"name": "fp8_e4m3", "options": {"center": True}}
    kv = {"page_tokens": 16, "quant": {"k": centered, "v": centered}}
    groups = {name: {**group, "sinks": True} for name, group in HYBRID.items()}
    scene = scene_of(library, groups, kv=kv, engine={"draft_tokens": 4})
    sequences = scene.cache.open(2)
    for counts in ([500, 9], [1, 1], [40, 3]):
        step = scene.cache.extend(sequences, counts)
        scene.check(step, sum(counts), sinks=torch.randn(8, device="cuda"))
        scene.cache.commit(step)
    parents = [-1, 0, 0, 1, -1, 0, 1, 1, 2]
    step = scene.cache.extend(sequences, [4, 5], parents=parents)
    mask = tree_mask(parents, [4, 5], [541, 13])
    scene.check(step, 9, mask=mask, sinks=torch.randn(8, device="cuda"))


def tree_mask(parents: Sequence[int], counts: Sequence[int], prefixes: Sequence[int]) -> Any:
    pieces, at = [], 0
    for count, prefix in zip(counts, prefixes, strict=True):
        seen = torch.zeros(count, prefix + count, dtype=torch.bool)
        seen[:, :prefix] = True
        for node, parent in enumerate(parents[at : at + count]):
            if parent >= 0:
                seen[node] |= seen[parent]
            seen[node, prefix + node] = True
        pieces.append(seen.flatten())
        at += count
    return torch.cat(pieces).cuda()


def test_two_open_steps(library: Library) -> None:
    scene = scene_of(library, HYBRID, kv={"page_tokens": 16})
    cache, group = scene.cache, scene.plan.groups[0]
    sequences = cache.open(3)
    scene.advance(sequences, [400, 9, 3])
    for _ in range(3):
        first = cache.extend(sequences, 1)
        scene.check(first, 3)
        inputs = scene.inputs(group, 3)
        cache.attend(group.layers[0], *inputs, first)
        second = cache.extend(sequences, [2, 1, 1])
        scene.check(second, 4)
        found = cache.attend(group.layers[0], inputs[0], None, None, first)
        close(found, scene.oracle(group, *inputs, first), 5e-3)
        cache.commit(first)
        cache.commit(second)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_deterministic_bits(library: Library, head_dim: int) -> None:
    """A request's answers are the same bits alone, in any company, and in a graph."""
    group = {**FULL, "head_dim": head_dim}
    scene = scene_of(
        library, {"full": group}, kv={"page_tokens": 16}, backend={"deterministic": True}
    )
    cache = scene.cache
    sequences = cache.open(4)
    scene.advance(sequences, [1500, 40, 700, 3])
    q, k, v = scene.inputs(scene.plan.groups[0], 41)

    def first_rows(step: Step, rows: int) -> torch.Tensor:
        return cache.attend(0, q[:rows], k[:rows], v[:rows], step)[:1].clone()

    def undone(some: Sequence[Any], counts: Sequence[int]) -> torch.Tensor:
        step = cache.extend(some, counts)
        found = first_rows(step, sum(counts))
        cache.commit(step, [0] * len(counts))
        return found

    alone = undone(sequences[:1], [1])
    for some, counts in (([0, 1], [1, 1]), ([0, 1, 2, 3], [1, 1, 1, 1]), ([0, 3, 2], [1, 30, 5])):
        assert torch.equal(alone, undone([sequences[n] for n in some], counts))
    graph = cache.graph(4)
    inputs = [x[:4].clone() for x in (q, k, v)]
    graph.capture(lambda step: cache.attend(0, *inputs, step))
    step = cache.extend(sequences[:3], 1)
    cache.fill(graph, step)
    assert torch.equal(alone, graph.replay()[:1])
    cache.commit(step)
