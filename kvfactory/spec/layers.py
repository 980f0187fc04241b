"""Sets of model layers, as a config writes them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from kvfactory.errors import Problem, SpecError

_NEED = (
    "'a' or 'a-b' (both ends included), a slice 'start:stop:step', either with 'not ' before it,"
    " or a list"
)
_NUMBER = "[0-9]{1,18}"
_RANGE = re.compile(f"({_NUMBER})(?:-({_NUMBER}))?")
_SLICE = re.compile(f"(-?{_NUMBER})?:(-?{_NUMBER})?(?::({_NUMBER})?)?")


def parse_layers(
    layers: str | Sequence[int], num_layers: int, path: str = "layers"
) -> tuple[int, ...]:
    """The layers of a set, ascending: ``"0-35"``, ``"1::2"``, ``"not 5::6"`` or a list.

    Negative numbers in slices and lists count from the end of the model; ``not`` takes all other
    layers of the model. ``path`` is the config key of the set.

    Raises:
        SpecError: a malformed or empty set, a layer twice, or layers that the model lacks.
    """
    found = _from_text(layers, num_layers, path) if isinstance(layers, str) else list(layers)
    positive = [layer + num_layers if layer < 0 else layer for layer in found]
    beyond = [layer for layer, at in zip(found, positive, strict=True) if not 0 <= at < num_layers]
    if beyond:
        raise _wrong(path, f"layer {beyond[0]}", f"layers of a model of {num_layers} layers")
    if not positive:
        raise _wrong(path, f"{layers!r}, which holds no layer", "at least one layer")
    if len(set(positive)) < len(positive):
        twice = next(layer for layer, count in Counter(positive).items() if count > 1)
        raise _wrong(path, f"layer {twice} twice", "each layer once")
    return tuple(sorted(positive))


def _from_text(text: str, num_layers: int, path: str) -> list[int]:
    body = text.removeprefix("not ").strip()
    found = _RANGE.fullmatch(body)
    if found:
        start, end = int(found[1]), int(found[2] or found[1])
        if start > end:
            raise _wrong(path, repr(text), "a range that ascends", f"{path}={end}-{start}")
        named = list(range(start, end + 1)) if end < num_layers else [start, end]
    else:
        cut = _SLICE.fullmatch(body)
        if not cut or (cut[3] and not int(cut[3])):
            raise _wrong(path, repr(text), _NEED)
        bounds = slice(*(int(part) if part else None for part in cut.groups()))
        named = list(range(num_layers))[bounds]
    if not text.startswith("not "):
        return named
    if named and named[-1] >= num_layers:
        return named
    left_out = set(named)
    return [layer for layer in range(num_layers) if layer not in left_out]


def _wrong(path: str, got: str, need: str, fix: str = "") -> SpecError:
    return SpecError(Problem(path, got, need, fix))


def layer_set(ids: Iterable[int], num_layers: int) -> str | list[int]:
    """The shortest way to write the layers: a range, a slice, the complement of one, or a list."""
    found = sorted(ids)
    short = _regular(found, num_layers)
    if short is None and len(found) > num_layers // 2:
        chosen = set(found)
        rest = _regular([n for n in range(num_layers) if n not in chosen], num_layers)
        short = f"not {rest}" if rest else None
    return short or found


def _regular(ids: Sequence[int], num_layers: int) -> str | None:
    if len(ids) < 2:
        return None
    step = ids[1] - ids[0]
    if list(ids) != list(range(ids[0], ids[-1] + 1, step)):
        return None
    if step == 1:
        return f"{ids[0]}-{ids[-1]}"
    if ids[-1] + step >= num_layers:
        return f"{ids[0]}::{step}"
    return f"{ids[0]}:{ids[-1] + 1}:{step}" if len(ids) > 2 else None
