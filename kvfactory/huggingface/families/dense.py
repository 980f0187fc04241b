"""Models whose every layer attends over everything, under the standard keys."""

from __future__ import annotations

from functools import partial

from kvfactory.huggingface.attention import STANDARD, Heads, Keys, Rule, read_attention, read_heads
from kvfactory.huggingface.doubts import refuse_doubts
from kvfactory.huggingface.family import Family, Geometry
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.groups import collect, full, gqa
from kvfactory.huggingface.layertypes import num_layers

_TYPES = """
apertus apertus1p5 apertus1p5_text aquila arcee arctic aria_text bailing_moe bailing_moe_v2 bitnet
chameleon cohere cosmos3_edge_text deepseek emu3_text_model ernie4_5 ernie4_5_moe ernie4_5_moe_vl
ernie4_5_vl_moe ernie4_5_vl_moe_text flex_olmo gemma glm glm4 glm4_moe glm4v glm4v_moe
glm4v_moe_text glm4v_text glm_ocr_text helium hy_v3 internlm internlm2 internlm3 iquestcoder jais2
llama minicpm molmo2_text nanochat nemotron olmo olmo2 olmoe orion paddleocr_vl paddleocr_vl_text
persimmon phi qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text sarvam_moe seed_oss solar_open
stablelm xverse
""".split()
_KNOWN = (
    "compression_ratio",  # ERNIE: of rotary positions
    "spatial_conv_size",  # ERNIE-VL: of the image resampler
    "temporal_conv_size",
    "use_temporal_conv",
    "parallel_attn_mlp_res",  # Arctic: the order of its blocks
    "use_logn_attn",  # Qwen: a factor of the queries
)

_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32},
    "gemma": {
        "num_hidden_layers": 28,
        "hidden_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "cohere": {"num_hidden_layers": 40, "hidden_size": 8192, "num_attention_heads": 64},
}


def _dense(config: Fields, keys: Keys = STANDARD) -> Geometry:
    refuse_doubts(config, known=(*_KNOWN, *keys.dim))
    return read_attention(config, Rule(keys=keys))


def _granite(config: Fields) -> Geometry:
    """Granite multiplies its logits by a number of its own."""
    refuse_doubts(config, known=("attention_multiplier",))
    return read_attention(config, Rule(scale=multiplier))


def multiplier(config: Fields, heads: Heads) -> float:
    """The logit scale ``attention_multiplier``."""
    return config.number("attention_multiplier", default=1.0)


def _hyperclovax(config: Fields) -> Geometry:
    refuse_doubts(config, known=("attention_multiplier",))
    default = read_heads(config).dim ** -0.5
    scale = config.number("attention_multiplier", default=default)
    return read_attention(config, Rule(scale=lambda *_: scale))


def _minimax_m2(config: Fields) -> Geometry:
    """All layers attend; a list that says otherwise belongs to another model."""
    refuse_doubts(config, known=("attn_type_list",))
    if not all(config.integers("attn_type_list") or ()):
        config.wrong("attn_type_list", "1 (softmax attention) at every layer")
    return read_attention(config, Rule())


_HUNYUAN = "hunyuan hunyuan_moe hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text".split()


def _cross_layer(config: Fields) -> Geometry:
    """Hunyuan-Large: with cross-layer attention each few layers share the K/V of the first."""
    known = ("use_cla", "cla_share_factor", "attention_head_dim", "use_mla")
    refuse_doubts(config, known=known)
    layers = num_layers(config)
    share = config.integer("cla_share_factor") if config.flag("use_cla") else 1
    heads = read_heads(config, Keys(dim=("head_dim", "attention_head_dim")))
    group = full(gqa(heads.q, heads.kv, heads.dim))
    kept = collect(layers, ((layer, "full", group) for layer in range(0, layers, share)))
    aliases = [(layer, layer - layer % share) for layer in range(layers) if layer % share]
    return Geometry(layers, kept, config.tokens("max_position_embeddings"), tuple(aliases))


def _jetmoe(config: Fields) -> Geometry:
    """Each expert of the mixture of attention heads brings its own query heads."""
    refuse_doubts(config, known=("kv_channels",))
    experts = config.integer("num_experts_per_tok", default=2)
    kv = config.integer("num_key_value_heads")
    heads = Heads(kv * experts, kv, config.integer("kv_channels"))
    return read_attention(config, Rule(heads=lambda *_: heads))


_STEP = Keys(
    kv=("num_attention_groups", "num_key_value_heads"),
    context=("max_position_embeddings", "max_position_embedding", "max_seq_len"),
)


def _step(config: Fields) -> Geometry:
    refuse_doubts(config, known=("num_attention_groups", "share_q_dim"))
    return read_attention(config, Rule(keys=_STEP))


PLUGINS = (
    Family("dense", tuple(_TYPES), _dense, _DEFAULTS),
    Family(
        "granite",
        (
            "granite",
            "granitemoe",
            "granitemoeshared",
            "granite4_vision_text",
            "granite_docling_text",
        ),
        _granite,
        {"granite_docling_text": {"attention_multiplier": 0.015625}},
    ),
    Family("hyperclovax", ("hyperclovax",), _hyperclovax),
    Family("minimax_m2", ("minimax_m2",), _minimax_m2),
    Family("hunyuan", tuple(_HUNYUAN), _cross_layer),
    Family("jetmoe", ("jetmoe",), _jetmoe),
    Family("step", ("step1", "step3_text", "step3"), _step),
    Family("qwen", ("qwen",), partial(_dense, keys=Keys(dim=("kv_channels",)))),
    Family(
        "exaone",
        ("exaone",),
        partial(_dense, keys=Keys(layers=("num_hidden_layers", "num_layers"))),
    ),
)
