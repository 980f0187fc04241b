"""All 76 architectures of the table: each plans with its bytes and states, or says why not."""

from __future__ import annotations

import pytest
from models_table import (
    REFUSED,
    TABLE,
    Found,
    found,
    planned_bytes,
    planned_states,
    text,
    wanted_bytes,
    wanted_states,
)
from planner_support import model_files

FOUND = list(found())


def test_all_but_five_at_most_plan() -> None:
    assert len(TABLE) == len({each.row["name"] for each in FOUND}) == 76
    assert {each.file for each in FOUND} == {path.stem for path in model_files()} | {""}
    refused = {each.row["name"] for each in FOUND if each.laid is None}
    assert refused == REFUSED.keys()
    assert len(refused) <= 5
    for each in FOUND:
        assert bool(each.reason) == (each.laid is None), each.row["name"]
        sure = each.row["confidence"].startswith("config")
        assert each.laid or not sure or "DeepSeek-V4" in each.row["name"]


def test_the_table_can_be_printed() -> None:
    lines = text().splitlines()
    assert len(lines) == 1 + len(FOUND)
    assert "!=" not in text()
    (flash,) = (line for line in lines if line.startswith("DeepSeek-V4-Flash"))
    assert "compress_ratios: need one attention a layer" in flash


@pytest.mark.parametrize("each", [e for e in FOUND if e.laid], ids=lambda each: each.file)
def test_bytes_and_shapes_of_states(each: Found) -> None:
    assert each.laid is not None
    assert planned_bytes(each.laid) == wanted_bytes(each.row)
    assert planned_states(each.laid) == wanted_states(each.row)
