"""Multi-head latent attention and the sparse indexers over it, from the keys of a config."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.groups import Group, full, index, mla


def read_latent(config: Fields, *, rope_scaled: bool = True, sinks: bool = False) -> Group:
    """A group of latents; the logit scale follows the unabsorbed heads, nope + rope wide.

    ``rope_scaled``: YaRN's ``mscale_all_dim`` enters the scale, squared.
    """
    heads = config.integer("num_attention_heads")
    rope = config.integer("qk_rope_head_dim", least=0)
    width = config.integer("qk_nope_head_dim") + rope
    if config.optional("qk_head_dim") not in (None, width):
        config.clash(
            ["qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"], "the sum of both parts"
        )
    scale = width**-0.5 * (rope_magnitude(config) ** 2 if rope_scaled else 1.0)
    return full(mla(heads, config.integer("kv_lora_rank"), rope, scale, sinks=sinks))


def rope_magnitude(config: Fields) -> float:
    """YaRN's factor of the logits' square root: 0.1 m ln(factor) + 1, or 1 without it.

    Peng et al., YaRN (2023), as DeepSeek-V3 uses it with m = ``mscale_all_dim``.
    """
    rope = config.part(config.given(("rope_parameters", "rope_scaling")))
    kind = rope.text(rope.given(("rope_type", "type")), default="default")
    weight = rope.values.get("mscale_all_dim")
    off = weight is None or (type(weight) in (int, float) and weight == 0)
    if kind == "default" or off:
        return 1.0
    weight, factor = rope.number("mscale_all_dim"), rope.number("factor")
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def read_index(config: Fields) -> Group:
    """Index keys of DeepSeek sparse attention, pooled where ``index_kpool`` says so."""
    pool = config.integer("index_kpool", default=1)
    topk = config.integer("index_topk")
    if topk % pool:
        config.clash(["index_topk", "index_kpool"], "whole pools to select")
    return index(
        "latent",
        config.integer("index_n_heads"),
        config.integer("index_head_dim"),
        max(topk // pool, 1),
        block_tokens=pool,
        tokens_per_entry=pool,
    )


def indexed_layers(config: Fields, layers: int, default: Sequence[str] | None = None) -> list[int]:
    """The layers with an indexer of their own; ``shared`` ones reuse an earlier selection.

    A list ``indexer_types``, a string ``index_topk_pattern`` of F and S, or the schedule of
    ``index_topk_freq`` and ``index_skip_topk_offset``.
    """
    key = config.given(("indexer_types", "index_topk_pattern"))
    if config.has(key):
        types = _listed(config, key, layers)
    else:
        types = default or _scheduled(config, layers)
    found = [layer for layer, kind in enumerate(types) if kind == "full"]
    if not found or found[0]:
        config.wrong(key, "an indexer of its own at the first layer")
    return found


def _listed(config: Fields, key: str, layers: int) -> Sequence[str]:
    letters = config.values[key]
    spelled = isinstance(letters, str)
    listed = tuple(letters) if spelled else config.strings(key) or ()
    types = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in listed]
    if len(types) != layers or {*types} - {"full", "shared"}:
        config.wrong(key, f"full or shared for each of the {layers} layers")
        return ["full"] * layers
    return types


def _scheduled(config: Fields, layers: int) -> list[str]:
    step = config.integer("index_topk_freq", default=1)
    offset = config.integer("index_skip_topk_offset", default=2, least=0)
    return ["shared" if max(n - offset + 1, 0) % step else "full" for n in range(layers)]
