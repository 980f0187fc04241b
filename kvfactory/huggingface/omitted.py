"""What a key that a config leaves out stands for, by model type, as transformers reads it."""

from __future__ import annotations

from collections.abc import Mapping

_HEAD_DIMS = {
    256: """gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text
    gemma4_unified_text qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp
    qwen4_exp_text vaultgemma""",
    192: "mimo_v2_flash",
    128: """afmoe beam cohere2_moe cosmos3_edge_text cwm ernie4_5 flint glm glm4 helium hy_v3
    inkling_mm_model inkling_text internlm3 iquestcoder kolibri1 laguna lara_mini lfm3 llama4
    llama4_text mellum minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral3 molmo2_text
    muse_glimmer_text paddleocr_vl paddleocr_vl_text qwen3 qwen3_vl qwen3_vl_text
    seed_oss solar_open step3p5 step3p7""",
    64: "gpt_oss muse_spark_text sarvam_moe",
}
HEAD_DIM: Mapping[str, int] = {
    model_type: dim for dim, types in _HEAD_DIMS.items() for model_type in types.split()
}
"""The head_dim of model types that do not divide the hidden size by the heads."""

EACH_ITS_OWN = frozenset(
    """afmoe apertus apertus1p5 apertus1p5_text aquila arcee aria_text chameleon cohere cohere2
    cohere2_moe cohere_compass_text deepseek deepseek_v2 deepseek_vl_v2 flex_olmo granite
    granite4_vision_text granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan
    hunyuan_moe hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text hyperclovax internlm internlm2
    jais2 llama minicpm nanochat nemotron olmo olmo2 olmo3 olmo_hybrid olmoe orion persimmon phi
    phi3 phi3_v phi4mm qwen stablelm xverse zamba2""".split()
)
"""Model types whose configs may leave the kv heads out: as many as query heads."""
