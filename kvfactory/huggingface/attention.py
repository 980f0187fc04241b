"""Grouped-query attention: heads, dimensions and windows from the keys of a config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvfactory.huggingface.family import Geometry
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.groups import Group, Kept, chunked, collect, full, gqa, window
from kvfactory.huggingface.layertypes import (
    ALL_FULL,
    CHUNKED,
    LOCAL,
    TypesRule,
    layer_types,
    num_layers,
)
from kvfactory.huggingface.omitted import EACH_ITS_OWN


@dataclass(frozen=True)
class Keys:
    """Where a family writes the five numbers of attention and the longest sequence."""

    layers: tuple[str, ...] = ("num_hidden_layers",)
    q: tuple[str, ...] = ("num_attention_heads",)
    kv: tuple[str, ...] = ("num_key_value_heads",)
    hidden: tuple[str, ...] = ("hidden_size",)
    dim: tuple[str, ...] = ("head_dim",)
    context: tuple[str, ...] = ("max_position_embeddings",)


@dataclass(frozen=True)
class Heads:
    """Heads and their widths in a layer."""

    q: int
    kv: int
    dim: int
    v_dim: int | None = None


STANDARD = Keys()


def read_heads(config: Fields, keys: Keys = STANDARD) -> Heads:
    """The heads of a layer; with null kv heads each query head has its own, without a head_dim
    the heads share the hidden size.
    """
    q = config.integer(*keys.q)
    kv = read_kv_heads(config, q, keys.kv) if keys.kv else q
    if keys.kv:
        check_shared(config, q, kv, config.given(keys.q), config.given(keys.kv))
    return Heads(q, kv, read_head_dim(config, q, keys))


def check_shared(config: Fields, q: int, kv: int, *keys: str) -> None:
    """Complain about ``keys`` unless each kv head serves equally many query heads."""
    if q % kv:
        config.clash(keys, "query heads a multiple of kv heads")


def read_kv_heads(config: Fields, q_heads: int, keys: Sequence[str] = STANDARD.kv) -> int:
    """The kv heads; most model types must state them, or null for one per query head."""
    stated = any(key in config.values for key in keys)
    own = stated or config.text("model_type") in EACH_ITS_OWN
    return config.integer(*keys, default=q_heads if own else None)


def read_head_dim(config: Fields, q_heads: int, keys: Keys = STANDARD) -> int:
    """The width of a head."""
    dim = config.optional(*keys.dim)
    if dim is not None:
        return dim
    hidden = config.integer(*keys.hidden)
    if hidden % q_heads:
        names = [config.given(keys.hidden), config.given(keys.q)]
        config.clash(names, f"a hidden size that the heads divide, or {keys.dim[0]}")
    return max(hidden // q_heads, 1)


def _no_scale(config: Fields, heads: Heads) -> float | None:
    return None


def _no_cap(config: Fields) -> float | None:
    return None


def _no_sinks(config: Fields, kind: str) -> bool:
    return False


def read_window(config: Fields) -> int:
    """The window of transformers, which counts the query itself."""
    found = config.tokens("sliding_window")
    if config.values.get("use_sliding_window") is False:
        config.clash(["layer_types", "use_sliding_window"], "windows in use for windowed layers")
    elif found is None:
        config.wrong("sliding_window", "a number of tokens, for layers of type sliding_attention")
    return found or 1


@dataclass(frozen=True)
class Rule:
    """How a family of windowed or dense models differs from the standard one.

    ``types`` is the layer types without a list in the config; the others read a layer, given its
    type: heads (None: those under ``keys``), logit scale (None: head_dim ** -0.5), soft cap, sinks
    and window.
    """

    types: TypesRule = ALL_FULL
    heads: Callable[[Fields, str], Heads] | None = None
    scale: Callable[[Fields, Heads], float | None] = _no_scale
    soft_cap: Callable[[Fields], float | None] = _no_cap
    sinks: Callable[[Fields, str], bool] = _no_sinks
    window: Callable[[Fields], int] = read_window
    keys: Keys = STANDARD


def read_attention(config: Fields, rule: Rule) -> Geometry:
    """A model whose every layer attends, over everything, a window or a chunk."""
    layers = num_layers(config, *rule.keys.layers)
    types = layer_types(config, layers, rule.types)
    kept = collect(layers, keep_attention(config, dict(enumerate(types)), layers, rule))
    return Geometry(layers, kept, config.tokens(*rule.keys.context))


def keep_attention(
    config: Fields, types: Mapping[int, str], layers: int, rule: Rule
) -> Iterator[Kept]:
    """What the layers in ``types`` keep, by their types and by ``per_layer_config``."""
    views = _views(config, layers)
    base: dict[str, Kept] = {}
    for layer, kind in types.items():
        if layer in views:
            if not _skips(views[layer]):
                yield (layer, *_kept(views[layer], kind, rule))
            continue
        if kind not in base:
            base[kind] = (layer, *_kept(config, kind, rule))
        yield (layer, *base[kind][1:])


def _kept(config: Fields, kind: str, rule: Rule) -> tuple[str, Group]:
    heads = rule.heads(config, kind) if rule.heads else read_heads(config, rule.keys)
    geometry = gqa(
        heads.q,
        heads.kv,
        heads.dim,
        v_head_dim=heads.v_dim,
        scale=rule.scale(config, heads),
        soft_cap=rule.soft_cap(config),
        sinks=rule.sinks(config, kind),
    )
    if kind == LOCAL:
        return "local", window(rule.window(config), geometry)
    if kind == CHUNKED:
        tokens = config.tokens("attention_chunk_size")
        if tokens is None:
            config.wrong("attention_chunk_size", "a number of tokens, for chunked layers")
        return "chunked", chunked(tokens or 1, geometry)
    return "full", full(geometry)


def _views(config: Fields, layers: int) -> dict[int, Fields]:
    """The config as single layers see it, where ``per_layer_config`` overrides keys."""
    found: dict[int, Fields] = {}
    overrides = config.part("per_layer_config")
    for key, values in overrides.values.items():
        layer = int(key) if str(key).isdecimal() else layers
        if layer >= layers or not isinstance(values, dict):
            overrides.wrong(key, f"an object under a layer id below {layers}")
            continue
        found[layer] = config.merged(values)
    return found


def _skips(view: Fields) -> bool:
    """Whether the layer leaves its attention out."""
    left_out = view.strings("skip") or ()
    return any("attn" in name or "attention" in name for name in left_out)
