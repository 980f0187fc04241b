"""The sizing inequality, the fill and the floor, over models, formats, pages and budgets."""

from __future__ import annotations

import re
from typing import Any

import pytest
from planner_support import CONF, read_yaml, spec_of

from kvfactory.errors import PlanError
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.report.tables import plan_text

MODELS = ("qwen3", "gemma3_27b", "gpt_oss_120b", "deepseek_v3", "mimo_v2_flash", "llama4_scout")
KV = {
    "bf16": {"quant": {}},
    "fp8_page_major": {
        "quant": {"k": "fp8_e4m3", "v": "fp8_e4m3"},
        "layout": {"tokens": "page_major"},
    },
    "mixed_recipe": {
        "quant": {"k": "int8_token_head", "v": "fp8_e4m3"},
        "recipes": {"edge": {"layers": [0, -1], "quant": {"k": "plain", "v": "plain"}}},
    },
}


def _parts(kv: str, page_tokens: int, budget: str | None, **workload: int) -> dict[str, Any]:
    return {
        "kv": KV[kv] | {"page_tokens": page_tokens},
        "memory": {"budget": budget},
        "device": {"name": "h200", "type": "cuda", "sm": 90, "num_sms": 132},
        "workload": {"tokens": 8192} | workload,
    }


def _bytes_for(model: dict[str, Any], parts: dict[str, Any], requests: int) -> int:
    """Bytes of the plan for exactly ``requests``, without a budget."""
    exact = parts | {"memory": {}, "workload": parts["workload"] | {"requests": requests}}
    return plan(spec_of(model, **exact)).bytes


@pytest.mark.parametrize("budget", ["12GiB", "40GiB", "80GiB"])
@pytest.mark.parametrize("page_tokens", [1, 16, 128])
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("name", MODELS)
def test_largest_number_of_requests(name: str, kv: str, page_tokens: int, budget: str) -> None:
    model = read_yaml(CONF / "model" / f"{name}.yaml")
    parts = _parts(kv, page_tokens, budget)
    laid = plan(spec_of(model, **parts))
    admitted, limit = laid.limits.admitted, laid.spec.memory.budget
    assert limit is not None
    assert _bytes_for(model, parts, admitted) <= limit < _bytes_for(model, parts, admitted + 1)
    assert laid.bytes <= limit
    assert all(_with_one_more_page(laid, table.name) > limit for table in laid.tables)


def _with_one_more_page(laid: CachePlan, table: str) -> int:
    """Bytes if ``table`` had one more page: every group of it grows by at least its page."""
    page = sum(
        plane.place.itemsize * _product(plane.place.shape) // plane.place.shape[1]
        for group in laid.groups
        if group.table == table
        for plane in group.planes
    )
    slack = sum(256 for group in laid.groups if group.table == table)
    return laid.bytes + page + slack


def _product(shape: tuple[int, ...]) -> int:
    out = 1
    for extent in shape:
        out *= extent
    return out


def test_rows_cap_the_requests(gemma: dict[str, Any]) -> None:
    parts = _parts("bf16", 16, "80GiB") | {"engine": {"max_requests": 3}}
    laid = plan(spec_of(gemma, **parts))
    assert laid.limits.admitted == laid.limits.max_requests == 3
    assert laid.binding == "engine.max_requests=3"


def test_a_budget_says_what_one_more_request_lacks(gemma: dict[str, Any]) -> None:
    def admitted(num_bytes: int) -> int:
        memory = {"memory": {"budget": num_bytes}}
        return plan(spec_of(gemma, **(_parts("bf16", 16, None) | memory))).limits.admitted

    laid = plan(spec_of(gemma, **_parts("bf16", 16, "80GiB")))
    told = r"the budget: .* needs 512 pages of table full, (.*) B in all; (.*) B are left"
    found = re.fullmatch(told, laid.binding)
    assert found, laid.binding
    needed, left = (int(text.replace(",", "")) for text in found.groups())
    taken = 80 * 2**30 - left  # by those admitted, to the byte
    assert admitted(taken) == laid.limits.admitted
    assert admitted(taken - 1) == laid.limits.admitted - 1
    assert admitted(taken + needed - 1) == laid.limits.admitted
    assert admitted(taken + needed) == laid.limits.admitted + 1


def test_budget_below_the_floor_names_it(gemma: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as caught:
        plan(spec_of(gemma, **_parts("bf16", 16, "1GiB")))
    (problem,) = caught.value.problems
    assert problem.path == "memory.budget"
    assert "one request of workload.tokens=8192" in problem.need
    assert "prefill chunks of 2048" in problem.need
    mended = _parts("bf16", 16, problem.fix.removeprefix("memory.budget="))
    assert plan(spec_of(gemma, **mended)).limits.admitted == 1


def test_without_a_budget_the_workload_decides(gemma: dict[str, Any]) -> None:
    laid = plan(spec_of(gemma, workload={"requests": 3, "tokens": 4096}))
    full, local = laid.tables
    assert full.num_pages == 1 + 3 * 4096 // 16
    steady = (1024 + 2 - 2) // 16 + 1
    prefill = -(-(1024 + 2 * 2048 + 2 * 2 - 2) // 16) + 1
    assert local.num_pages == 1 + 2 * (steady + 1) + prefill
    assert laid.limits.admitted == 3


SMALL = {
    "name": "small",
    "num_layers": 1,
    "groups": {"full": {"kind": "full", "layers": [0], "q_heads": 1, "kv_heads": 1, "head_dim": 2}},
}


def test_no_more_requests_than_device_tables_have_rows() -> None:
    laid = plan(spec_of(SMALL, workload={"tokens": 16}, memory={"budget": 2**38}))
    assert laid.limits.max_requests == 2**20
    assert laid.binding == "engine.max_requests=1048576"
    assert 2**38 - laid.bytes < 512


def test_page_ids_fit_into_int32() -> None:
    parts = {"kv": {"page_tokens": 1}, "workload": {"tokens": 16}}
    memory = {"budget": 2**36}
    with pytest.raises(PlanError) as caught:
        plan(spec_of(SMALL, **parts, memory=memory))
    (problem,) = caught.value.problems
    assert (problem.path, problem.fix) == ("kv.page_tokens", "kv.page_tokens=4")
    assert "at most 2,147,483,647" in problem.need
    kv = {"page_tokens": 4}
    assert plan(spec_of(SMALL, kv=kv, workload={"tokens": 16}, memory=memory)).bytes <= 2**36


def test_a_plan_that_is_larger_than_its_device_says_so() -> None:
    device = {"name": "small", "type": "cpu", "memory_bytes": 2**20}
    told = "the plan is larger than its device"
    for tokens, larger in ((16, False), (2**20, True)):
        laid = plan(spec_of(SMALL, device=device, workload={"tokens": tokens}))
        assert any(told in warning for warning in laid.warnings) is larger
        assert (f"warning: {told}" in plan_text(laid).split("\n\n")[1]) is larger
        meta = {"name": "meta"}
        laid = plan(spec_of(SMALL, device=device, workload={"tokens": tokens}, memory=meta))
        assert laid.warnings == ()
