"""Models with sliding windows, at every layer or at some: one rule per family.

Windows are those of transformers, which count the query itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from kvfactory.huggingface.attention import Heads, Rule, read_attention
from kvfactory.huggingface.families.dense import multiplier
from kvfactory.huggingface.family import Family, Geometry
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.layertypes import (
    FULL,
    LOCAL,
    TypesRule,
    alternating,
    always,
    everywhere,
    num_layers,
    spaced,
    window_binds,
)


def _family(
    name: str,
    types: str,
    rule: Rule,
    common: Mapping[str, object] | None = None,
    **defaults: object,
) -> Family:
    """A family whose model types share the defaults ``common``."""
    shared = {**(common or {}), **defaults}
    names = tuple(types.split())
    return Family(name, names, partial(read_attention, rule=rule), dict.fromkeys(names, shared))


def _late(used: bool) -> TypesRule:
    """Qwen: windows from layer ``max_window_layers`` on, where windows are in use at all."""

    def rule(config: Fields, layers: int) -> list[str]:
        first = config.integer("max_window_layers", default=28, least=0)
        on = window_binds(config, default=used)
        return [LOCAL if on and layer >= first else FULL for layer in range(layers)]

    return rule


def _opt_in(config: Fields, layers: int) -> list[str]:
    """Qwen3-MoE: windows everywhere, only with ``use_sliding_window``."""
    return [LOCAL if window_binds(config, default=False) else FULL] * layers


def _early_even(config: Fields, layers: int) -> list[str]:
    """Qwen2-MoE: windows at even layers below ``max_window_layers``."""
    last = config.integer("max_window_layers", default=28, least=0)
    on = window_binds(config, default=False)
    return [LOCAL if on and n < last and n % 2 == 0 else FULL for n in range(layers)]


def _patterned(default: int) -> TypesRule:
    """Exaone: ``sliding_window_pattern`` as a number or letters, L for a window, G for none."""

    def rule(config: Fields, layers: int) -> list[str]:
        if not config.has("sliding_window"):
            return [FULL] * layers
        pattern = config.values.get("sliding_window_pattern")
        if not isinstance(pattern, str):
            return list(spaced(default, key="sliding_window_pattern")(config, layers))
        if not pattern or {*pattern} - {*"LG"}:
            config.wrong("sliding_window_pattern", "a number of layers, or the letters L and G")
            return [FULL] * layers
        found = [LOCAL if pattern[n % len(pattern)] == "L" else FULL for n in range(layers)]
        return [*found[:-1], FULL]

    return rule


def _without_rope(config: Fields, layers: int) -> list[str]:
    """SmolLM3: layers without rotary embedding have the window, where it is in use."""
    step = config.integer("no_rope_layer_interval", default=4)
    rotary = config.integers("no_rope_layers") or [int((n + 1) % step != 0) for n in range(layers)]
    if len(rotary) < layers:
        config.wrong("no_rope_layers", "one entry a layer")
        rotary = [*rotary, *[1] * layers]
    on = window_binds(config, default=False)
    return [LOCAL if on and not rotary[layer] else FULL for layer in range(layers)]


def _dense_first(config: Fields, layers: int) -> list[str]:
    """Cohere2-MoE: the leading dense layers follow a pattern of their own."""
    first = min(config.integer("first_k_dense_replace", default=0, least=0), layers)
    lead = spaced(1, key="prefix_dense_sliding_window_pattern")(config, first)
    return [*lead, *spaced(4, key="sliding_window_pattern")(config, layers - first)]


def _full_every_fourth(config: Fields, layers: int) -> list[str]:
    """Everything at layers 0, 4, 8 ..., windows between."""
    return [LOCAL if layer % 4 else FULL for layer in range(layers)]


def _flint(config: Fields, layers: int) -> list[str]:
    """Everything at the first two layers, every fourth from layer 1, and the last."""
    whole = {0, layers - 1, *range(1, layers, 4)}
    return [FULL if layer in whole else LOCAL for layer in range(layers)]


def _from_the_end(config: Fields, layers: int) -> list[str]:
    """Everything at the last layer and each fourth before it."""
    return [LOCAL if (layers - 1 - layer) % 4 else FULL for layer in range(layers)]


def _all_sinks(config: Fields, kind: str) -> bool:
    return True


def _granite_scale(config: Fields, heads: Heads) -> float:
    return multiplier(config, heads)


def _laguna(config: Fields) -> Geometry:
    """Laguna may give each layer its own number of query heads."""
    key = "num_attention_heads_per_layer"
    listed = config.integers(key) or ()
    if listed and len(listed) != num_layers(config):
        config.clash([key, "num_hidden_layers"], "one entry a layer")
        listed = ()
    single = {str(n): {"num_attention_heads": heads} for n, heads in enumerate(listed)}
    return read_attention(config.merged({"per_layer_config": single}), Rule())


_QWEN = """qwen2 qwen3 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen2_5_omni_text
qwen3_asr_text""".split()
_PLAIN = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
_QWEN_PART = {**_PLAIN, "num_key_value_heads": 32}
_MISTRAL = {**_PLAIN, "num_key_value_heads": 8}

PLUGINS = (
    Family(
        "qwen_window",
        tuple(_QWEN),
        partial(read_attention, rule=Rule(_late(used=False))),
        dict.fromkeys(("qwen2", "qwen3"), _QWEN_PART),
    ),
    _family("dots1", "dots1", Rule(_late(used=True)), max_window_layers=62, sliding_window=4096),
    _family("qwen2_moe", "qwen2_moe", Rule(_early_even)),
    _family("qwen3_moe", "qwen3_moe qwen3_omni_moe_text", Rule(_opt_in)),
    _family("mistral", "mistral", Rule(everywhere), _MISTRAL, sliding_window=4096),
    _family("mixtral", "mixtral ministral3 mistral3", Rule(everywhere)),
    _family("phi", "phi3 phi3_v phimoe phi4mm phi4_multimodal", Rule(everywhere)),
    _family("starcoder2", "starcoder2", Rule(everywhere)),
    _family("voxtral_realtime", "voxtral_realtime_text", Rule(everywhere), sliding_window=4096),
    _family("ministral", "ministral", Rule(everywhere), sliding_window=4096),
    _family(
        "cohere2",
        "cohere2",
        Rule(spaced(4, key="sliding_window_pattern")),
        sliding_window=4096,
    ),
    _family("cohere2_moe", "cohere2_moe", Rule(_dense_first), sliding_window=4096),
    _family("olmo3", "olmo3", Rule(spaced(4)), sliding_window=4096),
    _family("exaone4", "exaone4 exaone_moe", Rule(_patterned(4)), sliding_window=4096),
    _family("gpt_oss", "gpt_oss", Rule(alternating, sinks=_all_sinks), sliding_window=128),
    _family("smollm3", "smollm3", Rule(_without_rope)),
    _family(
        "afmoe",
        "afmoe",
        Rule(spaced(4, key="global_attn_every_n_layers")),
        sliding_window=1024,
    ),
    _family("cwm", "cwm", Rule(_full_every_fourth), sliding_window=8192),
    _family("beam", "beam", Rule(spaced(6, last=True)), sliding_window=512),
    _family("kolibri1", "kolibri1", Rule(spaced(5)), sliding_window=513),
    _family("flint", "flint", Rule(_flint, sinks=_all_sinks), sliding_window=513),
    _family("mellum", "mellum", Rule(), sliding_window=1024),
    Family("laguna", ("laguna",), _laguna, {"laguna": {"sliding_window": 512}}),
    _family(
        "muse",
        "muse_glimmer_text muse_spark_text",
        Rule(_from_the_end),
        sliding_window=2048,
    ),
    _family(
        "granite_swa",
        "granite_swa granitemoe_swa",
        Rule(_full_every_fourth, scale=_granite_scale, sinks=_all_sinks),
        sliding_window=128,
    ),
    _family("cohere_compass", "cohere_compass_text", Rule(always(FULL)), sliding_window=4096),
)
