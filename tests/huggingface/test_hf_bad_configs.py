"""Configs that cannot be mapped: a reason per key, all at once, never a traceback."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hf_rows import ROWS
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfactory.errors import SpecError
from kvfactory.huggingface import model_from_config, model_from_values
from kvfactory.planner import plan
from kvfactory.spec import Spec

GOOD = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
INDEX = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 64}
GONE = object()


def without(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in (GOOD | changes).items() if value is not GONE}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        # missing, of the wrong type, absurd
        ({"num_hidden_layers": GONE}, "num_hidden_layers"),
        ({"num_attention_heads": GONE}, "num_attention_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": -4}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"num_hidden_layers": 4.0}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": [2, 2, 2, 2]}, "num_key_value_heads"),
        ({"head_dim": 2**40}, "head_dim"),
        ({"head_dim": -64}, "head_dim"),
        ({"max_position_embeddings": 2**60}, "max_position_embeddings"),
        ({"max_position_embeddings": -1}, "max_position_embeddings"),
        ({"hidden_size": -64, "head_dim": 8}, "hidden_size"),
        ({"hidden_size": "64", "head_dim": 8}, "hidden_size"),
        ({"model_type": "deepseek_v3", **LATENT, "num_key_value_heads": -1}, "num_key_value_heads"),
        ({"model_type": "deepseek_v3", **LATENT, "qk_head_dim": 25}, "qk_head_dim"),
        ({"torch_dtype": "bloat16"}, "torch_dtype"),
        ({"dtype": 16}, "dtype"),
        ({"model_type": 7}, "model_type"),
        ({"layer_types": "full_attention"}, "layer_types"),
        # contradictory
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"num_key_value_heads": 16}, "num_attention_heads"),
        ({"hidden_size": 60}, "hidden_size"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"model_type": "gpt2", "n_layer": 6}, "n_layer"),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 64,
                "use_sliding_window": False,
                "layer_types": ["sliding_attention"] * 4,
            },
            "layer_types",
        ),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 9}, "num_kv_shared_layers"),
        ({"model_type": "jamba", "mamba_d_state": 8, "attn_layer_offset": 9}, "attn_layer_offset"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*M"}, "num_hidden_layers"),
        (
            {"model_type": "bamba", "mamba_n_heads": 8, "mamba_d_head": 5, "mamba_d_state": 8},
            "mamba_n_heads",
        ),
        (
            {
                "model_type": "mamba2",
                "num_heads": 3,
                "head_dim": 8,
                "state_size": 16,
                "expand": 2,
            },
            "num_heads",
        ),
        (
            {"model_type": "mimo_v2_flash", "sliding_window": 8, "hybrid_layer_pattern": [0, 1]},
            "hybrid_layer_pattern",
        ),
        ({"model_type": "nemotron-nas", "block_configs": [{}] * 3}, "block_configs"),
        # nothing to keep, or nothing that is known
        ({"model_type": "nemotron-nas", "block_configs": [{}] * 4}, "num_hidden_layers"),
        ({"model_type": "nemotron-nas"}, "block_configs"),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "MX*-"},
            "hybrid_override_pattern",
        ),
        ({"model_type": "nemotron_h"}, "layers_block_type"),
        ({"model_type": "lfm2"}, "layer_types"),
        (
            {"model_type": "mistral", "layer_types": ["sliding_attention", "spiral"] * 2},
            "layer_types",
        ),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "gpt_oss", "sliding_window": None}, "sliding_window"),
        (
            {"model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": "LXG"},
            "sliding_window_pattern",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
        ({"model_type": "gemma3_text", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"model_type": "granite", "attention_multiplier": float("nan")}, "attention_multiplier"),
        ({"model_type": "granite", "attention_multiplier": float("inf")}, "attention_multiplier"),
        (
            {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx",
        ),
        ({"model_type": "minimax_m2", "attn_type_list": [1, 0, 1, 1]}, "attn_type_list"),
        ({"model_type": "deepseek_v3"}, "qk_rope_head_dim"),
        (
            {
                "model_type": "deepseek_v3",
                **LATENT,
                "rope_scaling": {"type": "yarn", "mscale_all_dim": 1},
            },
            "rope_scaling.factor",
        ),
        (
            {
                "model_type": "deepseek_v3",
                **LATENT,
                "rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": {}},
            },
            "rope_scaling.mscale_all_dim",
        ),
        ({"model_type": "deepseek_v3", **LATENT, "rope_scaling": "yarn"}, "rope_scaling"),
        ({"model_type": "deepseek_v32", **LATENT}, "index_topk"),
        ({"model_type": "deepseek_v3", **LATENT, **INDEX}, "index_topk"),
        (
            {"model_type": "glm_moe_dsa", **LATENT, **INDEX, "indexer_types": ["full"] * 3},
            "indexer_types",
        ),
        (
            {"model_type": "glm_moe_dsa", **LATENT, **INDEX, "index_topk_pattern": "SFFF"},
            "index_topk_pattern",
        ),
        (
            {
                "model_type": "kimi_linear",
                **LATENT,
                "linear_attn_config": {
                    "num_heads": 2,
                    "head_dim": 8,
                    "full_attn_layers": [0, 2],
                    "kda_layers": [1, 3],
                },
            },
            "linear_attn_config.full_attn_layers",
        ),
        ({"model_type": "qwen3_5_text", "mamba_ssm_dtype": "int8"}, "mamba_ssm_dtype"),
        (
            {"model_type": "mllama_text_model", "cross_attention_layers": [9]},
            "cross_attention_layers",
        ),
        ({"per_layer_config": {"9": {"head_dim": 8}}}, "per_layer_config.9"),
        # known, and beyond a spec
        ({"model_type": "deepseek_v4", "compress_ratios": [4, 128, 4, 128]}, "compress_ratios"),
        ({"model_type": "recurrent_gemma", "lru_width": 64}, "lru_width"),
        ({"model_type": "bert"}, "model_type"),
        # a dense family, and a key that says more
        ({"sliding_window": 512}, "sliding_window"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"block_configs": [{}] * 4}, "block_configs"),
        # unknown types: the standard rule, unless a key speaks against it
        ({"model_type": "nova", "kv_lora_rank": 32}, "kv_lora_rank"),
        ({"model_type": "nova", "sliding_window": 64}, "sliding_window"),
        (
            {
                "model_type": "nova",
                "layer_types": ["sliding_attention"] * 4,
                "sliding_window": 64,
                "attention_chunk_size": 64,
            },
            "attention_chunk_size",
        ),
        ({"model_type": "nova", "layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"model_type": "nova", "layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"model_type": "nova", "mamba_d_state": 16}, "mamba_d_state"),
        ({"model_type": "nova", "conv_kernel": 4}, "conv_kernel"),
        ({"model_type": "nova", "index_topk": 64}, "index_topk"),
        ({"model_type": "nova", "linear_attn_config": {"a": 1}}, "linear_attn_config"),
        ({"model_type": "nova", "attention_chunk_size": 64}, "attention_chunk_size"),
        ({"model_type": "nova", "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"model_type": "nova", "v_head_dim": 16}, "v_head_dim"),
        ({"model_type": "nova", "num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"model_type": "nova", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "nova", "type_vocab_size": 2}, "type_vocab_size"),
        ({"model_type": "nova", "hidden_size": GONE, "num_attention_heads": GONE}, "model_type"),
        ({"model_type": "lama", "num_hidden_layers": GONE, "hidden_size": GONE}, "model_type"),
        ({"model_type": GONE, "hidden_size": GONE}, "model_type"),
    ],
)
def test_a_bad_config_is_refused_at_its_key(refuse: Any, changes: Any, key: str) -> None:
    problems = refuse(without(**changes))
    assert any(problem.path == f"model.path: {key}" for problem in problems), problems


def test_all_problems_are_told_at_once(refuse: Any) -> None:
    bad = without(num_attention_heads="8", head_dim=-1, max_position_embeddings=0, dtype="f16")
    keys = {problem.path.removeprefix("model.path: ") for problem in refuse(bad)}
    assert keys == {"num_attention_heads", "head_dim", "max_position_embeddings", "dtype"}


def test_a_wrong_number_is_blamed_once_and_not_for_what_follows(refuse: Any) -> None:
    (problem,) = refuse(without(num_attention_heads=-8))
    assert problem.got == "-8"


@pytest.mark.parametrize("layers", [GONE, "4"])
def test_a_list_of_layers_is_not_blamed_for_a_number_of_layers(refuse: Any, layers: Any) -> None:
    (problem,) = refuse(without(num_hidden_layers=layers, layer_types=["full_attention"] * 4))
    assert problem.path == "model.path: num_hidden_layers"


def test_an_unknown_type_close_to_a_known_one_is_suggested(refuse: Any) -> None:
    (problem,) = refuse(without(model_type="lama", hidden_size=GONE))
    assert problem.fix == "model_type=llama"


def test_an_unknown_type_with_the_standard_keys_is_dense(read: Any) -> None:
    harmless = {"sliding_window": None, "max_window_layers": 4, "num_experts": 8, "use_cache": True}
    model = read(without(model_type="nova", **harmless))
    assert list(model["groups"]) == ["full"]


def test_an_unknown_type_may_list_windows_and_chunks(read: Any) -> None:
    types = ["sliding_attention", "full_attention", "chunked_attention", "sliding_attention"]
    keys = {"sliding_window": 64, "attention_chunk_size": 128}
    groups = read(without(model_type="nova", layer_types=types, **keys))["groups"]
    assert (groups["local"]["kind"], groups["local"]["window_tokens"]) == ("swa", 64)
    assert (groups["chunked"]["kind"], groups["chunked"]["chunk_tokens"]) == ("chunked", 128)
    assert {name: group["layers"] for name, group in groups.items()} == {
        "local": "0::3",
        "full": [1],
        "chunked": [2],
    }


# ---- the file itself -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        json.dumps(GOOD)[:-20],
        "[]",
        "null",
        '"llama"',
        "not json at all",
        '{"model_type": "llama", "model_type": "qwen3"}',
        '{"n": ' + "9" * 5000 + "}",
        "[" * 100_000,
        "\x00\x01",
    ],
)
def test_what_is_no_config_is_refused(refuse: Any, text: str) -> None:
    (problem,) = refuse(text)
    assert problem.path == "model.path"


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(SpecError, match="UTF-8"):
        model_from_config(tmp_path)


@pytest.mark.parametrize("place", ["nowhere", "nowhere/config.json", "", "\0", "Qwen/Qwen3-8B"])
def test_a_missing_file_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(SpecError, match=r"model\.path"):
        model_from_config(tmp_path / place)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"without a config\.json"):
        model_from_config(str(tmp_path))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GOOD))
    path.chmod(0)
    with pytest.raises(SpecError, match="cannot be read"):
        model_from_config(path)


def test_infinities_elsewhere_do_no_harm(read: Any) -> None:
    assert read(without(time_step_limit=[0.0, float("inf")]))["num_layers"] == 4


# ---- whatever else may stand there ---------------------------------------------------------

JUNK = [None, 0, -1, 1, 3, 2**63, 1.5, True, "", "x", [], [1], [None], {}, {"a": 1}, float("nan")]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_damage_ends_in_a_model_or_in_reasons(data: st.DataObject) -> None:
    values = json.loads(json.dumps(data.draw(st.sampled_from(list(ROWS.values())))))
    for _ in range(data.draw(st.integers(1, 3))):
        part = values.get("text_config") if data.draw(st.booleans()) else values
        if not isinstance(part, dict) or not part:
            continue
        key = data.draw(st.sampled_from(sorted(part)))
        if data.draw(st.booleans()):
            del part[key]
        else:
            part[key] = copy.deepcopy(data.draw(st.sampled_from(JUNK)))
    with contextlib.suppress(SpecError):
        model = model_from_values(values)
        plan(Spec.parse({"model": model, "kv": {"page_tokens": 256}}))


@pytest.mark.parametrize("value", ["x", "", {}, 0])
def test_a_switch_is_true_or_false(value: object) -> None:
    values = copy.deepcopy(ROWS["MiniMax-M3"])
    assert model_from_values(values)["num_layers"] == 60
    values["sparse_attention_config"]["use_sparse_attention"] = value
    with pytest.raises(SpecError, match=r"use_sparse_attention: got .*, need true or false"):
        model_from_values(values)
