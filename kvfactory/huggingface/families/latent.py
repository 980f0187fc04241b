"""Models of multi-head latent attention: DeepSeek, Kimi, GLM, with sparse indexers and without."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvfactory.huggingface.attention import Rule, read_attention
from kvfactory.huggingface.family import Family, Geometry
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.groups import collect
from kvfactory.huggingface.latent import indexed_layers, read_index, read_latent
from kvfactory.huggingface.layertypes import FULL, INDEXED, always, layer_types, num_layers

_LATENT = """
deepseek_v3 kimi_k2 kimi_k25 kimi_vl glm4_moe_lite mistral4 minicpm3 axk1 youtu sarvam_mla
""".split()
_CONTEXT = ("max_position_embeddings", "model_max_length")


def _latent(config: Fields) -> Geometry:
    """Latents at every layer."""
    layers = num_layers(config)
    layer_types(config, layers, always(FULL), known=(FULL,))
    if config.has("index_topk"):
        config.wrong("index_topk", "no indexer, or a model type with one such as deepseek_v32")
    group = read_latent(config)
    kept = collect(layers, ((layer, "latent", group) for layer in range(layers)))
    return Geometry(layers, kept, config.tokens(*_CONTEXT))


def _latent_or_not(config: Fields) -> Geometry:
    """DeepSeek-V2: small siblings switch latent attention off."""
    if config.values.get("use_mla") is False or config.values.get("kv_lora_rank", 0) is None:
        return read_attention(config, Rule())
    return _latent(config)


def _two_in_a_layer(config: Fields) -> Geometry:
    """LongCat-Flash: each physical layer holds two attentions, hence two layers of the cache."""
    if config.has("num_layers"):
        layers = 2 * num_layers(config, "num_layers")
    else:
        layers = num_layers(config, "num_hidden_layers")
    group = read_latent(config)
    kept = collect(layers, ((layer, "latent", group) for layer in range(layers)))
    return Geometry(layers, kept, config.tokens(*_CONTEXT))


def _sparse(config: Fields, sinks: bool = False, default: Any = None) -> Geometry:
    """DeepSeek sparse attention: latents at every layer, index keys where an indexer is."""
    layers = num_layers(config)
    layer_types(config, layers, always(INDEXED), known=(INDEXED, FULL))
    latent, keys = read_latent(config, sinks=sinks), read_index(config)
    indexers = indexed_layers(config, layers, default(layers) if default else None)
    kept = [(layer, "latent", latent) for layer in range(layers)]
    kept += [(layer, "index", keys) for layer in indexers]
    return Geometry(layers, collect(layers, kept), config.tokens(*_CONTEXT))


def _every_layer(layers: int) -> list[str]:
    return ["full"] * layers


def _first_then_fourth(layers: int) -> list[str]:
    return ["shared" if n and (n - 1) % 4 else "full" for n in range(layers)]


def _shared_latents(config: Fields) -> Geometry:
    """Mistral-Large-4: ``kv_source_layers`` lets a layer read an earlier one's latents."""
    geometry = _sparse(config)
    key, layers = "kv_source_layers", geometry.num_layers
    sources = config.integers(key)
    if sources is None or sources == tuple(range(layers)):
        return geometry
    if len(sources) != layers or not all(s <= n and sources[s] == s for n, s in enumerate(sources)):
        config.wrong(key, "for each layer itself, or an earlier layer that is its own source")
        return geometry
    readers = {layer: source for layer, source in enumerate(sources) if source != layer}
    indexers = indexed_layers(config, layers)
    if {*indexers} & {*readers}:
        config.wrong(key, "no indexer at layers that read another's latents (see indexer_types)")
    latent, keys = read_latent(config), read_index(config)
    kept = [(layer, "latent", latent) for layer in range(layers) if layer not in readers]
    kept += [(layer, "index", keys) for layer in indexers]
    groups = collect(layers, kept)
    return Geometry(layers, groups, geometry.max_context, tuple(readers.items()))


PLUGINS = (
    Family("latent", tuple(_LATENT), _latent),
    Family("deepseek_v2", ("deepseek_v2", "deepseek_vl_v2"), _latent_or_not),
    Family("longcat", ("longcat_flash",), _two_in_a_layer),
    Family("deepseek_v32", ("deepseek_v32", "axk2"), partial(_sparse, default=_every_layer)),
    Family("glm_dsa", ("glm_moe_dsa",), _sparse),
    Family(
        "hy_v4",
        ("hy_v4", "hy_v4_vl_text"),
        partial(_sparse, sinks=True, default=_first_then_fourth),
    ),
    Family("mistral_large4", ("mistral_large4_text", "mistral_large4"), _shared_latents),
)
