"""Keys that the standard dense rule does not understand, and that must not be passed over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from kvfactory.huggingface.fields import Fields

_TELLING = frozenset(
    """window sliding swa chunk chunked ssm mamba conv conv1d index indexer linear sparse sparsity
    alibi hybrid recurrent rwkv compress compression compressor sink sinks softcap softcapping
    cap nope cross encoder cla retention delta pattern block blocks kv latent attention attn
    relative loop loops shared share decoder kda gdn gla sconv hyena memory mla mqa gqa multi
    query state local global cycles stack lambda lru cca""".split()
)
_TELLING_PAIRS = (
    "layer_types",
    "per_layer",
    "layers_type",
    "layer_type",
    "v_head",
    "qk_head",
    "qk_rope",
    "type_vocab",
    "is_decoder",
    "image_size",
    "projection_dim",
    "no_rope_layers",
    "pre_attn",
)
_HARMLESS = frozenset(
    """num_attention_heads num_key_value_heads attention_bias attention_dropout attn_pdrop
    attention_probs_dropout_prob attn_implementation _attn_implementation attn_dropout_prob
    attention_dropout_prob attention_out_bias attn_bias attention_qkv_bias attn_dropout
    _attn_implementation_autoset chunk_size_feed_forward max_window_layers tie_encoder_decoder
    attention_softmax_in_fp32 scale_attention_softmax_in_fp32 attn_qk_norm q_lora_rank
    linear_bias use_linear_bias encoder_no_repeat_ngram_size decoder_start_token_id
    cross_attention_hidden_size use_parallel_residual attention_layer_norm block_size
    attn_temperature_tuning attn_scale num_query_groups attention_output_gate attn_output_gate
    use_memory_efficient_attention use_flash_attention use_flash_attn use_flash_attn_2
    flash_attention final_logit_softcapping decoder_sparse_step sparse_step
    keys_to_ignore_at_inference logits_to_keep""".split()
)
_NEED = "a key that the standard rule (each layer attends over all tokens) understands"
_OTHER_PARTS = re.compile(r"expert|moe|mlp|ffn|router|vision|audio|image|video|token_id|quant|mtp")


def refuse_doubts(config: Fields, known: Iterable[str] = ()) -> None:
    """Complain about every key that suggests more than dense attention; ``known`` are understood.

    ``layer_types`` may say that all layers attend over everything, and a window may be declared
    but switched off.
    """
    for key in doubtful_keys(config, known):
        config.wrong(
            key,
            _NEED,
            fix="the model_type of a model like it, a family plugin, or the model's groups in"
            " DIR/model/NAME.yaml with --config-dir DIR model=NAME",
        )


def doubtful_keys(config: Fields, known: Iterable[str] = ()) -> Iterator[str]:
    """The keys with a telling name and a value that switches something on."""
    passed = {*known, *_HARMLESS, "layer_types", "per_layer_config"}
    if config.values.get("use_sliding_window") is False:
        passed.add("sliding_window")
    for key, value in config.values.items():
        if key not in passed and _says_something(value) and _tells(key):
            yield key


def _says_something(value: Any) -> bool:
    return value not in (None, False, 0, "", "full") and value != [] and value != {}


def _tells(key: str) -> bool:
    if _OTHER_PARTS.search(key):
        return False
    words = set(key.lower().split("_"))
    return bool(words & _TELLING) or any(pair in key for pair in _TELLING_PAIRS)
