"""One tensor through one codec, with constants at their defaults unless given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfactory.quant import Codec, Logical, resolve_codec


@dataclass(frozen=True)
class Coded:
    """``x`` encoded; ``bytes_of`` gives a plane as comparable integers."""

    codec: Codec
    tensor: Logical
    constants: Mapping[str, Tensor]
    planes: Mapping[str, Tensor]

    def bytes_of(self, part: str) -> Tensor:
        return self.planes[part].cpu().contiguous().unsqueeze(-1).view(torch.uint8)

    def decoded(self, dtype: str = "float32") -> Tensor:
        return self.codec.decode(self.tensor, self.planes, self.constants, dtype)


@dataclass(frozen=True)
class Coder:
    """A scheme with options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, x: Tensor, tensor: Logical | None = None, **constants: Tensor) -> Coded:
        if tensor is None and self.name == "state_int8":
            x = x.unsqueeze(-2)
            tensor = self.state(x)
        tensor = tensor or self.tokens(x)
        codec = resolve_codec(self.name, self.options, "quant")
        bound = {
            known.name: torch.full(
                [extent for _, extent in known.axes], known.default, device=x.device
            )
            for known in codec.constants(tensor)
        }
        assert set(constants) <= set(bound)
        bound.update(constants)
        return Coded(codec, tensor, bound, codec.encode(tensor, x, bound))

    @staticmethod
    def tokens(x: Tensor, dtype: str = "float32", role: str = "k") -> Logical:
        """The logical tensor of ``x`` [..., heads, dim]."""
        return Logical(role, role, (("head", x.shape[-2]), ("dim", x.shape[-1])), dtype)

    @staticmethod
    def state(x: Tensor, axes: str = "head key value", dtype: str = "float32") -> Logical:
        """The logical tensor of a recurrent state ``x`` [slots, three axes]."""
        named = tuple(zip(axes.split(), x.shape[-3:], strict=True))
        return Logical("recurrent", "state", named, dtype)


@pytest.fixture
def coder() -> type[Coder]:
    return Coder


@pytest.fixture
def normal() -> Tensor:
    """A million float64 samples of N(0, 1) [8192, 1, 128]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8192, 1, 128, dtype=torch.float64, generator=generator)
