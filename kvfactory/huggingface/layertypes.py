"""Which layer is of which type: the list in the config, or the family's rule without one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvfactory.huggingface.fields import MAX_LAYERS, Fields

FULL, LOCAL, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, CONV, INDEXED, HYBRID = "linear_attention", "conv", "indexed_attention", "hybrid"
HYBRID_LOCAL, BLOCK_SPARSE = "hybrid_sliding", "minimax_m3_sparse"
NOTHING = ("mlp", "moe")

_OLD_NAMES = {
    "attention": FULL,
    "mamba": LINEAR,
    "deepseek_sparse_attention": INDEXED,
    "qwen_sparse_attention": INDEXED,
}

_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_transformer_layers")

TypesRule = Callable[[Fields, int], Sequence[str]]
"""The layer types of a config of so many layers that does not list them."""


def num_layers(config: Fields, *keys: str) -> int:
    """The number of layers, those of multi-token prediction not counted."""
    return config.integer(*(keys or ("num_hidden_layers",)), most=MAX_LAYERS)


def layer_types(
    config: Fields,
    layers: int,
    rule: TypesRule,
    known: Iterable[str] = (FULL, LOCAL, CHUNKED),
    key: str = "layer_types",
) -> tuple[str, ...]:
    """One type a layer, from ``key`` or by ``rule``; unknown types are complained about."""
    listed = config.strings(key)
    if listed is None:
        return tuple(rule(config, layers))
    found = per_layer(config, key, [_OLD_NAMES.get(name, name) for name in listed], layers)
    unknown = sorted({*found} - {*known})
    if unknown:
        need = f"only {', '.join(known)} for model type {config.text('model_type')!r}"
        config.wrong(key, need, f"{unknown[0]!r}")
    return tuple(FULL if name in unknown else name for name in found)


def per_layer(config: Fields, key: str, values: Sequence[str], layers: int) -> Sequence[str]:
    """``values``, one a layer; entries of layers for multi-token prediction are cut off."""
    drafts = config.optional("num_nextn_predict_layers", least=0, most=MAX_LAYERS) or 0
    if len(values) == layers + drafts:
        return values[:layers]
    if len(values) != layers:
        blamed = {problem.path for problem in config.ledger.problems}
        if not any(config.path(count) in blamed for count in _COUNTS):
            count = next((count for count in _COUNTS if config.has(count)), key)
            got = f"{len(values)} entries against {count}={layers}"
            config.wrong(key, "one entry a layer", got)
    return [*values, *[FULL] * layers][:layers]


# ---- rules ---------------------------------------------------------------------------------


def always(kind: str) -> TypesRule:
    """Every layer alike."""
    return lambda config, layers: [kind] * layers


ALL_FULL = always(FULL)


def spaced(
    every: int, rare: str = FULL, common: str = LOCAL, key: str = "", last: bool = False
) -> TypesRule:
    """``rare`` at the last of each ``every`` layers, or of as many as ``key`` says; ``last``: at
    the end too.
    """

    def rule(config: Fields, layers: int) -> list[str]:
        step = config.integer(key, default=every) if key else every
        found = [common if (layer + 1) % step else rare for layer in range(layers)]
        return [*found[:-1], rare] if last else found

    return rule


def alternating(config: Fields, layers: int) -> list[str]:
    """A window at even layers, everything at odd ones."""
    return [FULL if layer % 2 else LOCAL for layer in range(layers)]


def everywhere(config: Fields, layers: int) -> list[str]:
    """All layers alike: a window where the config has one that binds."""
    return [LOCAL if window_binds(config) else FULL] * layers


def window_binds(config: Fields, default: bool = True) -> bool:
    """Whether there is a window, in use, that is shorter than the longest sequence."""
    if not config.flag("use_sliding_window", default):
        return False
    tokens = config.tokens("sliding_window")
    longest = config.tokens("max_position_embeddings")
    return tokens is not None and (longest is None or tokens < longest)
