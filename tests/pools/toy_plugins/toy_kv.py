"""A third party's layout and number format, known to kvfactory by entry points alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvfactory.errors import Problem
from kvfactory.layouts import Layout
from kvfactory.quant import Codec, Constant, Logical, Options, Plane
from kvfactory.quant.codec import TOKEN_ROLES, Scheme
from kvfactory.quant.numerics import torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

LAYOUT = Layout("toy_inside_out", "page layer plane dim%2 slot head dim/2")


class Sixteenths:
    """Odd on purpose: int16 codes of x / (step gain), two steps a head, and a flag per element."""

    name = "toy_sixteenths"

    def problems(self, tensor: Logical, path: str) -> tuple[Problem, ...]:
        if tensor.extent("dim") % 2 == 0:
            return ()
        return (Problem(path, f"dim {tensor.extent('dim')}", "an even one"),)

    def planes(self, tensor: Logical) -> tuple[Plane, ...]:
        heads, dim = tensor.extent("head"), tensor.extent("dim")
        return (
            Plane("data", "int16", tensor.axes),
            Plane("step", "float32", (("head", heads), ("dim", 2))),
            Plane("flag", "uint8", (("head", heads), ("dim", dim))),
        )

    def constants(self, tensor: Logical) -> tuple[Constant, ...]:
        return (Constant("gain", (("head", tensor.extent("head")),), 2.0),)

    def encode(
        self, tensor: Logical, x: Tensor, constants: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        import torch

        halves = x.float().unflatten(-1, (2, -1))
        step = halves.abs().amax(-1) / 1024 + 1e-6
        codes = (halves / step.unsqueeze(-1)).flatten(-2) / constants["gain"].unsqueeze(-1)
        return {
            "data": codes.round().to(torch.int16),
            "step": step,
            "flag": (x > 0).to(torch.uint8),
        }

    def decode(
        self,
        tensor: Logical,
        planes: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        dtype: str,
    ) -> Tensor:
        codes = planes["data"].float() * constants["gain"].unsqueeze(-1)
        halves = codes.unflatten(-1, (2, -1)) * planes["step"].unsqueeze(-1)
        return halves.flatten(-2).to(torch_dtype(dtype))

    def device(self, tensor: Logical) -> None:
        return None


def _make(options: Options) -> Codec:
    return Sixteenths()


QUANT = Scheme(
    "toy_sixteenths", "16-bit codes, two steps a head", "this test", _make, roles=TOKEN_ROLES
)
