"""Where a config lies, what it is called, which part of it describes the text model, plugins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfactory.errors import SpecError
from kvfactory.huggingface import (
    FAMILIES,
    Family,
    Fields,
    Geometry,
    model_from_config,
    model_from_values,
)
from kvfactory.huggingface.groups import collect, full, gqa
from kvfactory.spec.layers import layer_set, parse_layers

TEXT = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("Tiny-1B/config.json", "Tiny-1B"),
        ("acme--Tiny-1B_config.json", "Tiny-1B"),
        ("tiny.json", "tiny"),
        ("models--acme--Tiny-1B/snapshots/0a1b2c/config.json", "Tiny-1B"),
    ],
)
def test_the_model_is_called_after_its_place(tmp_path: Path, place: str, name: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(TEXT))
    assert model_from_config(path)["name"] == name
    if path.name == "config.json":
        assert model_from_config(str(path.parent)) == model_from_config(path)


def test_values_need_no_file() -> None:
    assert model_from_values(TEXT)["name"] == "llama"
    assert model_from_values(TEXT, "Tiny-1B")["name"] == "Tiny-1B"
    single = {**TEXT, "per_layer_config": {2: {"head_dim": 16}}}
    assert model_from_values(single)["groups"]["full_2"]["layers"] == [2]


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(TEXT).encode())
    assert model_from_config(path)["num_layers"] == 4


def test_the_result_is_plain_data(read: Any) -> None:
    model = read(TEXT)
    assert json.loads(json.dumps(model)) == model


@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: {"model_type": "llava", "text_config": text, "vision_config": {"a": 1}},
        lambda text: {"model_type": "internvl_chat", "llm_config": text},
        lambda text: {"model_type": "deepseek_vl", "language_config": text},
        lambda text: {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": text}},
        lambda text: {"model_type": "llava", "dtype": "float16", "text_config": text},
    ],
)
def test_the_text_part_of_a_multimodal_config(read: Any, wrap: Any) -> None:
    model = read(wrap(TEXT))
    assert model["groups"] == read(TEXT)["groups"]


def test_a_part_inherits_type_and_dtype(read: Any) -> None:
    text = {key: value for key, value in TEXT.items() if key != "model_type"}
    text["num_key_value_heads"] = 2
    model = read({"model_type": "qwen3_vl", "torch_dtype": "float16", "text_config": text})
    assert model["dtype"] == "float16"


def test_problems_name_the_part(refuse: Any) -> None:
    bad = {"model_type": "llava", "text_config": TEXT | {"num_hidden_layers": -1}}
    (problem,) = refuse(bad)
    assert problem.path == "model.path: text_config.num_hidden_layers"


def test_two_different_text_parts_are_refused(refuse: Any) -> None:
    (problem,) = refuse(
        {"model_type": "llava", "text_config": TEXT, "llm_config": {**TEXT, "a": 1}}
    )
    assert problem.path == "model.path: text_config"


@pytest.mark.parametrize(
    ("model_type", "layers", "q_heads", "kv_heads", "head_dim"),
    [("llama", 32, 32, 32, 128), ("mistral", 32, 32, 8, 128), ("gemma3_text", 26, 8, 4, 256)],
)
def test_a_nested_part_may_leave_out_what_transformers_defaults(
    read: Any, model_type: str, layers: int, q_heads: int, kv_heads: int, head_dim: int
) -> None:
    model = read(
        {"model_type": "llava", "text_config": {"model_type": model_type, "vocab_size": 9}}
    )
    assert model["num_layers"] == layers
    for group in model["groups"].values():
        found = group["q_heads"], group["kv_heads"], group["head_dim"]
        assert found == (q_heads, kv_heads, head_dim)


# ---- layers and groups ---------------------------------------------------------------------


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_a_layer_set_reads_back(case: tuple[int, set[int]]) -> None:
    layers, ids = case
    if ids:
        assert parse_layers(layer_set(ids, layers), layers) == tuple(sorted(ids))


@pytest.mark.parametrize(
    ("ids", "written"),
    [
        (range(36), "0-35"),
        (range(1, 36, 2), "1::2"),
        ([n for n in range(36) if n % 6 != 5], "not 5::6"),
        ([4, 9, 14, 19], "4:20:5"),
        ([7], [7]),
        ([0, 5, 11, 17], [0, 5, 11, 17]),
    ],
)
def test_layer_sets_are_short(ids: Any, written: Any) -> None:
    assert layer_set(ids, 36) == written


# ---- plugins -------------------------------------------------------------------------------


def _acme(config: Fields) -> Geometry:
    layers = config.integer("depth")
    group = full(gqa(config.integer("heads"), 1, config.integer("width")))
    return Geometry(layers, collect(layers, ((layer, "full", group) for layer in range(layers))))


ACME = Family("acme", ("acme_lm",), _acme)
RIVAL = Family("rival", ("acme_lm", "llama"), _acme)


class _Entry:
    def __init__(self, family: Family) -> None:
        self.name, self.value, self.dist, self._family = family.name, "acme:X", None, family

    def load(self) -> Family:
        return self._family


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Any:
    def offer(*families: Family) -> None:
        entries = {family.name: [_Entry(family)] for family in families}
        monkeypatch.setitem(FAMILIES.__dict__, "_foreign", entries)
        monkeypatch.setattr(FAMILIES, "_loaded", {})

    return offer


def test_a_third_party_adds_a_family(read: Any, foreign: Any) -> None:
    foreign(ACME)
    model = read({"model_type": "acme_lm", "depth": 3, "heads": 4, "width": 16})
    assert model["groups"]["full"]["layers"] == "0-2"


def test_its_problems_are_told_like_ours(refuse: Any, foreign: Any) -> None:
    foreign(ACME)
    assert [p.path for p in refuse({"model_type": "acme_lm", "depth": 3})] == [
        "model.path: heads",
        "model.path: width",
    ]


def test_a_built_in_family_wins_and_two_rivals_are_refused(
    read: Any, refuse: Any, foreign: Any
) -> None:
    foreign(ACME, RIVAL)
    assert read(TEXT)["num_layers"] == 4
    (problem,) = refuse({"model_type": "acme_lm", "depth": 3, "heads": 4, "width": 16})
    assert "acme and rival" in problem.got


def test_families_claim_their_types_once() -> None:
    claims: dict[str, str] = {}
    for name in FAMILIES.names():
        for model_type in FAMILIES.get(name, "").model_types:
            assert claims.setdefault(model_type, name) == name
    assert len(claims) > 150


def test_a_broken_family_is_our_error(tmp_path: Path) -> None:
    broken = Family("broken", ("acme_lm",), lambda config: Geometry(2, {"a b": {"kind": "odd"}}))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "acme_lm"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES.__dict__, "_foreign", {"broken": [_Entry(broken)]})
        with pytest.raises(SpecError, match=r"model\.path"):
            model_from_config(path)


def test_neither_torch_nor_transformers_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TEXT))
    script = (
        "import sys; from kvfactory.huggingface import model_from_config; "
        f"model_from_config({str(path)!r}); "
        "assert not {'torch', 'transformers', 'triton'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
