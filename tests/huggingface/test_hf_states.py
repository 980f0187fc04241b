"""Latents, indexers and recurrent states: shapes and layers, one family at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest

BASE = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
INDEX = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 64}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def config(model_type: str, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"model_type": model_type, **BASE}
    for part in parts:
        found |= part
    return found | more


# ---- latents and indexers ------------------------------------------------------------------


def test_latents_keep_rank_and_rope_and_scale_by_the_unabsorbed_width(read: Any) -> None:
    assert read(config("deepseek_v3", LATENT))["groups"] == {
        "latent": {
            "kind": "full",
            "layers": "0-7",
            "geometry": "mla",
            "q_heads": 8,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "scale": 24**-0.5,
        }
    }


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_yarn_enters_the_scale_squared(read: Any, name: str) -> None:
    rope = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    model = read(config("deepseek_v3", LATENT, **{name: rope}))
    expected = 24**-0.5 * (0.1 * math.log(40) + 1) ** 2
    assert model["groups"]["latent"]["scale"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rope", [{"type": "yarn", "factor": 4}, {"rope_type": "default"}, None])
def test_rope_scaling_without_mscale_leaves_the_scale(read: Any, rope: Any) -> None:
    model = read(config("deepseek_v3", LATENT, rope_scaling=rope))
    assert model["groups"]["latent"]["scale"] == 24**-0.5


def test_small_deepseek_v2_models_have_no_latents(read: Any) -> None:
    off = {"use_mla": False, "kv_lora_rank": None, "qk_rope_head_dim": 0, "qk_nope_head_dim": 0}
    assert list(read(config("deepseek_v2", off))["groups"]) == ["full"]
    assert list(read(config("deepseek_v2", LATENT))["groups"]) == ["latent"]


def test_longcat_holds_two_attentions_in_a_layer(read: Any) -> None:
    hub = config("longcat_flash", LATENT, num_layers=5)
    del hub["num_hidden_layers"]
    model = read(hub)
    assert (model["num_layers"], model["groups"]["latent"]["layers"]) == (10, "0-9")


def test_every_layer_of_deepseek_v32_has_an_indexer(read: Any) -> None:
    assert read(config("deepseek_v32", LATENT, INDEX))["groups"]["index"] == {
        "kind": "sparse_index",
        "layers": "0-7",
        "selects": "latent",
        "index_heads": 4,
        "head_dim": 16,
        "topk": 64,
    }


@pytest.mark.parametrize(
    "more",
    [
        {"indexer_types": ["full", "full", "full", "shared", "shared", "shared", "full", "shared"]},
        {"index_topk_pattern": "FFFSSSFS"},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    ],
)
def test_shared_selections_need_no_index_keys(read: Any, more: Any) -> None:
    model = read(config("glm_moe_dsa", LATENT, INDEX, **more))
    assert model["groups"]["index"]["layers"] == [0, 1, 2, 6]
    assert model["groups"]["latent"]["layers"] == "0-7"


def test_hy4_has_sinks_and_its_own_schedule(read: Any) -> None:
    groups = read(config("hy_v4", LATENT, INDEX))["groups"]
    assert groups["latent"]["sinks"] is True
    assert groups["index"]["layers"] == [0, 1, 5]


def test_layers_may_read_the_latents_of_an_earlier_one(read: Any) -> None:
    more = {"kv_source_layers": [0, 1, 2, 2, 2, 5, 5, 5], "index_topk_pattern": "FFFSSFSS"}
    model = read(config("mistral_large4_text", LATENT, INDEX, **more))
    assert model["groups"]["latent"]["layers"] == [0, 1, 2, 5]
    assert model["aliases"] == [[3, 2], [4, 2], [6, 5], [7, 5]]


def test_minimax_m3_selects_blocks_in_its_sparse_layers(read: Any) -> None:
    sparse = {
        "use_sparse_attention": True,
        "sparse_attention_freq": [0, 0, 1, 1, 1, 1, 1, 1],
        "sparse_disable_index_value": [0, 0, 1, 1, 1, 1, 1, 1],
        "sparse_block_size": 128,
        "sparse_index_dim": 16,
        "sparse_num_index_heads": 4,
        "sparse_topk_blocks": 2,
    }
    groups = read(config("minimax_m3", sparse_attention_config=sparse))["groups"]
    assert (groups["full"]["layers"], groups["sparse"]["layers"]) == ("0-1", "2-7")
    assert groups["index"] == {
        "kind": "sparse_index",
        "layers": "2-7",
        "selects": "sparse",
        "index_heads": 4,
        "head_dim": 16,
        "topk": 2,
        "block_tokens": 128,
    }


def test_minimax_m3_in_the_words_of_transformers(read: Any) -> None:
    flat = {
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_block_size": 32,
        "index_topk_blocks": 2,
    }
    types = ["full_attention"] * 2 + ["minimax_m3_sparse"] * 6
    groups = read(config("minimax_m3_vl_text", flat, layer_types=types))["groups"]
    assert (groups["index"]["topk"], groups["index"]["block_tokens"]) == (2, 32)


def test_qwen4_selects_blocks_by_mean_keys(read: Any) -> None:
    indexer = {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 8,
    }
    groups = read(config("qwen4_exp_text", DELTA, indexer, head_dim=16))["groups"]
    assert list(groups) == ["full", "index", "state"]
    assert (groups["index"]["topk"], groups["index"]["block_tokens"]) == (8, 8)


# ---- recurrent states ----------------------------------------------------------------------


def test_gated_delta_states_between_attending_layers(read: Any) -> None:
    groups = read(config("qwen3_next", DELTA, full_attention_interval=4))["groups"]
    assert groups["full"]["layers"] == "3::4"
    assert groups["state"] == {
        "kind": "linear",
        "layers": "not 3::4",
        "recurrence": "gdn",
        "conv": [[96, 3]],
        "recurrent": {"head": 4, "key": 8, "value": 16},
    }


def test_the_config_may_name_the_type_of_the_state(read: Any) -> None:
    assert "state_dtype" not in read(config("qwen3_next", DELTA))["groups"]["state"]
    half = read(config("qwen3_5_text", DELTA, mamba_ssm_dtype="bfloat16"))
    assert half["groups"]["state"]["state_dtype"] == "bfloat16"


def test_olmo_hybrid_derives_its_linear_heads(read: Any) -> None:
    state = read(config("olmo_hybrid"))["groups"]["state"]
    assert state["recurrent"] == {"head": 8, "key": 6, "value": 12}
    assert state["conv"] == [[192, 3]]


def test_kimi_counts_layers_from_one(read: Any) -> None:
    delta = {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}
    delta |= {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]}
    groups = read(config("kimi_linear", LATENT, linear_attn_config=delta))["groups"]
    assert groups["latent"]["layers"] == "3::4"
    assert groups["state"] == {
        "kind": "linear",
        "layers": "not 3::4",
        "recurrence": "kda",
        "conv": [[192, 3]],
        "recurrent": {"head": 4, "key": 16, "value": 16},
    }


def test_ring_keeps_delta_states_or_lightning_ones(read: Any) -> None:
    hub = config("bailing_hybrid", LATENT, layer_group_size=4, head_dim=16)
    assert read(hub)["groups"]["state"]["recurrence"] == "kda"
    lightning = read(hub | {"group_norm_size": 4})["groups"]["state"]
    assert lightning["recurrent"] == {"head": 8, "key": 16, "value": 16}
    assert "conv" not in lightning


def test_glm5_next_has_latents_pooled_indices_and_states(read: Any) -> None:
    latent = {**LATENT, "qk_rope_head_dim": 0}
    delta = {"linear_num_heads": 4, "linear_head_dim": 16}
    groups = read(config("glm5_next_text", latent, INDEX, delta, index_kpool=16))["groups"]
    assert list(groups) == ["latent", "index", "state"]
    assert groups["latent"]["qk_rope_head_dim"] == 0
    picked = {key: groups["index"][key] for key in ("topk", "block_tokens", "tokens_per_entry")}
    assert picked == {"topk": 4, "block_tokens": 16, "tokens_per_entry": 16}


def test_minimax_lightning_has_a_state_and_no_convolution(read: Any) -> None:
    types = {"attn_type_list": [0, 0, 0, 1] * 2, "head_dim": 16}
    groups = read(config("minimax_m1", types))["groups"]
    assert groups["full"]["layers"] == "3::4"
    assert groups["state"] == {
        "kind": "linear",
        "layers": "not 3::4",
        "recurrence": "lightning",
        "recurrent": {"head": 8, "key": 16, "value": 16},
    }


@pytest.mark.parametrize(
    "more",
    [
        {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
        {"full_attn_idxs": [2, 6]},
    ],
)
def test_short_convolutions_keep_taps_minus_one(read: Any, more: Any) -> None:
    groups = read(config("lfm2", conv_L_cache=3, **more))["groups"]
    assert groups["full"]["layers"] == "2::4"
    assert groups["state"] == {
        "kind": "linear",
        "layers": "not 2::4",
        "recurrence": "none",
        "conv": [[64, 2]],
    }


MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
STATE2 = {"head": 8, "value": 16, "key": 32}


@pytest.mark.parametrize(
    ("model_type", "more", "attending", "recurrent"),
    [
        ("bamba", {"attn_layer_indices": [2, 5]}, "2::3", "not 2::3"),
        ("falcon_h1", {"mamba_d_ssm": 128}, "0-7", "0-7"),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 4}, "1::2", "0::2"),
    ],
)
def test_mamba2_beside_attention(
    read: Any, model_type: str, more: Any, attending: str, recurrent: str
) -> None:
    groups = read(config(model_type, MAMBA2, **more))["groups"]
    assert (groups["full"]["layers"], groups["state"]["layers"]) == (attending, recurrent)
    assert groups["state"]["conv"] == [[128 + 2 * 2 * 32, 3]]
    assert groups["state"]["recurrent"] == STATE2


def test_mamba_heads_may_be_left_to_the_inner_width(read: Any) -> None:
    hub = config("bamba", {**MAMBA2, "mamba_d_head": "auto"}, attn_layer_indices=[2])
    assert read(hub)["groups"]["state"]["recurrent"] == STATE2


NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "attention_head_dim": 32,
}


@pytest.mark.parametrize(
    "layers",
    [
        {"hybrid_override_pattern": "M-M*EM*-"},
        {
            "layers_block_type": [
                "mamba",
                "mlp",
                "mamba",
                "attention",
                "moe",
                "mamba",
                "attention",
                "mlp",
            ]
        },
    ],
)
def test_nemotron_h_spells_its_layers(read: Any, layers: Any) -> None:
    groups = read(config("nemotron_h", NEMOTRON, **layers))["groups"]
    assert (groups["full"]["layers"], groups["full"]["head_dim"]) == ("3::3", 32)
    assert groups["state"]["layers"] == [0, 2, 5]
    assert groups["state"]["recurrent"] == STATE2


def test_zamba2_heads_are_twice_as_wide_and_its_hybrid_layers_keep_both(read: Any) -> None:
    mamba = {"n_mamba_heads": 8, "mamba_d_state": 32, "mamba_ngroups": 2, "mamba_expand": 2}
    groups = read(config("zamba2", mamba, hybrid_layer_ids=[3, 7]))["groups"]
    assert groups["full"] == {
        "kind": "full",
        "layers": "3::4",
        "q_heads": 8,
        "kv_heads": 2,
        "head_dim": 16,
        "scale": 8**-0.5,
    }
    assert groups["state"]["layers"] == "0-7"
    assert groups["state"]["recurrent"] == {"head": 8, "value": 16, "key": 32}


def test_jamba_keeps_states_of_the_first_mamba(read: Any) -> None:
    mamba = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
    periods = {"attn_layer_period": 4, "attn_layer_offset": 2}
    groups = read(config("jamba", mamba, **periods))["groups"]
    assert groups["full"]["layers"] == "2::4"
    assert groups["state"]["recurrent"] == {"channel": 128, "state": 16}
    assert groups["state"]["conv"] == [[128, 3]]


def test_pure_mamba_has_states_and_no_longest_sequence(read: Any) -> None:
    one = {"model_type": "falcon_mamba", "num_hidden_layers": 4, "hidden_size": 32}
    model = read(one | {"intermediate_size": 64, "expand": 16, "state_size": 8, "conv_kernel": 4})
    assert model["max_context"] is None
    assert model["groups"]["state"]["recurrent"] == {"channel": 64, "state": 8}
    two = {"model_type": "mamba2", "num_hidden_layers": 4, "hidden_size": 32, "expand": 2}
    two |= {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 16}
    assert read(two)["groups"]["state"]["recurrent"] == {"head": 8, "value": 8, "key": 16}


def test_inkling_keeps_four_convolutions_a_layer(read: Any) -> None:
    hub = config("inkling_text", head_dim=8, swa_num_key_value_heads=4, sliding_window_size=32)
    groups = read(hub)["groups"]
    assert groups["conv_full"]["conv"] == [[16, 3], [16, 3]]
    assert groups["conv_local"]["conv"] == [[32, 3], [32, 3]]
    assert groups["conv_hidden"] == {
        "kind": "linear",
        "layers": "0-7",
        "recurrence": "none",
        "conv": [[64, 3], [64, 3]],
    }
    assert groups["full"]["scale"] == 1 / 8
