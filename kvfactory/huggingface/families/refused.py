"""Model types that are known, and known to be beyond what a spec can say."""

from __future__ import annotations

from functools import partial

from kvfactory.huggingface.family import Family, Geometry
from kvfactory.huggingface.fields import Fields

_V4 = (
    "one attention a layer: each layer here attends over a window and over compressed entries in "
    "one softmax, and keeps the tail that is not yet compressed"
)
_ENCODER = "a decoder: a model that sees all tokens at once keeps no cache"
_REASONS = {
    "deepseek_v4 deepseek_ref": ("compress_ratios", _V4),
    "recurrent_gemma": ("lru_width", "a known recurrence: RG-LRU states are none of them"),
    "rwkv rwkv6 rwkv7": (
        "attention_hidden_size",
        "a known recurrence: RWKV states are none of them",
    ),
    "xlstm": ("num_blocks", "a known recurrence: xLSTM states are none of them"),
    "reformer": ("attn_layers", "attention over stored keys: hashed buckets are none"),
    "diffllama": ("lambda_std_dev", "one softmax a head: differential attention has two"),
    "zaya": ("cca_time0", "known states: those of compressed convolutional attention are none"),
    "dory": ("n_recurrent_loops", "layers that run once: looped layers keep a cache each time"),
    "hrm_text": ("H_cycles", "layers that run once: cycled layers keep a cache each time"),
    "inkling2_loop_text inkling2_loop": ("loop_num_passes", "layers that run once"),
    "blt": ("patcher_config", "one decoder: byte patches run through several"),
    "unlimited_ocr_text": ("layer_types", "a window or none: reference windows are neither"),
    "doge": ("keep_window_size", "attention over all keys: a dynamic mask drops some"),
    "bert roberta xlm-roberta electra distilbert albert deberta deberta-v2 mpnet modernbert "
    "nomic_bert clip_text_model siglip_text_model camembert": ("model_type", _ENCODER),
    "t5 mt5 umt5 longt5 switch_transformers": (
        "relative_attention_num_buckets",
        "attention without learnt position biases",
    ),
}


def _refuse(config: Fields, key: str, need: str) -> Geometry:
    got = f"model type {config.text('model_type')!r}" if not config.has(key) else ""
    config.wrong(key, need, got)
    return Geometry(1, {})


PLUGINS = tuple(
    Family(
        f"refused_{types.split()[0]}", tuple(types.split()), partial(_refuse, key=key, need=need)
    )
    for types, (key, need) in _REASONS.items()
)
