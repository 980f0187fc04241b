"""Dense and windowed attention: heads, widths, windows, scales, one family at a time."""

from __future__ import annotations

import logging
from typing import Any

import pytest

BASE = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def config(model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **BASE, **more}


def kinds(model: dict[str, Any]) -> dict[str, Any]:
    return {name: group["layers"] for name, group in model["groups"].items()}


def test_a_dense_config_names_heads_widths_context_and_type(read: Any) -> None:
    model = read(config("llama", head_dim=16, torch_dtype="float16"))
    assert model["groups"] == {
        "full": {"kind": "full", "layers": "0-7", "q_heads": 8, "kv_heads": 2, "head_dim": 16}
    }
    assert (model["num_layers"], model["max_context"], model["dtype"]) == (8, 4096, "float16")
    assert model["aliases"] == []


def test_heads_share_the_hidden_size_without_a_head_dim(read: Any) -> None:
    assert read(config("llama"))["groups"]["full"]["head_dim"] == 8


def test_each_query_head_has_its_own_kv_head_unless_told_otherwise(read: Any) -> None:
    assert read(config("llama", num_key_value_heads=None))["groups"]["full"]["kv_heads"] == 8


def test_layers_of_multi_token_prediction_are_not_counted(read: Any) -> None:
    types = ["full_attention", "sliding_attention"] * 4 + ["sliding_attention"]
    extra = {"layer_types": types, "num_nextn_predict_layers": 1, "sliding_window": 32}
    model = read(config("step3p5", **extra))
    assert kinds(model) == {"full": "0::2", "local": "1::2"}


def test_weights_in_eight_bits_say_nothing_of_the_cache(read: Any) -> None:
    quantized = {"quantization_config": {"quant_method": "fp8"}, "dtype": "float8_e4m3fn"}
    assert read(config("qwen3", **quantized))["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("model_type", "more", "expected"),
    [
        ("mistral", {"sliding_window": 512}, {"local": "0-7"}),
        ("mistral", {}, {"full": "0-7"}),  # the default window is not below the longest sequence
        ("mistral", {"sliding_window": None}, {"full": "0-7"}),
        ("mixtral", {}, {"full": "0-7"}),
        ("phi3", {"sliding_window": 2047}, {"local": "0-7"}),
        ("phi3", {"sliding_window": 262144}, {"full": "0-7"}),
        ("starcoder2", {"sliding_window": 1024}, {"local": "0-7"}),
        ("qwen2", {"sliding_window": 128, "use_sliding_window": False}, {"full": "0-7"}),
        ("qwen2", {"sliding_window": 128}, {"full": "0-7"}),
        (
            "qwen3",
            {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 6},
            {"full": "0-5", "local": "6-7"},
        ),
        (
            "qwen2_moe",
            {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 4},
            {"full": [1, 3, 4, 5, 6, 7], "local": [0, 2]},
        ),
        ("qwen3_moe", {"sliding_window": 128, "use_sliding_window": True}, {"local": "0-7"}),
        ("gemma2", {"sliding_window": 64}, {"full": "1::2", "local": "0::2"}),
        ("gemma3_text", {"sliding_window": 64}, {"full": [5], "local": [0, 1, 2, 3, 4, 6, 7]}),
        ("gemma3_text", {"sliding_window_pattern": 4}, {"full": "3::4", "local": "not 3::4"}),
        ("cohere2", {"sliding_window": 64}, {"full": "3::4", "local": "not 3::4"}),
        ("olmo3", {"sliding_window": 64}, {"full": "3::4", "local": "not 3::4"}),
        ("cwm", {"sliding_window": 64}, {"full": "0::4", "local": "not 0::4"}),
        ("exaone4", {"sliding_window": 64}, {"full": "3::4", "local": "not 3::4"}),
        ("exaone4", {"sliding_window": None}, {"full": "0-7"}),
        (
            "exaone4",
            {"sliding_window": 64, "sliding_window_pattern": "LLG"},
            {"full": [2, 5, 7], "local": [0, 1, 3, 4, 6]},
        ),
        ("afmoe", {"global_attn_every_n_layers": 2}, {"full": "1::2", "local": "0::2"}),
        ("gpt_oss", {}, {"full": "1::2", "local": "0::2"}),
        ("smollm3", {}, {"full": "0-7"}),
        (
            "smollm3",
            {"sliding_window": 64, "use_sliding_window": True},
            {"full": "not 3::4", "local": "3::4"},
        ),
    ],
)
def test_which_layers_have_a_window(read: Any, model_type: str, more: Any, expected: Any) -> None:
    assert kinds(read(config(model_type, **more))) == expected


def test_a_window_counts_the_query_as_transformers_does(read: Any) -> None:
    model = read(config("gpt_oss", sliding_window=128))
    assert model["groups"]["local"]["window_tokens"] == 128
    assert all(group["sinks"] for group in model["groups"].values())


@pytest.mark.parametrize(
    ("model_type", "more", "scale"),
    [
        ("gemma2", {"query_pre_attn_scalar": 144}, 1 / 12),
        ("gemma3_text", {"head_dim": 8}, 1 / 16),
        ("granite", {"attention_multiplier": 0.25}, 0.25),
        ("gemma4_text", {"layer_types": ["full_attention"] * 8}, 1.0),
        ("gpt2", {"scale_attn_weights": False}, 1.0),
    ],
)
def test_logit_scales(read: Any, model_type: str, more: Any, scale: float) -> None:
    assert read(config(model_type, **more))["groups"]["full"]["scale"] == pytest.approx(scale)


def test_a_scale_equal_to_the_default_is_left_out(read: Any) -> None:
    model = read(config("granite", head_dim=16, attention_multiplier=0.25))
    assert "scale" not in model["groups"]["full"]


def test_gemma2_caps_its_logits_unless_told_not_to(read: Any) -> None:
    capped, bare = config("gemma2"), config("gemma2", attn_logit_softcapping=None)
    assert read(capped)["groups"]["local"]["soft_cap"] == 50.0
    assert "soft_cap" not in read(bare)["groups"]["local"]


def test_mimo_leaves_the_query_out_of_its_window(read: Any) -> None:
    hub = config(
        "mimo_v2_flash",
        head_dim=24,
        v_head_dim=16,
        sliding_window=128,
        hybrid_layer_pattern=[0, 1, 1, 0, 1, 1, 0, 1],
        swa_num_key_value_heads=4,
        swa_head_dim=24,
        swa_v_head_dim=16,
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
    )
    groups = read(hub)["groups"]
    assert groups["local"]["window_tokens"] == 129
    assert (groups["full"]["kv_heads"], groups["local"]["kv_heads"]) == (2, 4)
    assert (groups["full"]["head_dim"], groups["full"]["v_head_dim"]) == (24, 16)
    assert groups["local"]["sinks"] is True
    assert "sinks" not in groups["full"]


def test_mimo_in_the_words_of_transformers_counts_the_query(read: Any) -> None:
    types = ["full_attention", *["sliding_attention"] * 7]
    model = read(config("mimo_v2_flash", sliding_window=129, layer_types=types))
    assert model["groups"]["local"]["window_tokens"] == 129
    assert model["groups"]["local"]["kv_heads"] == 4  # twice those of the full layers


def test_step_has_more_query_heads_in_its_windows(read: Any) -> None:
    hub = config("step3p5", sliding_window=32, num_attention_groups=2)
    del hub["num_key_value_heads"]
    hub["layer_types"] = ["full_attention", *["sliding_attention"] * 3] * 2
    hub["attention_other_setting"] = {"num_attention_heads": 12, "num_attention_groups": 2}
    groups = read(hub)["groups"]
    assert (groups["full"]["q_heads"], groups["local"]["q_heads"]) == (8, 12)
    assert (groups["full"]["head_dim"], groups["local"]["head_dim"]) == (128, 128)


def test_llama4_sees_chunks_except_without_rotary_embedding(read: Any) -> None:
    model = read(config("llama4_text", attention_chunk_size=64))
    assert kinds(model) == {"full": "3::4", "chunked": "not 3::4"}
    assert model["groups"]["chunked"]["chunk_tokens"] == 64
    listed = read(config("llama4_text", no_rope_layers=[0, 1] * 4))
    assert kinds(listed) == {"full": "0::2", "chunked": "1::2"}


def test_gemma4_full_layers_are_wider_and_share_more(read: Any) -> None:
    hub = config("gemma4_text", global_head_dim=64, head_dim=32, sliding_window=16)
    hub |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    groups = read(hub)["groups"]
    assert (groups["full"]["head_dim"], groups["full"]["kv_heads"]) == (64, 1)
    assert (groups["local"]["head_dim"], groups["local"]["kv_heads"]) == (32, 2)
    assert groups["full"]["layers"] == "5::2"  # the last layer always sees everything


def test_layers_that_share_kv_are_aliases_of_the_last_owner_of_their_type(read: Any) -> None:
    hub = config("gemma3n_text", num_hidden_layers=10, num_kv_shared_layers=4)
    model = read(hub)
    assert kinds(model) == {"full": [4], "local": [0, 1, 2, 3, 5]}
    assert model["aliases"] == [[6, 5], [7, 5], [8, 5], [9, 4]]


def test_cross_layer_attention_keeps_every_second_layer(read: Any) -> None:
    model = read(config("hunyuan", use_cla=True, cla_share_factor=2))
    assert kinds(model) == {"full": "0::2"}
    assert model["aliases"] == [[1, 0], [3, 2], [5, 4], [7, 6]]


def test_pruned_layers_keep_nothing_and_others_thin_out(read: Any) -> None:
    blocks = [{"attention": {"n_heads_in_group": 4, "no_op": False}, "ffn": {"no_op": False}}] * 8
    blocks[2] = {"attention": {"no_op": True, "n_heads_in_group": None}}
    blocks[5] = {"attention": {"replace_with_linear": True}}
    blocks[7] = {"attention": {"n_heads_in_group": 8}}
    model = read(config("nemotron-nas", num_key_value_heads=None, block_configs=blocks))
    assert kinds(model) == {"full": [0, 1, 3, 4, 6], "full_2": [7]}
    assert model["groups"]["full"]["kv_heads"] == 2
    assert model["groups"]["full_2"]["kv_heads"] == 1


def test_per_layer_overrides_split_a_group(read: Any) -> None:
    single = {"02": {"num_key_value_heads": 4}, "5": {"skip": ["attention"]}}
    model = read(config("llama", per_layer_config=single))
    assert kinds(model) == {"full": "not 2::3", "full_2": [2]}


def test_openelm_heads_grow_from_layer_to_layer(read: Any) -> None:
    hub = {
        "model_type": "openelm",
        "num_transformer_layers": 3,
        "head_dim": 16,
        "num_query_heads": [4, 4, 8],
        "num_kv_heads": [1, 1, 2],
        "max_context_length": 2048,
    }
    model = read(hub)
    assert kinds(model) == {"full": "0-1", "full_2": [2]}
    assert model["max_context"] == 2048


@pytest.mark.parametrize(
    ("hub", "kv_heads"),
    [
        ({"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 32}, 4),
        ({"model_type": "gptj", "n_layer": 2, "n_head": 4, "n_embd": 32, "rotary_dim": 4}, 4),
        ({"model_type": "gpt_bigcode", "n_layer": 2, "n_head": 4, "n_embd": 32}, 1),
        ({"model_type": "bloom", "n_layer": 2, "num_attention_heads": 4, "n_embed": 32}, 4),
        (
            {
                "model_type": "opt",
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "hidden_size": 32,
            },
            4,
        ),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "hidden_size": 32,
            },
            1,
        ),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "hidden_size": 32,
                "new_decoder_architecture": True,
                "num_kv_heads": 2,
            },
            2,
        ),
        (
            {
                "model_type": "chatglm",
                "num_layers": 2,
                "num_attention_heads": 4,
                "hidden_size": 32,
                "kv_channels": 8,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
            },
            2,
        ),
        (
            {
                "model_type": "dbrx",
                "n_layers": 2,
                "n_heads": 4,
                "d_model": 32,
                "attn_config": {"kv_n_heads": 2},
            },
            2,
        ),
        ({"model_type": "mpt", "n_layers": 2, "n_heads": 4, "d_model": 32, "attn_config": {}}, 4),
        (
            {
                "model_type": "step3_text",
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_attention_groups": 1,
                "hidden_size": 64,
                "head_dim": 8,
            },
            1,
        ),
    ],
)
def test_earlier_decoders_have_words_of_their_own(read: Any, hub: Any, kv_heads: int) -> None:
    group = read(hub)["groups"]["full"]
    assert (group["q_heads"], group["kv_heads"], group["head_dim"]) == (4, kv_heads, 8)
    assert group["layers"] == "0-1"


def test_gpt_neo_alternates_windows_and_scales_nothing(read: Any) -> None:
    hub = {"model_type": "gpt_neo", "num_layers": 4, "num_heads": 4, "hidden_size": 32}
    hub |= {"attention_types": [[["global", "local"], 2]], "window_size": 16}
    groups = read(hub)["groups"]
    assert {name: group["layers"] for name, group in groups.items()} == {
        "full": "0::2",
        "local": "1::2",
    }
    assert all(group["scale"] == 1.0 for group in groups.values())
    assert groups["local"]["window_tokens"] == 16


def test_what_a_spec_cannot_carry_is_said_aloud(read: Any, caplog: Any) -> None:
    hub = {"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 32}
    with caplog.at_level(logging.WARNING, logger="kvfactory"):
        read(hub)
    assert "ALiBi" in caplog.text


def test_whisper_attends_over_its_encoder(read: Any) -> None:
    hub = {"model_type": "whisper", "decoder_layers": 4, "decoder_attention_heads": 4}
    hub |= {"d_model": 64, "max_source_positions": 1500, "max_target_positions": 448}
    model = read(hub)
    assert model["groups"]["cross"] == {
        "kind": "cross",
        "layers": "0-3",
        "encoder_tokens": 1500,
        "causal": False,
        "q_heads": 4,
        "kv_heads": 4,
        "head_dim": 16,
    }
    assert model["max_context"] == 448


def test_mllama_replaces_layers_by_attention_over_tiles(read: Any) -> None:
    text = config("mllama_text_model", cross_attention_layers=[3, 7])
    vision = {"image_size": 560, "patch_size": 14, "max_num_tiles": 4}
    model = read({"model_type": "mllama", "text_config": text, "vision_config": vision})
    assert kinds(model) == {"full": "not 3::4", "cross": "3::4"}
    assert model["groups"]["cross"]["encoder_tokens"] == 6404
