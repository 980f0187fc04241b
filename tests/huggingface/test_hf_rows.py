"""Every architecture of ``tests/data/models.json``, from a config of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hf_rows import ROWS

from kvfactory.spec.layers import parse_layers

Facts = set[tuple[Any, ...]]

TABLE = {
    row["name"]: row
    for row in json.loads((Path(__file__).parents[1] / "data" / "models.json").read_text())[
        "models"
    ]
}
BEYOND_A_SPEC = {"DeepSeek-V4-Flash", "DeepSeek-V4-Pro"}


def expected(row: dict[str, Any]) -> Facts:
    """Layers, heads, widths, windows and shapes that the table states."""
    return {_kept(group, row["name"]) for group in row["kv_groups"]} | {
        _state(group) for group in row["state_groups"]
    }


def _kept(group: dict[str, Any], name: str) -> tuple[Any, ...]:
    layers, kind = tuple(group["layers"]), group["kind"]
    if kind == "index_k":
        return "index", layers, group["index_head_dim"], group.get("compress_ratio", 1)
    if kind.startswith("mla"):
        return "latent", layers, group["kv_lora_rank"], group["qk_rope_head_dim"]
    widths = group["kv_heads"], group["k_head_dim"], group["v_head_dim"]
    if kind == "cross":
        return "cross", layers, *widths, group["cross_len"]
    reach = group.get("window")
    if reach and name == "MiMo-V2-Flash":
        reach += 1  # the table states the hub's window, which leaves the query out
    plain = kind if kind in ("swa", "chunked") else "full"
    return plain, layers, *widths, reach, group.get("sinks", False), group.get("softcap")


def _state(group: dict[str, Any]) -> tuple[Any, ...]:
    conv = group["conv_state_shape_engine"]
    windows = (tuple(conv),) * group["n_conv_states"] if conv else ()
    return "state", tuple(group["layers"]), windows, tuple(group["recurrent_state_shape"] or ())


def found(model: dict[str, Any]) -> Facts:
    return {_fact(group, model["num_layers"]) for group in model["groups"].values()}


def _fact(group: dict[str, Any], num_layers: int) -> tuple[Any, ...]:
    layers, kind = parse_layers(group["layers"], num_layers), group["kind"]
    if kind == "sparse_index":
        return "index", layers, group["head_dim"], group.get("tokens_per_entry", 1)
    if kind == "linear":
        conv = tuple(tuple(pair) for pair in group.get("conv", ()))
        return "state", layers, conv, tuple(group.get("recurrent", {}).values())
    if group.get("geometry") == "mla":
        return "latent", layers, group["kv_lora_rank"], group["qk_rope_head_dim"]
    widths = group["kv_heads"], group["head_dim"], group.get("v_head_dim", group["head_dim"])
    if kind == "cross":
        return "cross", layers, *widths, group["encoder_tokens"]
    reach = group.get("window_tokens") or group.get("chunk_tokens")
    return kind, layers, *widths, reach, group.get("sinks", False), group.get("soft_cap")


def test_no_row_is_left_out() -> None:
    assert ROWS.keys() == TABLE.keys()


@pytest.mark.parametrize("name", sorted(TABLE.keys() - BEYOND_A_SPEC))
def test_a_config_agrees_with_its_row(read: Any, name: str) -> None:
    row, model = TABLE[name], read(ROWS[name])
    assert found(model) == expected(row)
    assert model["num_layers"] == row["num_layers"]
    assert model["max_context"] == row["max_context"]
    heads = [group["q_heads"] for group in model["groups"].values() if "q_heads" in group]
    if name.startswith("Step-3.5"):
        assert heads == [64, 96]
    else:
        assert {*heads} == ({row["q_heads"]} if row["q_heads"] else set())


@pytest.mark.parametrize("name", sorted(BEYOND_A_SPEC))
def test_what_a_spec_cannot_say_is_named(refuse: Any, name: str) -> None:
    (problem,) = refuse(ROWS[name])
    assert problem.path == "model.path: compress_ratios"
    assert "one softmax" in problem.need
