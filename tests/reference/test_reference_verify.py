"""Verification end to end: built caches of every geometry and format against dense attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_here import this_gpu

from kvfactory.builder import build
from kvfactory.cache import Cache
from kvfactory.planner import plan
from kvfactory.reference import Selector
from kvfactory.spec import Spec
from kvfactory.verify.attention import History, Verdict, Verifier, acceptance
from kvfactory.verify.meter import ErrorMeter, storage_errors
from kvfactory.verify.workload import Workload

GQA: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 128}
MLA: dict[str, Any] = {"geometry": "mla", "q_heads": 4, "kv_lora_rank": 128, "scale": 0.1}


def spec(groups: dict[str, Any], layers: int = 2, **rest: Any) -> Spec:
    model = {"name": "toy", "num_layers": layers, "groups": groups} | rest.pop("model", {})
    kv = {"page_tokens": 8} | rest.pop("kv", {})
    workload = {"requests": 3, "tokens": 96}
    return Spec.parse({"model": model, "kv": kv, "workload": workload} | rest)


def run(cache: Cache, verifier: Verifier, cross: list[int] | None = None) -> None:
    """Three requests: uneven prefills in two chunks, then decodes, in every attention layer."""
    cross_tokens = cross or []
    sequences = cache.open(3, cross_tokens=cross_tokens)
    for new in ([40, 3, 17], [9, 1, 30], *[[1, 1, 1]] * 4):
        step = cache.extend(sequences, new)
        for layer in range(cache.plan.spec.model.num_layers):
            for group in cache.groups(layer):
                given = verifier.inputs(group, layer, step)
                sinks = verifier.workload.sinks(group, layer)
                out = cache.attend(layer, given.q, *given.kv, step, group=group.group, sinks=sinks)
                verifier.compare(group, layer, step, given, out)
        cache.commit(step)


CASES: dict[str, Any] = {
    "full": {"groups": {"main": GQA | {"kind": "full", "layers": "0-1"}}},
    "window": {"groups": {"main": GQA | {"kind": "swa", "layers": "0-1", "window_tokens": 11}}},
    "chunked": {"groups": {"main": GQA | {"kind": "chunked", "layers": "0-1", "chunk_tokens": 16}}},
    "sinks": {
        "groups": {"main": GQA | {"kind": "full", "layers": "0-1", "sinks": True, "soft_cap": 5.0}}
    },
    "k_only": {"groups": {"main": GQA | {"kind": "full", "layers": "0-1", "v_head_dim": 0}}},
    "unequal": {"groups": {"main": GQA | {"kind": "full", "layers": "0-1", "v_head_dim": 64}}},
    "latent": {"groups": {"main": MLA | {"kind": "full", "layers": "0-1", "qk_rope_head_dim": 64}}},
    "latent_no_rope": {
        "groups": {"main": MLA | {"kind": "full", "layers": "0-1", "qk_rope_head_dim": 0}}
    },
    "entries": {"groups": {"main": GQA | {"kind": "full", "layers": "0-1", "tokens_per_entry": 4}}},
    "alias": {
        "groups": {"main": GQA | {"kind": "full", "layers": "0-0"}},
        "model": {"aliases": [[1, 0]]},
    },
    "hybrid": {
        "groups": {
            "full": GQA | {"kind": "full", "layers": "0-0"},
            "local": GQA | {"kind": "swa", "layers": "1-1", "window_tokens": 9},
        }
    },
}


@pytest.mark.parametrize("new_tokens", ["stored", "exact"])
@pytest.mark.parametrize("case", list(CASES))
def test_plain_caches_pass(case: str, new_tokens: str) -> None:
    planned = plan(spec(**CASES[case], backend={"name": "torch", "new_tokens": new_tokens}))
    verifier = Verifier(planned)
    run(build(planned), verifier)
    for verdict in verifier.verdicts():
        assert verdict.passed
        assert verdict.bound == pytest.approx(3e-3)
        assert verdict.error < 2.5e-3  # the output's own bfloat16


def test_cross_attention_passes() -> None:
    main = GQA | {"kind": "full", "layers": "0-1"}
    cross = GQA | {"kind": "cross", "layers": "0-1", "encoder_tokens": 20}
    planned = plan(spec({"main": main, "cross": cross}, backend={"name": "torch"}))
    verifier = Verifier(planned)
    run(build(planned), verifier, [20, 7, 13])
    assert [verdict.passed for verdict in verifier.verdicts()] == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", list(CASES))
def test_caches_pass_on_a_gpu(case: str) -> None:
    planned = plan(spec(**CASES[case], device=this_gpu(), backend={"name": "torch"}))
    verifier = Verifier(planned, device="cuda")
    run(build(planned), verifier)
    assert all(verdict.passed for verdict in verifier.verdicts())


QUANTS = "fp8_e4m3 fp8_e5m2 fp8_e4m3_token_head int8_token_head int4_g32 mxfp8 mxfp4 nvfp4"


@pytest.mark.parametrize("quant", QUANTS.split())
def test_quantized_caches_pass_within_their_bound(quant: str) -> None:
    groups = CASES["full"]["groups"]
    kv = {"quant": {"k": {"name": quant}, "v": {"name": quant}}}
    planned = plan(spec(groups, kv=kv, backend={"name": "torch"}))
    verifier = Verifier(planned)
    run(build(planned), verifier)
    (verdict,) = verifier.verdicts()
    assert verdict.passed, verdict
    assert verdict.error > 0.7 * math.hypot(verdict.key_error, verdict.value_error)


def test_latent_error_counts_twice() -> None:
    kv = {"quant": {"latent": {"name": "fp8_tile128"}, "rope": {"name": "plain"}}}
    planned = plan(spec(CASES["latent"]["groups"], kv=kv, backend={"name": "torch"}))
    verifier = Verifier(planned)
    run(build(planned), verifier)
    (verdict,) = verifier.verdicts()
    assert verdict.passed
    assert verdict.value_error == pytest.approx(0.0257, rel=0.05)
    assert verdict.key_error == pytest.approx(verdict.value_error * math.sqrt(128 / 192), rel=0.02)


def test_sparse_attention_passes() -> None:
    """Index keys choose tokens; attention over the chosen, dense and paged, agrees."""
    main = MLA | {"kind": "full", "layers": "0-1", "qk_rope_head_dim": 64}
    index = {"kind": "sparse_index", "layers": "0-1", "selects": "main", "index_heads": 8}
    groups = {"main": main, "index": index | {"head_dim": 64, "topk": 6}}
    planned = plan(spec(groups, backend={"name": "torch"}))
    cache, verifier, group = build(planned), Verifier(planned), planned.by_name["index"]
    pool, number = cache.pool(1, "index")
    sequences = cache.open(3)
    for new in ([40, 3, 17], [1, 1, 1]):
        step = cache.extend(sequences, new)
        keys = verifier.workload.draw(group, sum(new), sum(new))
        pool.write(number, step.tables[group.table].slots, **keys.tensors)
        selected = Selector(group, pool).select(number, keys.q, step, keys.weights)
        given = verifier.inputs(planned.groups[0], 1, step)
        select = selected.positions
        out = cache.attend(1, given.q, *given.kv, step, select=select)
        verifier.compare(planned.groups[0], 1, step, given, out, select)
        assert (select >= 0).sum(1).max() == 6
        cache.commit(step)
    (verdict,) = verifier.verdicts()
    assert verdict.passed


def test_a_wrong_window_fails() -> None:
    """The check is sharp: one key too many in a window is far outside the bound."""
    planned = plan(spec(CASES["window"]["groups"], backend={"name": "torch"}))
    group = planned.groups[0]
    wrong = replace(planned, groups=(replace(group, work=replace(group.work, window_tokens=12)),))
    verifier = Verifier(wrong)
    cache = build(planned)
    sequences = cache.open(3)
    step = cache.extend(sequences, [40, 40, 40])
    given = verifier.inputs(wrong.groups[0], 0, step)
    out = cache.attend(0, given.q, *given.kv, step)
    verifier.compare(wrong.groups[0], 0, step, given, out)
    (verdict,) = verifier.verdicts()
    assert not verdict.passed
    assert verdict.error > 0.1


# ---- parts -----------------------------------------------------------------------------------


def test_acceptance() -> None:
    assert acceptance(0.03, 0.04) == pytest.approx(1.25 * 0.05 + 0.003)


def test_logits_have_unit_variance_whatever_the_scale() -> None:
    groups = {"main": GQA | {"kind": "full", "layers": "0-1", "scale": 0.5}}
    planned = plan(spec(groups, model={"dtype": "float32"}))
    drawn = Workload(planned, seed=3).draw(planned.groups[0], 500, 500)
    logits = 0.5 * drawn.q[:, 0] @ drawn.tensors["k"][:, 0].T
    assert float(logits.std()) == pytest.approx(1.0, rel=0.02)


def test_equal_seeds_draw_equal_numbers() -> None:
    planned = plan(spec(CASES["sinks"]["groups"]))
    group = planned.groups[0]
    first, again, other = (Workload(planned, seed) for seed in (1, 1, 2))
    drawn = [w.draw(group, 3, 3).q for w in (first, again, other)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(first.sinks(group, 1), first.sinks(group, 1))
    assert not torch.equal(first.sinks(group, 1), first.sinks(group, 0))


def test_history_grows_and_does_not_alias() -> None:
    planned = plan(spec(CASES["full"]["groups"]))
    group, history = planned.groups[0], History(planned.groups[0])
    drawn = Workload(planned).draw(group, 50, 50)
    for low, high in ((0, 1), (1, 30), (30, 30), (30, 50)):
        part = {name: x[low:high].clone() for name, x in drawn.tensors.items()}
        history.append(part)
        for x in part.values():
            x.zero_()
    whole = History(group)
    whole.append(drawn.tensors)
    at = torch.arange(50)
    assert torch.equal(history.attend(drawn.q, at), whole.attend(drawn.q, at))


def test_meter() -> None:
    meter = ErrorMeter()
    assert meter.relative("x") == 0.0
    meter.add("x", torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    meter.add("x", torch.tensor([0.0]), torch.tensor([0.0]))
    assert meter.relative("x") == pytest.approx(0.2)
    assert meter.count("x") == 3
    meter.add("x", torch.tensor([math.nan]), torch.tensor([1.0]))
    assert math.isnan(meter.relative("x"))
    assert not Verdict("x", 4, meter.relative("x"), 1.0, 0.0, 0.0).passed
    assert not Verdict("x", 0, 0.0, 1.0, 0.0, 0.0).passed


def test_storage_errors_follow_the_constants() -> None:
    kv = {"quant": {"k": {"name": "fp8_e4m3"}, "v": {"name": "plain"}}}
    planned = plan(spec(CASES["full"]["groups"], kv=kv))
    group = planned.groups[0]
    key_error, value_error = storage_errors(group)
    assert (key_error, value_error) == (pytest.approx(0.0265, rel=0.05), 0.0)
    (constant,) = group.tensor("k").constants
    saturating = {"k": {constant.name: torch.full(constant.shape, 1e-3)}}
    assert storage_errors(group, saturating)[0] > 0.3
