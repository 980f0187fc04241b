"""Static scales in the forms in which model checkpoints carry them.

Two forms are read. Safetensors hold a scale per layer under names such as
``model.layers.3.self_attn.k_scale``, ``...attn.v_scale`` or ``...k_proj.output_scale`` (vLLM,
SGLang, ModelOpt, compressed-tensors); ``kv_scale`` serves both K and V. JSON holds
``{"kv_cache": {"dtype": ..., "scaling_factor": {tp_rank: {layer: scale}}}}`` for both K and V.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvfactory.calibration.constants import Constants, Key, is_ours
from kvfactory.errors import Problem, SpecError
from kvfactory.quant import Constant

SOURCES = {"k": ("k",), "v": ("v",), "latent": ("k", "v"), "rope": ("k",)}
"""Which scales a tensor takes. A latent is K and V at once, so its two scales must be one."""

_NAME = re.compile(
    r"(?:^|\.)layers\.(\d{1,9})\.(?:\w+\.)*(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)$"
)
_FP8_TYPES = ("float8_e4m3fn", "float8_e5m2")

Scale = NDArray[np.float32]
Found = dict[tuple[int, str], Scale]


def from_checkpoint(
    path: str | Path,
    layers: Iterable[int],
    tensors: Iterable[str] = ("k", "v"),
    *,
    constant: str = "scale",
    tp_rank: int = 0,
    prefix: str = "",
) -> Constants:
    """The scales of ``layers`` (model layer ids) for ``tensors`` (k, v, latent, rope).

    ``path`` is a JSON file, a safetensors file or a folder of those. ``constant`` names what the
    codec calls it: ``scale``, or ``global_scale`` for nvfp4. ``tp_rank`` picks a part of a JSON
    file, ``prefix`` one of several models in a checkpoint (``model.``). Values are float32, []
    or [head].

    Raises:
        SpecError: an unreadable file, a layer without scale, two scales for one layer, unequal
            K and V scales of a latent, or a scale that is not positive and finite; all at once.
    """
    path = Path(path)
    found = _from_json(path, tp_rank) if path.suffix == ".json" else _from_files(path, prefix)
    values: dict[Key, Scale] = {}
    problems: list[Problem] = []
    if constant == "center":
        need = "a file that calibrate() wrote: checkpoints hold no centers"
        raise SpecError(Problem(str(path), "a checkpoint, for centers", need))
    for layer in layers:
        for tensor in tensors:
            key = Key(layer, tensor, constant)
            refused = tuple(_problems(found, key, path))
            problems += refused
            if not refused:
                values[key] = found[layer, SOURCES[tensor][0]]
    if problems:
        raise SpecError(*problems)
    return Constants(values)


def read_constants(path: str | Path, required: Mapping[Key, Constant]) -> Constants:
    """What ``kv.constants`` names: our own file, or the scales of a checkpoint.

    ``required`` is everything that the cache stores with. Per-head scales are filled from a
    checkpoint's scale per tensor.

    Raises:
        SpecError: a file that is neither, a constant that it lacks or that cannot be used.
    """
    try:
        return _constants(Path(path).expanduser(), required)
    except SpecError as error:
        told = (replace(each, path=f"kv.constants: {each.path}") for each in error.problems)
        raise SpecError(*told) from None
    except RuntimeError:  # of expanduser
        got, need = f"{str(path)[:80]!r}", "a file of a user of this machine"
        raise SpecError(Problem("kv.constants", got, need)) from None
    except OSError as error:
        got = f"{str(path)[:80]!r}: {error.strerror}"
        need = "a safetensors file of constants"
        raise SpecError(Problem("kv.constants", got, need)) from None


def _constants(path: Path, required: Mapping[Key, Constant]) -> Constants:
    if path.suffix != ".json" and not path.is_dir() and is_ours(path):
        return Constants.load(path, required)
    found: dict[Key, Scale] = {}
    for name in dict.fromkeys(key.constant for key in required):
        keys = [key for key in required if key.constant == name]
        for tensor in dict.fromkeys(key.tensor for key in keys):
            layers = [key.layer for key in keys if key.tensor == tensor]
            found |= from_checkpoint(path, layers, [tensor], constant=name).values
    shapes = {key: tuple(extent for _, extent in required[key].axes) for key in required}
    constants = Constants(
        {key: np.full(shapes[key], v) if not v.shape else v for key, v in found.items()}
    )
    constants.check(required, str(path))
    return constants


def _problems(found: Found, key: Key, path: Path) -> Iterator[Problem]:
    place = f"{path}: {key}"
    if key.tensor not in SOURCES:
        yield Problem(place, f"tensor {key.tensor!r}", f"one of {', '.join(SOURCES)}")
        return
    sources = SOURCES[key.tensor]
    missing = [part for part in sources if (key.layer, part) not in found]
    if missing:
        names = " and ".join(f"{part}_scale" for part in missing)
        yield Problem(place, f"no {names}", f"a scale for layer {key.layer}: none is assumed")
        return
    scales = [found[key.layer, part] for part in sources]
    if not all(np.array_equal(scale, scales[0], equal_nan=True) for scale in scales):
        got = " and ".join(f"{part}_scale {found[key.layer, part]}" for part in sources)
        yield Problem(place, f"unequal {got}", "one scale: a latent is both K and V")
    elif not (np.isfinite(scales[0]) & (scales[0] > 0)).all():
        yield Problem(place, f"{scales[0]}", "positive, finite scales")


def _from_files(path: Path, prefix: str) -> Found:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise SpecError(Problem(str(path), "a folder without safetensors", "a checkpoint"))
    found: Found = {}
    origin: dict[tuple[int, str], str] = {}
    problems: list[Problem] = []
    for file in files:
        for name, layer, parts, scale in _scales(file, prefix):
            for key in [(layer, part) for part in parts]:
                if key in found:
                    got, fix = f"{origin[key]} and {name}", "prefix= of the model that is meant"
                    problems.append(Problem(str(file), got, "one scale a layer", fix))
                found[key], origin[key] = scale, name
    if problems:
        raise SpecError(*problems)
    return found


def _scales(file: Path, prefix: str) -> Iterator[tuple[str, int, str, Scale]]:
    """(tensor name, model layer id, ``k``, ``v`` or ``kv``, float32 [] or [head]) of one file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                match = _NAME.search(name) if name.startswith(prefix) else None
                if match:
                    layer, scaled, projected = match.groups()
                    read = opened.get_tensor(name)
                    if read.is_complex():
                        raise SpecError(Problem(f"{file}: {name}", str(read.dtype), "real scales"))
                    scale: Scale = read.float().numpy()
                    value = scale.reshape(()) if scale.size == 1 else scale
                    yield name, int(layer), scaled or projected, value
    except (OSError, SafetensorError) as error:
        raise SpecError(Problem(str(file), str(error) or "no file", "a safetensors file")) from None


def _from_json(path: Path, tp_rank: int) -> Found:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(Problem(str(path), str(error), "a JSON file of scales")) from None
    cache = _mapping(read, path, "kv_cache")
    if cache.get("dtype") not in _FP8_TYPES:
        need = " or ".join(_FP8_TYPES)
        raise SpecError(Problem(f"{path}: kv_cache.dtype", repr(cache.get("dtype")), need))
    ranks = _mapping(cache, path, "scaling_factor")
    scales = _mapping(ranks, path, str(tp_rank))
    try:
        with np.errstate(over="ignore"):
            return {
                (int(layer), part): _number(scale)
                for layer, scale in scales.items()
                for part in ("k", "v")
            }
    except (TypeError, ValueError, OverflowError) as error:
        place = f"{path}: kv_cache.scaling_factor.{tp_rank}"
        raise SpecError(Problem(place, str(error), "layer -> scale")) from None


def _number(scale: object) -> Scale:
    if isinstance(scale, str | bool):
        raise TypeError(f"{scale!r}")
    return np.asarray(scale, dtype=np.float32)


def _mapping(read: Any, path: Path, key: str) -> Mapping[str, Any]:
    inner = read.get(key) if isinstance(read, Mapping) else None
    if not isinstance(inner, Mapping):
        raise SpecError(Problem(f"{path}: {key}", repr(inner), "a mapping"))
    return inner
