"""A minimal config per row of ``tests/data/models.json``, in the words of the hub or transformers.

Keys that decide nothing about the cache are left out.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def dense(
    model_type: str, layers: int, hidden: int, q: int, kv: int, context: int, **more: Any
) -> Config:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": q,
        "num_key_value_heads": kv,
        "max_position_embeddings": context,
        **more,
    }


def latent(
    model_type: str, layers: int, hidden: int, q: int, nope: int, context: int, **more: Any
) -> Config:
    ranks = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": nope}
    return dense(model_type, layers, hidden, q, q, context, **(ranks | more))


def index(heads: int, topk: int = 2048) -> Config:
    return {"index_n_heads": heads, "index_head_dim": 128, "index_topk": topk}


def delta(value_heads: int) -> Config:
    return {
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
    }


def nemotron(heads: int, dim: int = 64) -> Config:
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": dim,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
    }


def mamba(heads: int, dim: int | str, groups: int, state: int, expand: int = 2) -> Config:
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": dim,
        "mamba_n_groups": groups,
        "mamba_d_state": state,
        "mamba_d_conv": 4,
        "mamba_expand": expand,
    }


def v4(layers: int, q: int, rates: list[int]) -> Config:
    more = {"head_dim": 512, "sliding_window": 128, "compress_ratios": rates}
    return dense("deepseek_v4", layers, 4096, q, 1, 1048576, **more)


def blocks(kept: str) -> Config:
    """``kept``: runs of layers with attention and without, as counts."""
    attend = {"n_heads_in_group": 8, "no_op": False, "replace_with_linear": False}
    pattern = [kind for n, run in enumerate(kept.split()) for kind in [n % 2 == 0] * int(run)]
    none = {"n_heads_in_group": None, "no_op": True}
    return {"block_configs": [{"attention": attend if on else none} for on in pattern]}


_QWEN3 = {"head_dim": 128, "use_sliding_window": False, "sliding_window": None}
_YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
_FULL, _LOCAL = "full_attention", "sliding_attention"
_MIMO = {
    "head_dim": 192,
    "v_head_dim": 128,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, *[0, 1, 1, 1, 1, 1] * 7, 0],
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}
_STEP = {
    "head_dim": 128,
    "sliding_window": 512,
    "num_attention_groups": 8,
    "layer_types": [*[_FULL, _LOCAL, _LOCAL, _LOCAL] * 12],
    "num_nextn_predict_layers": 3,
    "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8},
}
_M3 = {
    "head_dim": 128,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_attention_freq": [0, 0, 0, *[1] * 57],
        "sparse_disable_index_value": [0, 0, 0, *[1] * 57],
        "sparse_block_size": 128,
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 4,
        "sparse_topk_blocks": 16,
    },
}
_K3_FULL = [*range(4, 93, 4), 93]
_QSA = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
}
_MAMBA_2 = {"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "expand": 2}
_NEMO3_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_NEMO3_SUPER = (
    "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
)


def _ultra() -> list[str]:
    attention = {7, 14, 23, 32, 39, 48, 57, 64, 73, 82, 89, 98}
    found: list[str] = []
    for layer in range(108):
        if layer in attention:
            found.append("attention")
        else:
            found.append("moe" if found and found[-1] in ("mamba", "attention") else "mamba")
    return found


def _kimi(layers: int, full: list[int], heads: int) -> Config:
    rest = [layer for layer in range(1, layers + 1) if layer not in full]
    nested = {"num_heads": heads, "head_dim": 128, "short_conv_kernel_size": 4}
    return {"linear_attn_config": {**nested, "full_attn_layers": full, "kda_layers": rest}}


ROWS: dict[str, Config] = {
    "Qwen3-0.6B": dense("qwen3", 28, 1024, 16, 8, 40960, **_QWEN3),
    "Qwen3-8B": dense("qwen3", 36, 4096, 32, 8, 40960, **_QWEN3),
    "Qwen3-32B": dense("qwen3", 64, 5120, 64, 8, 40960, **_QWEN3),
    "Qwen3-30B-A3B": dense("qwen3_moe", 48, 2048, 32, 4, 40960, **_QWEN3),
    "Qwen3-235B-A22B": dense("qwen3_moe", 94, 4096, 64, 4, 40960, **_QWEN3),
    "Llama-3.1-8B": dense("llama", 32, 4096, 32, 8, 131072),
    "Llama-3.1-70B": dense("llama", 80, 8192, 64, 8, 131072),
    "Llama-3.3-Nemotron-Super-49B (NAS)": dense(
        "nemotron-nas", 80, 8192, 64, 8, 131072, **blocks("6 2 3 1 30 10 1 18 9")
    )
    | {"num_key_value_heads": None},
    "MiniMax-M2.5/M2.7": dense("minimax_m2", 62, 3072, 48, 8, 196608, head_dim=128),
    "GLM-4.7 (355B, glm4_moe)": dense("glm4_moe", 92, 5120, 96, 8, 202752, head_dim=128),
    "Hunyuan-A13B": dense(
        "hunyuan_v1_moe", 32, 4096, 32, 8, 262144, head_dim=128, use_cla=False, cla_share_factor=2
    ),
    "Hunyuan-Large (CLA)": dense(
        "hunyuan", 64, 6400, 80, 8, 131072, use_cla=True, cla_share_factor=2
    ),
    "Hy3 (hy_v3)": dense("hy_v3", 80, 4096, 64, 8, 131072, head_dim=128),
    "Phi-3-mini-4k": dense("phi3", 32, 3072, 32, 32, 4096, sliding_window=2047),
    "Phi-4-mini": dense("phi3", 32, 3072, 24, 8, 131072, sliding_window=262144),
    "Step3-321B (MFA)": {
        "model_type": "step3_text",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 64,
        "num_attention_groups": 1,
        "head_dim": 256,
        "max_seq_len": 65536,
    },
    "Mistral-7B-v0.1": dense("mistral", 32, 4096, 32, 8, 32768, sliding_window=4096),
    "Gemma-2-9B": dense(
        "gemma2",
        42,
        3584,
        16,
        8,
        8192,
        head_dim=256,
        sliding_window=4096,
        query_pre_attn_scalar=256,
    ),
    "Gemma-3-27B": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 62,
            "hidden_size": 5376,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
            "query_pre_attn_scalar": 168,
            "max_position_embeddings": 131072,
        },
    },
    "Gemma-4-26B-A4B": dense(
        "gemma4_text",
        30,
        2816,
        16,
        8,
        262144,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        sliding_window=1024,
    ),
    "Gemma-3n-E4B": dense(
        "gemma3n_text",
        35,
        2048,
        8,
        2,
        32768,
        head_dim=256,
        sliding_window=512,
        num_kv_shared_layers=15,
    ),
    "gpt-oss-20b": dense("gpt_oss", 24, 2880, 64, 8, 131072, head_dim=64, sliding_window=128),
    "gpt-oss-120b": dense("gpt_oss", 36, 2880, 64, 8, 131072, head_dim=64, sliding_window=128),
    "MiMo-V2-Flash": dense("mimo_v2_flash", 48, 4096, 64, 4, 262144, **_MIMO),
    "Step-3.5/3.7-Flash": {**dense("step3p5", 45, 4096, 64, 8, 262144), **_STEP},
    "OLMo-3-7B": dense("olmo3", 32, 4096, 32, 32, 65536, sliding_window=4096),
    "OLMo-3-32B": dense("olmo3", 64, 5120, 40, 8, 65536, sliding_window=4096),
    "Llama-4-Scout-17B-16E": dense(
        "llama4_text", 48, 5120, 40, 8, 10485760, head_dim=128, attention_chunk_size=8192
    ),
    "Inkling (text, class defaults)": dense(
        "inkling_text",
        66,
        6144,
        64,
        8,
        131072,
        head_dim=128,
        swa_num_key_value_heads=16,
        sliding_window_size=512,
        conv_kernel_size=4,
    ),
    "LFM3 (class defaults)": dense("lfm3", 24, 2048, 16, 4, 128000, head_dim=128),
    "DeepSeek-V3": latent("deepseek_v3", 61, 7168, 128, 128, 163840, rope_scaling=_YARN),
    "DeepSeek-R1": latent("deepseek_v3", 61, 7168, 128, 128, 163840, rope_scaling=_YARN),
    "Kimi-K2-Instruct": latent("kimi_k2", 61, 7168, 64, 128, 131072),
    "Kimi-K2.5": {
        "model_type": "kimi_k25",
        "text_config": latent("deepseek_v3", 61, 7168, 64, 128, 262144),
    },
    "GLM-4.7-Flash (glm4_moe_lite)": latent("glm4_moe_lite", 47, 2048, 20, 192, 202752),
    "DeepSeek-V3.2": latent("deepseek_v32", 61, 7168, 128, 128, 163840, **index(64)),
    "GLM-5": latent("glm_moe_dsa", 78, 6144, 64, 192, 202752, **index(32)),
    "GLM-5.1": latent("glm_moe_dsa", 78, 6144, 64, 192, 202752, **index(32)),
    "GLM-5.2": latent(
        "glm_moe_dsa",
        78,
        6144,
        64,
        192,
        1048576,
        **index(32),
        index_topk_freq=4,
        index_skip_topk_offset=3,
    ),
    "Hy4-preview (hy_v4)": latent("hy_v4", 34, 2816, 32, 192, 262144, **index(16)),
    "MiniMax-M3": dense("minimax_m3", 60, 6144, 64, 4, 1048576, **_M3),
    "DeepSeek-V4-Flash": v4(43, 64, [0, 0, *[4, 128] * 20, 4, 0]),
    "DeepSeek-V4-Pro": v4(61, 128, [128, *[128, 4] * 30, 0]),
    "Mistral-Large-4 (class defaults)": latent(
        "mistral_large4_text", 72, 6144, 64, 64, 1048576, **index(32)
    ),
    "Mistral-4 (class defaults)": latent("mistral4", 36, 4096, 32, 64, 1048576, kv_lora_rank=256),
    "LongCat-Flash": {
        key: value
        for key, value in latent("longcat_flash", 0, 6144, 64, 128, 131072, num_layers=28).items()
        if key != "num_hidden_layers"
    },
    "Qwen3-Next-80B-A3B": dense("qwen3_next", 48, 2048, 16, 2, 262144, **delta(32)),
    "Qwen3.5-27B": {
        "model_type": "qwen3_5",
        "text_config": dense("qwen3_5_text", 64, 5120, 24, 4, 262144, **delta(48)),
    },
    "Qwen3.5-35B-A3B": dense("qwen3_5_moe_text", 40, 2048, 16, 2, 262144, **delta(32)),
    "Qwen3.5-122B-A10B": dense("qwen3_5_moe_text", 48, 3072, 32, 2, 262144, **delta(64)),
    "Qwen3.5-397B-A17B": dense("qwen3_5_moe_text", 60, 4096, 32, 2, 262144, **delta(64)),
    "Qwen3.5-9B": dense("qwen3_5_text", 32, 4096, 16, 4, 262144, **delta(32)),
    "Qwen4-exp (class defaults)": dense(
        "qwen4_exp_text", 40, 2048, 16, 2, 32768, **delta(32), **_QSA
    ),
    "OLMo-Hybrid (class defaults)": dense("olmo_hybrid", 32, 3840, 30, 30, 65536),
    "Kimi-Linear-48B-A3B": latent(
        "kimi_linear", 27, 2304, 32, 128, 1048576, **_kimi(27, [4, 8, 12, 16, 20, 24, 27], 32)
    ),
    "Kimi-K3": {
        "model_type": "kimi_k3",
        "text_config": latent("kimi_linear", 93, 7168, 96, 128, 1048576, **_kimi(93, _K3_FULL, 96)),
    },
    "GLM-5-Next / GLM-5.3-Flash (class defaults)": latent(
        "glm5_next_text",
        45,
        4096,
        64,
        256,
        1048576,
        qk_rope_head_dim=0,
        linear_num_heads=64,
        linear_head_dim=128,
        index_kpool=16,
        **index(32),
    ),
    "Bailing/Ring hybrid (class defaults)": latent(
        "bailing_hybrid", 42, 2560, 32, 128, 262144, head_dim=128, layer_group_size=6
    ),
    "MiniMax-Text-01 / M1": dense(
        "minimax_m1", 80, 6144, 64, 8, 10240000, head_dim=128, attn_type_list=[*[0] * 7, 1] * 10
    ),
    "Jamba-1.5-Mini (= v0.1 shapes)": dense(
        "jamba",
        32,
        4096,
        32,
        8,
        262144,
        attn_layer_period=8,
        attn_layer_offset=4,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
    ),
    "Bamba-9B": dense(
        "bamba", 32, 4096, 32, 8, 4096, attn_layer_indices=[9, 18, 27], **mamba(128, 64, 1, 128)
    ),
    "Falcon-H1-34B": dense(
        "falcon_h1",
        72,
        5120,
        20,
        4,
        262144,
        head_dim=128,
        mamba_d_ssm=4096,
        **mamba(32, 128, 2, 256),
    ),
    "Falcon-H1-0.5B": dense(
        "falcon_h1", 36, 1024, 8, 2, 16384, head_dim=64, mamba_d_ssm=1536, **mamba(24, 64, 1, 128)
    ),
    "Nemotron-H-8B": dense(
        "nemotron_h",
        52,
        4096,
        32,
        8,
        8192,
        attention_head_dim=128,
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        **nemotron(128),
    ),
    "Nemotron-Nano-9B-v2": dense(
        "nemotron_h",
        56,
        4480,
        40,
        8,
        131072,
        head_dim=128,
        hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        **nemotron(128, 80),
    ),
    "Nemotron-3-Nano-30B-A3B": dense(
        "nemotron_h",
        52,
        2688,
        32,
        2,
        262144,
        head_dim=128,
        hybrid_override_pattern=_NEMO3_NANO,
        **nemotron(64),
    ),
    "Nemotron-3-Super-120B-A12B": dense(
        "nemotron_h",
        88,
        4096,
        32,
        2,
        262144,
        head_dim=128,
        hybrid_override_pattern=_NEMO3_SUPER,
        **nemotron(128),
    ),
    "Nemotron-3-Ultra-550B-A55B": dense(
        "nemotron_h",
        108,
        8192,
        64,
        2,
        262144,
        head_dim=128,
        layers_block_type=_ultra(),
        **nemotron(256),
    ),
    "Granite-4.0-H-Small": dense(
        "granitemoehybrid",
        40,
        4096,
        32,
        8,
        131072,
        layer_types=["attention" if n % 10 == 5 else "mamba" for n in range(40)],
        attention_multiplier=0.0078125,
        **mamba(128, 64, 1, 128),
    ),
    "LFM2-1.2B": dense(
        "lfm2", 16, 2048, 32, 8, 128000, conv_L_cache=3, full_attn_idxs=[2, 5, 8, 10, 12, 14]
    ),
    "LFM2-8B-A1B": dense(
        "lfm2_moe",
        24,
        2048,
        32,
        8,
        128000,
        conv_L_cache=3,
        layer_types=[_FULL if n in (2, 6, 10, 14, 18, 21) else "conv" for n in range(24)],
    ),
    "Zamba2-7B": dense(
        "zamba2",
        81,
        3584,
        32,
        32,
        4096,
        hybrid_layer_ids=[6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77],
        n_mamba_heads=112,
        mamba_d_state=64,
        mamba_ngroups=2,
        mamba_d_conv=4,
        mamba_expand=2,
    ),
    "Codestral-Mamba-7B (mamba2)": {
        "model_type": "mamba2",
        "num_hidden_layers": 64,
        "hidden_size": 4096,
        **_MAMBA_2,
    },
    "Falcon-Mamba-7B (mamba1)": {
        "model_type": "falcon_mamba",
        "num_hidden_layers": 64,
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "state_size": 16,
        "conv_kernel": 4,
    },
    "Whisper-large-v3": {
        "model_type": "whisper",
        "d_model": 1280,
        "decoder_layers": 32,
        "decoder_attention_heads": 20,
        "max_source_positions": 1500,
        "max_target_positions": 448,
    },
    "Llama-3.2-11B-Vision (mllama)": {
        "model_type": "mllama",
        "text_config": dense(
            "mllama_text_model",
            40,
            4096,
            32,
            8,
            131072,
            cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38],
        ),
        "vision_config": {"image_size": 560, "patch_size": 14, "max_num_tiles": 4},
    },
}
