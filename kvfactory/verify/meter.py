"""Relative errors: of answers, and of what a number format gives back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvfactory.planning.cacheplan import GroupPlan, TensorPlan
from kvfactory.quant import resolve_codec
from kvfactory.quant.numerics import torch_dtype
from kvfactory.verify.workload import KEY_ROLES

SAMPLE_ROWS = 2048

Constants = Mapping[str, Mapping[str, Tensor]]
"""Tensor name -> constant name -> float32 values of one layer."""


@dataclass
class ErrorMeter:
    """||got - want|| / ||want|| over all that was added, by name; sums are float64."""

    _sums: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, got: Tensor, want: Tensor) -> None:
        """Count ``got`` against ``want``, tensors of one shape."""
        sums = self._sums.setdefault(name, [0.0, 0.0, 0.0])
        exact = want.double()
        sums[0] += float((got.double() - exact).square().sum())
        sums[1] += float(exact.square().sum())
        sums[2] += got.numel()

    def relative(self, name: str) -> float:
        """The relative error; NaN as soon as anything was, infinite where zeros were wanted."""
        error, size, _ = self._sums.get(name, (0.0, 0.0, 0.0))
        if not error:
            return 0.0
        return math.sqrt(error / size) if size else math.inf

    def count(self, name: str) -> int:
        """Numbers that were compared."""
        return int(self._sums.get(name, (0.0, 0.0, 0.0))[2])


def round_trip(
    tensor: TensorPlan,
    x: Tensor,
    constants: Mapping[str, Tensor] | None = None,
    dtype: str | None = None,
) -> Tensor:
    """``x`` [rows, *axes] as the tensor's format gives it back, in ``dtype`` or the compute type.

    ``constants`` are one layer's; their defaults otherwise.
    """
    codec = resolve_codec(tensor.quant, dict(tensor.options), f"quant of {tensor.name}")
    known = {c.name: x.new_full(c.shape, c.default, dtype=torch.float32) for c in tensor.constants}
    known.update(constants or {})
    planes = codec.encode(tensor.logical, x, known)
    return codec.decode(tensor.logical, planes, known, dtype or tensor.logical.dtype)


def storage_errors(
    group: GroupPlan, constants: Constants | None = None, seed: int = 0
) -> tuple[float, float]:
    """Relative errors of stored keys and values of an attention group, on N(0, 1).

    Keys of latent attention are latent and rope together, values the latent; where only keys are
    stored the values are the keys.
    """
    meter, random = ErrorMeter(), torch.Generator().manual_seed(seed)
    for tensor in group.tensors:
        shape = [extent for _, extent in tensor.logical.axes]
        rows = max(1, SAMPLE_ROWS // shape[0])
        x = torch.randn(rows, *shape, generator=random).to(torch_dtype(tensor.logical.dtype))
        found = {name: c.to("cpu") for name, c in (constants or {}).get(tensor.name, {}).items()}
        back = round_trip(tensor, x, found)
        meter.add(tensor.name, back, x)
        if tensor.logical.role in KEY_ROLES:
            meter.add("key", back, x)
    value = next(name for name in ("latent", "v", "k") if group.has(name))
    return meter.relative("key"), meter.relative(value)
