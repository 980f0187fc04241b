"""Constants of a cache: static scales, global scales and centers, per layer and tensor.

They come from observed keys and values (``calibrate``), from a file (``Constants.load``) or from a
checkpoint (``kvfactory.calibration.checkpoint``), and are written into the tables beside the pool
at build.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfactory.errors import Problem, SpecError
from kvfactory.quant import Codec, Constant, Logical

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "kvfactory.constants.1"


class Key(NamedTuple):
    """Which constant: model layer id, tensor name, constant name."""

    layer: int
    tensor: str
    constant: str

    def __str__(self) -> str:
        return f"layers.{self.layer}.{self.tensor}.{self.constant}"


@dataclass(frozen=True)
class Constants:
    """Calibrated values by key, float32 with the constant's own axes."""

    values: Mapping[Key, NDArray[np.float32]]

    def save(self, path: str | Path) -> None:
        """Write one safetensors file with tensors named ``layers.{layer}.{tensor}.{constant}``."""
        from safetensors.numpy import save_file

        arrays = {
            str(key): np.asarray(value, np.float32, order="C") for key, value in self.values.items()
        }
        save_file(arrays, path, metadata={"format": FORMAT})

    @classmethod
    def load(cls, path: str | Path, required: Mapping[Key, Constant]) -> Constants:
        """The constants of ``path`` that ``required`` names; others in the file are left out.

        Raises:
            SpecError: no such file or not ours, a constant missing or of another shape, not
                finite, or a scale that is not positive; all at once.
        """
        named = _read(Path(path))
        found = cls({key: named[str(key)] for key in required if str(key) in named})
        found.check(required, str(path))
        return found

    def check(self, required: Mapping[Key, Constant], path: str) -> None:
        """Every constant of ``required`` is here and usable; ``path`` says where they came from.

        Raises:
            SpecError: one problem per constant that is not.
        """
        problems = tuple(self._problems(required, path))
        if problems:
            raise SpecError(*problems)

    def _problems(self, required: Mapping[Key, Constant], path: str) -> Iterator[Problem]:
        for key, constant in required.items():
            place, shape = f"{path}: {key}", tuple(extent for _, extent in constant.axes)
            if key not in self.values:
                yield Problem(place, "nothing", f"float32 {list(shape)}; calibrate this layer too")
                continue
            value = self.values[key]
            if value.shape != shape:
                yield Problem(place, f"shape {list(value.shape)}", f"shape {list(shape)}")
            elif not np.isfinite(value).all():
                yield Problem(place, _first(value, ~np.isfinite(value)), "finite values")
            elif constant.statistic == "amax" and (value <= 0).any():
                yield Problem(place, _first(value, value <= 0), "positive scales")


def required_constants(stored: Iterable[tuple[int, Logical, Codec]]) -> dict[Key, Constant]:
    """What a cache needs that stores these (model layer id, tensor, codec)."""
    return {
        Key(layer, tensor.name, constant.name): constant
        for layer, tensor, codec in stored
        for constant in codec.constants(tensor)
    }


def calibrate(
    observed: Mapping[int, Mapping[str, Tensor]],
    codecs: Mapping[str, Codec],
    headroom: float = 2.0,
) -> Constants:
    """Constants that fit ``observed``: model layer id -> tensor name -> [rows..., head, dim].

    ``codecs`` are by tensor name. A center is the mean over rows; scales hold ``headroom`` times
    the largest magnitude that remains. Too large a scale costs next to nothing, too small a one
    saturates, so new data may exceed what was observed.

    Raises:
        SpecError: a tensor without codec or rows, one that is zero throughout or not finite, or
            ``headroom`` below 1 or infinite; scales that float32 cannot hold.
    """
    problems: list[Problem] = []
    if not 1 <= headroom < math.inf:
        need = "1 or more, and finite: less saturates what was seen"
        problems.append(Problem("headroom", f"{headroom}", need))
    values: dict[Key, NDArray[np.float32]] = {}
    required: dict[Key, Constant] = {}
    for layer, tensors in observed.items():
        for name, x in tensors.items():
            place = f"observed[{layer}][{name!r}]"
            found = _unusable(name, x, codecs, place)
            problems += found
            if not found:
                for constant, value in _fit(name, x.detach(), codecs[name], headroom):
                    key = Key(layer, name, constant.name)
                    values[key], required[key] = value, constant
    seen = {name for tensors in observed.values() for name in tensors}
    problems += [
        Problem(f"codecs[{name!r}]", "no observation", "keys and values of at least one layer")
        for name in codecs
        if name not in seen
    ]
    if problems:
        raise SpecError(*problems)
    fitted = Constants(values)
    fitted.check(required, "observed")
    return fitted


def _unusable(name: str, x: Tensor, codecs: Mapping[str, Codec], place: str) -> list[Problem]:
    if name not in codecs:
        return [Problem(place, "a tensor without codec", f"one of {', '.join(codecs)}")]
    if x.dim() < 3 or x.numel() == 0:
        return [Problem(place, f"shape {list(x.shape)}", "[rows..., head, dim] with rows")]
    if not x.isfinite().all():
        return [Problem(place, "NaN or infinity", "finite values")]
    if not x.any():
        return [Problem(place, "zeros only", "values of real tokens")]
    return []


def _fit(
    name: str, x: Tensor, codec: Codec, headroom: float
) -> Iterator[tuple[Constant, NDArray[np.float32]]]:
    """(constant, calibrated value), centers first: scales fit what they leave."""
    axes = (("head", x.shape[-2]), ("dim", x.shape[-1]))
    constants = codec.constants(Logical(name, name, axes, "float32"))
    rows = x.double().flatten(0, -3)
    for constant in sorted(constants, key=lambda constant: constant.statistic == "amax"):
        kept = [axis for axis, _ in constant.axes]
        reduced = [0] + [place for place, (axis, _) in enumerate(axes, 1) if axis not in kept]
        if constant.statistic == "mean":
            value = rows.mean(reduced)
            rows = rows - value
        else:
            value = rows.abs().amax(reduced)
            # A head that was never active gets the range of the others, not a scale of zero.
            value = value.where(value > 0, value.max()) * headroom
        yield constant, (value / constant.full_scale).float().cpu().numpy()


def is_ours(path: Path) -> bool:
    """Whether ``path`` is a file that ``Constants.save`` wrote.

    Raises:
        SpecError: no such file, or no safetensors.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return bool((file.metadata() or {}).get("format") == FORMAT)
    except (OSError, SafetensorError) as error:
        need = "a safetensors file of constants"
        raise SpecError(Problem(str(path), str(error) or "no file", need)) from None


def _read(path: Path) -> dict[str, NDArray[np.float32]]:
    from safetensors import safe_open

    if not is_ours(path):
        fix = "kvfactory.calibration.checkpoint.from_checkpoint reads those of models"
        raise SpecError(Problem(str(path), "another safetensors file", FORMAT, fix))
    found: dict[str, NDArray[np.float32]] = {}
    with safe_open(path, framework="numpy") as file, np.errstate(over="ignore"):
        for name in file.keys():
            try:
                value = file.get_tensor(name)
                if np.iscomplexobj(value):
                    raise SpecError(Problem(f"{path}: {name}", f"{value.dtype}", "float32"))
                found[name] = value.astype(np.float32)
            except (TypeError, AttributeError):  # numpy has no such type
                got = file.get_slice(name).get_dtype()
                raise SpecError(Problem(f"{path}: {name}", got, "float32")) from None
    return found


def _first(value: NDArray[np.float32], bad: NDArray[np.bool_]) -> str:
    return f"{float(value[bad].flat[0])}"
