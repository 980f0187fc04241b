"""Earlier decoders, each with keys of its own: GPT, BLOOM, Falcon, MPT, ChatGLM, Baichuan, DBRX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvfactory.huggingface.attention import Heads, Keys, Rule, read_attention, read_head_dim
from kvfactory.huggingface.family import Family, Geometry
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.layertypes import FULL, LOCAL

_GPT = Keys(
    layers=("n_layer", "num_hidden_layers", "num_layers"),
    q=("n_head", "num_attention_heads", "num_heads"),
    kv=(),
    hidden=("n_embd", "n_embed", "hidden_size"),
    context=("n_positions", "max_position_embeddings", "seq_length", "n_ctx"),
)
_STANDARD = Keys(kv=())
_MPT = Keys(
    layers=("n_layers", "num_hidden_layers"),
    q=("n_heads", "num_attention_heads"),
    kv=(),
    hidden=("d_model", "hidden_size"),
    context=("max_seq_len", "max_position_embeddings"),
)
_ALIBI = (
    "its attention adds ALiBi biases, which a spec cannot carry: the geometry holds, "
    "attend() alone does not compute this model"
)

Scale = Callable[[Fields, Heads], float | None]


def _multi_head(config: Fields, keys: Keys, scale: Scale | None = None) -> Geometry:
    """As many kv heads as query heads."""
    rule = Rule(heads=lambda view, _: _heads(view, keys), keys=keys)
    if scale:
        rule = Rule(heads=rule.heads, keys=keys, scale=scale)
    return read_attention(config, rule)


def _heads(config: Fields, keys: Keys, kv: int | None = None) -> Heads:
    q = config.integer(*keys.q)
    shared = kv or q
    if q % shared:
        config.wrong(config.given(keys.q), f"a multiple of the {shared} kv heads")
    return Heads(q, shared, read_head_dim(config, q, keys))


def _shared(config: Fields, keys: Keys, kv: int | None, scale: Scale | None = None) -> Geometry:
    """``kv`` heads for all query heads, or one each."""
    heads = _heads(config, keys, kv)
    return read_attention(
        config, Rule(heads=lambda *_: heads, keys=keys, scale=scale or (lambda *_: None))
    )


def _gpt2(config: Fields) -> Geometry:
    """GPT-2; a scale that shrinks from layer to layer has no place in the rule."""
    if config.flag("scale_attn_by_inverse_layer_idx"):
        config.wrong("scale_attn_by_inverse_layer_idx", "one logit scale for all layers")
    return _multi_head(config, _GPT, _unless_unscaled)


def _unless_unscaled(config: Fields, heads: Heads) -> float | None:
    return None if config.flag("scale_attn_weights", default=True) else 1.0


def _gpt_bigcode(config: Fields) -> Geometry:
    """StarCoder: one kv head with ``multi_query``."""
    kv = 1 if config.flag("multi_query", default=True) else None
    return _shared(config, _GPT, kv, _unless_unscaled)


def _gpt_neo(config: Fields) -> Geometry:
    """GPT-Neo: ``attention_types`` alternates windows; logits are not scaled."""
    keys = Keys(layers=("num_layers", "num_hidden_layers"), q=("num_heads", "num_attention_heads"))
    rule = Rule(
        _gpt_neo_types,
        heads=lambda view, _: _heads(view, keys),
        scale=lambda *_: 1.0,
        window=lambda view: view.tokens("window_size") or 256,
        keys=keys,
    )
    return read_attention(config, rule)


def _gpt_neo_types(config: Fields, layers: int) -> list[str]:
    kinds = {"global": FULL, "local": LOCAL}
    found: list[str] = []
    try:
        for names, times in config.values["attention_types"]:
            found += [kinds[name] for name in names] * min(int(times), layers)
    except (KeyError, TypeError, ValueError):
        found = []
    if len(found) != layers:
        need = f"[[[global, local], times], ...] for {layers} layers"
        config.wrong("attention_types", need)
    return [*found, *[FULL] * layers][:layers]


def _bloom(config: Fields) -> Geometry:
    config.note(_ALIBI)
    return _multi_head(config, _GPT)


def _falcon(config: Fields) -> Geometry:
    """Falcon: one kv head with ``multi_query``, ``num_kv_heads`` in the newer architecture."""
    if config.flag("alibi"):
        config.note(_ALIBI)
    keys = Keys(
        layers=("num_hidden_layers", "n_layer"),
        q=("num_attention_heads", "n_head"),
        kv=("num_kv_heads", "n_head_kv"),
    )
    newer = config.flag("new_decoder_architecture") or config.has("n_head_kv")
    if config.flag("multi_query", default=True) and not newer:
        return _shared(config, keys, 1)
    return _shared(config, keys, config.optional(*keys.kv))


def _mpt(config: Fields) -> Geometry:
    attention = config.part("attn_config")
    if attention.flag("alibi"):
        config.note(_ALIBI)
    if attention.has("sliding_window_size") and attention.values["sliding_window_size"] != -1:
        attention.wrong("sliding_window_size", "-1: the rule knows no windows here")
    kind = attention.text("attn_type", default="multihead_attention")
    kv = 1 if kind == "multiquery_attention" else attention.optional("kv_n_heads")
    stated = attention.number("softmax_scale") if attention.has("softmax_scale") else None
    return _shared(config, _MPT, kv, lambda *_: stated)


def _dbrx(config: Fields) -> Geometry:
    return _shared(config, _MPT, config.part("attn_config").integer("kv_n_heads", default=1))


def _chatglm(config: Fields) -> Geometry:
    """ChatGLM2 to GLM-4-9B: ``multi_query_group_num`` kv heads."""
    keys = Keys(
        layers=("num_layers", "num_hidden_layers"),
        kv=(),
        dim=("kv_channels",),
        context=("seq_length", "max_sequence_length"),
    )
    if config.has("position_encoding_2d"):
        config.wrong("position_encoding_2d", "ChatGLM2 or later: the first one is not causal")
    grouped = config.flag("multi_query_attention")
    return _shared(config, keys, config.integer("multi_query_group_num") if grouped else None)


def _baichuan(config: Fields) -> Geometry:
    """Baichuan: the 13B models, which state ``model_max_length`` instead, use ALiBi."""
    if not config.has("max_position_embeddings"):
        config.note(_ALIBI)
    keys = Keys(kv=(), context=("max_position_embeddings", "model_max_length"))
    return _multi_head(config, keys)


def _opt(config: Fields) -> Geometry:
    return _multi_head(config, _STANDARD)


PLUGINS = (
    Family("gpt2", ("gpt2",), _gpt2),
    Family("gptj", ("gptj", "codegen"), partial(_multi_head, keys=_GPT)),
    Family("gpt_neox", ("gpt_neox", "gpt_neox_japanese", "biogpt"), _opt),
    Family("gpt_bigcode", ("gpt_bigcode",), _gpt_bigcode),
    Family("gpt_neo", ("gpt_neo",), _gpt_neo),
    Family("opt", ("opt",), _opt),
    Family("bloom", ("bloom",), _bloom),
    Family("falcon", ("falcon", "RefinedWeb", "RefinedWebModel"), _falcon),
    Family("mpt", ("mpt",), _mpt),
    Family("dbrx", ("dbrx",), _dbrx),
    Family("chatglm", ("chatglm",), _chatglm),
    Family("baichuan", ("baichuan",), _baichuan),
)
