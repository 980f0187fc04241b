# mypy: disable-error-code="name-defined,no-untyped-def,untyped-decorator"
"""OCP Microscaling: blocks of 32 elements share a power-of-two scale.

The scale exponent is rounded up, so that no element of a block saturates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from kvfactory.errors import Problem
from kvfactory.quant import e2m1, e8m0
from kvfactory.quant.center import token_scheme
from kvfactory.quant.codec import Constant, DeviceCodec, Logical, Plane
from kvfactory.quant.nibbles import pack, packed_plane
from kvfactory.quant.numerics import (
    E4M3,
    E4M3_MAX,
    amax,
    block_plane,
    blocks,
    divide,
    load,
    scaled_block_problems,
    to_fp8,
    torch_dtype,
    widen,
)

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
AMAX_MIN = 1e-30


@dataclass(frozen=True)
class MxFp8:
    """e = ceil(log2(max(amax, 1e-30) / 448)); q = e4m3(x / 2^e)."""

    name: str

    def problems(self, tensor: Logical, path: str) -> tuple[Problem, ...]:
        """Blocks must fill a row."""
        return scaled_block_problems(tensor, path, BLOCK, self.name)

    def planes(self, tensor: Logical) -> tuple[Plane, ...]:
        """``data``: a byte per element; ``scale``: E8M0 per block."""
        return (Plane("data", E4M3, tensor.axes), block_plane(tensor, "scale", e8m0.E8M0, BLOCK))

    def constants(self, tensor: Logical) -> tuple[Constant, ...]:
        """None."""
        return ()

    def encode(
        self, tensor: Logical, x: Tensor, constants: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Codes and scales; a block with a NaN has the scale byte 255."""
        block, scale = _scaled(load(tensor, x), E4M3_MAX)
        return {
            "data": to_fp8(block, E4M3).flatten(-2),
            "scale": scale.view(torch_dtype(e8m0.E8M0)),
        }

    def decode(
        self,
        tensor: Logical,
        planes: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        dtype: str,
    ) -> Tensor:
        """q * 2^e in float32, then ``dtype``."""
        values = e8m0.unscaled(widen(planes["data"]), planes["scale"], BLOCK)
        return values.to(torch_dtype(dtype))

    def device(self, tensor: Logical) -> DeviceCodec:
        """The functions below, for E4M3."""
        return DeviceCodec(*_triton(), (False,))


@dataclass(frozen=True)
class MxFp4:
    """e = ceil(log2(max(amax, 1e-30) / 6)); q = e2m1(x / 2^e), ties to even, -0 keeps its sign."""

    name: str

    def problems(self, tensor: Logical, path: str) -> tuple[Problem, ...]:
        """Blocks must fill a row."""
        return scaled_block_problems(tensor, path, BLOCK, self.name)

    def planes(self, tensor: Logical) -> tuple[Plane, ...]:
        """``data``: two codes a byte; ``scale``: E8M0 per block."""
        return (packed_plane(tensor), block_plane(tensor, "scale", e8m0.E8M0, BLOCK))

    def constants(self, tensor: Logical) -> tuple[Constant, ...]:
        """None."""
        return ()

    def encode(
        self, tensor: Logical, x: Tensor, constants: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Codes and scales; a block with a NaN has the scale byte 255 and codes 0."""
        block, scale = _scaled(load(tensor, x), e2m1.E2M1_MAX)
        data = pack(e2m1.round_even(block).flatten(-2))
        return {"data": data, "scale": scale.view(torch_dtype(e8m0.E8M0))}

    def decode(
        self,
        tensor: Logical,
        planes: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        dtype: str,
    ) -> Tensor:
        """q * 2^e in float32, then ``dtype``."""
        return e8m0.unscaled_e2m1(planes, BLOCK).to(torch_dtype(dtype))

    def device(self, tensor: Logical) -> DeviceCodec:
        """The functions below, for E2M1."""
        return DeviceCodec(*_triton(), (True,))


@cache
def _triton() -> tuple[Any, Any]:
    """encode and decode; the option is whether elements are E2M1."""
    global tl, device, extremes, fourbit
    import triton
    import triton.language as tl

    from kvfactory.quant.device import extremes, fourbit
    from kvfactory.quant.device import numerics as device

    @triton.jit
    def encode(x, constants, options: tl.constexpr):
        blocks = device.grouped(x, 32)
        amax = device.no_less(extremes.amax(blocks, 2, options[0]), 1e-30)
        if options[0]:
            scale = device.exponent_over(amax, 6)
            codes = fourbit.e2m1_by_power(blocks, scale, False)
            data = fourbit.pack(device.flat(codes))
        else:
            scale = device.exponent_over(amax, 448)
            step = device.inverse_power(scale)[:, :, None]
            data = device.to_e4m3(device.flat(device.load(blocks) * step))
        return data, scale.to(tl.uint8)

    @triton.jit
    def decode(planes, constants, options: tl.constexpr):
        if options[0]:
            values = fourbit.e2m1_values(fourbit.unpack(planes[0]))
        else:
            values = device.from_e4m3(planes[0])
        return device.unscaled(values, planes[1], 32)

    return encode, decode


def _scaled(x: Tensor, element_max: float) -> tuple[Tensor, Tensor]:
    """x / 2^e [..., D / 32, 32] float32 and the bytes of e [..., D / 32] uint8."""
    block = blocks(x, BLOCK)
    scale = e8m0.round_up(divide(amax(block).clamp(min=AMAX_MIN), element_max))
    return block / e8m0.powers(scale).unsqueeze(-1), scale


PLUGINS = (
    token_scheme(
        MxFp8("mxfp8"),
        summary="E4M3 with a power-of-two scale per 32 elements",
        source="OCP Microscaling Formats (MX) Specification v1.0, scale exponent rounded up",
        relative_rms_error=0.0265,
    ),
    token_scheme(
        MxFp4("mxfp4"),
        summary="E2M1 with a power-of-two scale per 32 elements",
        source="OCP Microscaling Formats (MX) Specification v1.0, scale exponent rounded up",
        relative_rms_error=0.115,
    ),
)
