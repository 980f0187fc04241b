"""The fields of an open step: what the host sends lies in front, for one copy."""

from __future__ import annotations

from itertools import pairwise

import pytest
from planner_support import CONF, read_yaml, spec_of

from kvfactory.planner import plan


@pytest.mark.parametrize("model", ["qwen3", "gemma3_27b", "qwen3_next", "llama3_2_11b_vision"])
def test_what_is_sent_lies_side_by_side(model: str) -> None:
    groups = read_yaml(CONF / "model" / f"{model}.yaml")
    laid = plan(spec_of(groups, workload={"requests": 3, "tokens": 100}))
    sent = [field.sent for field in laid.fields]
    assert sent == sorted(sent, reverse=True)
    for field, after in pairwise(laid.fields):
        gap = after.offset - field.offset - field.num_bytes
        assert 0 <= gap < 16
    last = laid.fields[-1]
    assert last.offset + last.num_bytes <= laid.fields[0].offset + laid.step_bytes


def test_rows_hold_what_open_steps_may_add() -> None:
    model = read_yaml(CONF / "model" / "qwen3.yaml")
    engine = {"steps_in_flight": 3, "draft_tokens": 5}
    laid = plan(spec_of(model, engine=engine, workload={"requests": 2, "tokens": 100}))
    assert laid.limits.row_tokens == 100 + 3 * 6
    assert laid.tables[0].row_pages == -(-118 // laid.tables[0].page_tokens)
