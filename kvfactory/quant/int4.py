# mypy: disable-error-code="name-defined,no-untyped-def,untyped-decorator"
"""Four-bit integers with an asymmetric float16 scale and zero per group of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from kvfactory.errors import Problem
from kvfactory.quant.center import token_scheme
from kvfactory.quant.codec import Constant, DeviceCodec, Logical, Plane, Scheme
from kvfactory.quant.nibbles import pack, packed_plane, unpack
from kvfactory.quant.numerics import (
    block_plane,
    block_problems,
    blocks,
    canonical,
    divide,
    load,
    nonzero,
    torch_dtype,
)

if TYPE_CHECKING:
    from torch import Tensor

FLOAT16_MAX = 65504.0
INT4_LEVELS = 15.0


@dataclass(frozen=True)
class GroupInt4:
    """scale = f16((max - min) / 15), zero = f16(min), q = rint((x - zero) / scale) in 0..15.

    Inputs are clamped to +-65504 first; a scale of 0 becomes 1. Groups are ``group`` elements.
    """

    name: str
    group: int

    def problems(self, tensor: Logical, path: str) -> tuple[Problem, ...]:
        """Groups must fill a row."""
        reason = f"{self.name} scales groups of {self.group}"
        return block_problems(tensor, path, self.group, reason, "int8_token_head")

    def planes(self, tensor: Logical) -> tuple[Plane, ...]:
        """``data``: two codes a byte; ``scale`` and ``zero``: float16 per group."""
        scale, zero = (block_plane(tensor, x, "float16", self.group) for x in ("scale", "zero"))
        return (packed_plane(tensor), scale, zero)

    def constants(self, tensor: Logical) -> tuple[Constant, ...]:
        """None."""
        return ()

    def encode(
        self, tensor: Logical, x: Tensor, constants: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Codes, scales and zeros; a group with a NaN has both NaN and codes 0."""
        import torch

        groups = blocks(load(tensor, x).clamp(-FLOAT16_MAX, FLOAT16_MAX), self.group)
        low, high = canonical(groups.amin(-1)), canonical(groups.amax(-1))
        scale = canonical(nonzero(divide(high - low, INT4_LEVELS).half()))
        zero = canonical(low.half())
        steps = (groups - zero.float().unsqueeze(-1)) / scale.float().unsqueeze(-1)
        codes = steps.round().clamp(0, INT4_LEVELS).nan_to_num(nan=0.0).to(torch.uint8)
        return {"data": pack(codes.flatten(-2)), "scale": scale, "zero": zero}

    def decode(
        self,
        tensor: Logical,
        planes: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        dtype: str,
    ) -> Tensor:
        """q * scale + zero in float32 without fusing the two, then ``dtype``."""
        codes = blocks(unpack(planes["data"]), self.group).float()
        scaled = codes * planes["scale"].float().unsqueeze(-1)
        values = scaled + planes["zero"].float().unsqueeze(-1)
        return values.flatten(-2).to(torch_dtype(dtype))

    def device(self, tensor: Logical) -> DeviceCodec:
        """The functions below, told the length of a group."""
        return DeviceCodec(*_triton(), (self.group,))


@cache
def _triton() -> tuple[Any, Any]:
    """encode and decode; the option is the number of elements in a group."""
    global tl, device, division, extremes, fourbit
    import triton
    import triton.language as tl

    from kvfactory.quant.device import division, extremes, fourbit
    from kvfactory.quant.device import numerics as device

    @triton.jit
    def encode(x, constants, options: tl.constexpr):
        groups = device.grouped(x, options[0])
        low, high = extremes.extremes(groups)
        low, high = device.clamp(low, -65504.0, 65504.0), device.clamp(high, -65504.0, 65504.0)
        scale = division.divide_by_small(high - low, 15.0).to(tl.float16)
        scale = tl.where(scale > 0.0, scale, 1.0)
        zero = low.to(tl.float16)
        fine = low == low
        begin, step = zero.to(tl.float32), scale.to(tl.float32) * 16.0
        inverse = division.reciprocal(step)
        # The clamp of the input to 65504 and that of the code to 15, in sixteenths.
        most = tl.minimum(division.part(begin - 65504.0, step, inverse), 0.9375)
        most = tl.where(fine, most, 0.0)[:, :, None]
        steps = begin[:, :, None] - device.widen(groups)
        steps = division.part(steps, step[:, :, None], inverse[:, :, None])
        codes = fourbit.whole(tl.minimum(steps, most))
        nan = tl.full(low.shape, float("nan"), tl.float16)
        data = fourbit.pack(device.flat(codes))
        return data, tl.where(fine, scale, nan), tl.where(fine, zero, nan)

    @triton.jit
    def decode(planes, constants, options: tl.constexpr):
        codes = device.grouped(fourbit.unpack(planes[0]).to(tl.float32), options[0])
        scaled = codes * planes[1].to(tl.float32)[:, :, None]
        return device.flat(scaled + planes[2].to(tl.float32)[:, :, None])

    return encode, decode


def _scheme(group: int, relative_rms_error: float) -> Scheme:
    name = f"int4_g{group}"
    return token_scheme(
        GroupInt4(name, group),
        summary=f"asymmetric int4 with a float16 scale and zero per {group} elements",
        source="KIVI's asymmetric round-to-nearest, arXiv 2402.02750, grouped along the head dim",
        relative_rms_error=relative_rms_error,
    )


PLUGINS = (_scheme(32, 0.078), _scheme(128, 0.100))
