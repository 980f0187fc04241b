"""action=explain: bytes and bits, waste, verdicts with reasons, and what admits more."""

from __future__ import annotations

import json
from typing import Any

import pytest
from planner_support import CONF, read_yaml, spec_of

from kvfactory.actions.explain import run
from kvfactory.backends import BACKENDS
from kvfactory.cli import main
from kvfactory.errors import CapabilityError
from kvfactory.layouts import LAYOUTS
from kvfactory.planner import plan
from kvfactory.quant import SCHEMES
from kvfactory.report.explanation import Explanation, explain
from kvfactory.spec import BackendChoice, Spec

H200 = {"name": "h200", "type": "cuda", "sm": 90, "num_sms": 132}


def _explain(model: str, **parts: Any) -> tuple[Spec, Explanation]:
    data = read_yaml(CONF / "model" / f"{model}.yaml")
    spec = spec_of(data, device=H200, **{"workload": {"tokens": 5000}, **parts})
    return spec, explain(plan(spec), spec)


def test_bits_with_scales() -> None:
    quant = {"k": "int8_token_head", "v": "nvfp4"}
    _, found = _explain("qwen3_8b", kv={"quant": quant})
    rows = {row.tensor: row for row in found.stored}
    assert rows["k"].bits_per_element == 8 + 32 / 128
    assert rows["v"].bits_per_element == 4.5
    assert rows["k"].elements == 8 * 128
    assert rows["k"].row_bytes == 8 * (128 + 4)


def test_waste_of_pages_windows_and_sinks() -> None:
    _, found = _explain("gemma3_27b")
    full, local = found.waste
    row = 2 * 16 * 128 * 2
    assert full.sink == 10 * 16 * row
    assert full.rounding == 10 * (313 * 16 - 5000) * row
    assert local.request_bytes == 52 * 65 * 16 * row
    assert local.rounding == 52 * (65 * 16 - 1024) * row


@pytest.mark.parametrize("model", ["gemma3_27b", "deepseek_v32"])
def test_every_backend_has_a_verdict(model: str) -> None:
    _, found = _explain(model)
    groups = {verdict.group for verdict in found.backends}
    for group in groups:
        mine = [verdict for verdict in found.backends if verdict.group == group]
        assert sorted(verdict.backend for verdict in mine) == sorted(BACKENDS.names())
        assert sum(verdict.taken for verdict in mine) == 1
        assert not any(verdict.taken and verdict.reasons for verdict in mine)


def test_every_layout_and_format_is_possible_or_refused_for_a_reason() -> None:
    spec, found = _explain("qwen3_8b", kv={"quant": {"k": "fp8_e4m3"}, "page_tokens": 20})
    layouts = {trial.override: trial for trial in found.layouts}
    assert set(layouts) == {f"kv.layout.tokens={name}" for name in LAYOUTS.names()}
    assert [trial.override for trial in found.layouts if trial.taken] == ["kv.layout.tokens=nhd"]
    refused = layouts["kv.layout.tokens=fa4_scales"]
    quants = {trial.override: trial for trial in found.quants}
    assert len(quants) == 2 * len(SCHEMES.names())
    assert quants["kv.quant.k=fp8_e4m3"].taken
    assert quants["kv.quant.v=plain"].taken
    assert "state_int8 for role v" in quants["kv.quant.v=state_int8"].reasons[0].got
    assert all(trial.reasons or trial.num_bytes for trial in (*found.layouts, *found.quants))
    assert not refused.reasons  # no scales here that the page of 20 could not split
    assert spec.kv.page_tokens == 20


def test_a_layout_that_cannot_split_the_page() -> None:
    _, found = _explain("qwen3_8b", kv={"quant": {"k": "mxfp8", "v": "mxfp8"}, "page_tokens": 20})
    layouts = {trial.override: trial for trial in found.layouts}
    assert layouts["kv.layout.tokens=fa4_scales"].reasons


def test_changes_are_what_the_plan_says_with_them() -> None:
    spec, found = _explain("gemma3_27b", memory={"budget": "40GiB"})
    now = plan(spec).limits.admitted
    assert found.changes
    admitted = [trial.admitted for trial in found.changes]
    assert admitted == sorted(admitted, reverse=True)
    assert min(admitted) > now
    by_name = {trial.override: trial for trial in found.changes}
    bigger = spec_of(
        read_yaml(CONF / "model" / "gemma3_27b.yaml"),
        device=H200,
        workload={"tokens": 5000},
        memory={"budget": "50GiB"},
    )
    assert by_name["memory.budget=50GiB"].admitted == plan(bigger).limits.admitted
    assert by_name["kv.quant=nvfp4"].admitted > 3 * now


def test_changes_of_states_and_within_the_device() -> None:
    device = {**H200, "memory_bytes": "40GiB"}
    spec = spec_of(
        read_yaml(CONF / "model" / "qwen3_next.yaml"), device=device, memory={"budget": "36GiB"}
    )
    found = {trial.override: trial for trial in explain(plan(spec), spec).changes}
    assert "kv.quant.state=state_int8" in found
    assert [name for name in found if "budget" in name] == ["memory.budget=40GiB"]


def test_without_a_budget_fewer_bytes_are_better(capsys: pytest.CaptureFixture[str]) -> None:
    spec, found = _explain("qwen3_8b")
    now = plan(spec).bytes
    assert all(trial.num_bytes < now for trial in found.changes)
    best = found.changes[0]
    assert best.override in ("kv.quant=int4_g128", "kv.quant=mxfp4")
    assert run(spec, "table") == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith(best.override + " "))
    assert f" {best.num_bytes / now:.2f}x " in row
    assert "requests  bytes of now" in out
    assert out.endswith("without a memory.budget fewer bytes for as many requests are better\n")


MIXED = {"quant": {"k": "fp8_e4m3", "v": "fp8_e4m3"}} | {
    "groups": {"local": {"quant": {"k": "plain"}}}
}


def test_a_format_of_some_groups_is_taken_by_those(capsys: pytest.CaptureFixture[str]) -> None:
    spec, found = _explain("gpt_oss_120b", kv=MIXED)
    quants = {trial.override: trial for trial in found.quants}
    assert [name for name, trial in quants.items() if trial.taken] == ["kv.quant.v=fp8_e4m3"]
    assert quants["kv.quant.k=plain"].taken_by == ("local",)
    assert quants["kv.quant.k=fp8_e4m3"].taken_by == ("full",)
    assert run(spec, "table") == 0
    assert "kv.quant.k=plain                taken by local  8 req" in capsys.readouterr().out


def test_the_oracle_on_a_gpu_is_noted_and_one_format_mends_it() -> None:
    spec, _ = _explain("gpt_oss_120b", kv=MIXED)
    assert "group local is served by torch, the oracle: slow" in plan(spec).notes
    asked = spec.model_copy(update={"backend": BackendChoice(name="flashinfer")})
    with pytest.raises(CapabilityError, match=r"; try kv\.groups\.local\.quant=plain$"):
        plan(asked)
    mended, _ = _explain("gpt_oss_120b", kv=MIXED | {"groups": {"local": {"quant": "plain"}}})
    laid = plan(mended)
    assert {group.choice.backend for group in laid.groups if group.choice} == {"flashinfer"}
    assert not any("oracle" in note for note in laid.notes)


def test_one_format_mends_a_recipe_where_it_stands() -> None:
    ends = {"layers": [1], "quant": {"k": "plain"}}
    spec, _ = _explain("gpt_oss_120b", kv=MIXED | {"groups": {}, "recipes": {"ends": ends}})
    asked = spec.model_copy(update={"backend": BackendChoice(name="flashinfer")})
    with pytest.raises(CapabilityError, match=r"; try kv\.recipes\.ends\.quant=plain$"):
        plan(asked)


def test_rows_that_bind_are_named() -> None:
    parts = {"memory": {"budget": "40GiB"}, "engine": {"max_requests": 2}}
    _, found = _explain("qwen3_8b", **parts)
    assert [trial.override for trial in found.changes] == ["engine.max_requests=null"]


def test_in_words_and_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["action=explain", "model=gemma3_27b", "kv=fp8_hnd", "device=h200"]
    arguments += ["memory.budget=80GiB", "workload.tokens=32768"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for words in ("bits/element", "page rounding", "taken", "refused", "to do better", "of now"):
        assert words in out
    assert main([*arguments, "output=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["admitted"] == 54
    assert {"stored", "waste", "backends", "layouts", "quants", "changes"} < set(found)


def test_no_plan_is_its_own_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["action=explain", "device=h200", "memory.budget=1MiB"]) == 2
    assert capsys.readouterr().err.startswith("memory.budget: got 1048576 B")
