# mypy: disable-error-code="name-defined,no-untyped-def,untyped-decorator"
"""Four-bit floats in blocks of 16: SGLang's power-of-two form, and NVFP4 with its two scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from kvfactory.errors import Problem
from kvfactory.quant import e2m1, e8m0
from kvfactory.quant.center import token_scheme
from kvfactory.quant.codec import Constant, DeviceCodec, Logical, Plane
from kvfactory.quant.nibbles import pack, packed_plane, unpack
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
)

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 16
BLOCK16_SCALE_MIN = 1e-10
NVFP4_MAX = e2m1.E2M1_MAX * E4M3_MAX
"""Largest magnitude that NVFP4 holds with a global scale of 1: 6 x 448 = 2688."""


@dataclass(frozen=True)
class Fp4Block16:
    """e = ceil(log2(max(amax / 6, 1e-10))); q = e2m1(x / 2^e), ties away from zero."""

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
        block = blocks(load(tensor, x), BLOCK)
        target = divide(amax(block), e2m1.E2M1_MAX).clamp(min=BLOCK16_SCALE_MIN)
        scale = e8m0.round_up(target)
        codes = e2m1.round_away(block / e8m0.powers(scale).unsqueeze(-1))
        return {"data": pack(codes.flatten(-2)), "scale": scale.view(torch_dtype(e8m0.E8M0))}

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
        """The functions of power-of-two scales."""
        return DeviceCodec(*_block16_triton())


@dataclass(frozen=True)
class NvFp4:
    """scale = e4m3(amax / 6 / g); q = e2m1(x / (scale g)), ties to even, 0 where scale is 0.

    g is the constant ``global_scale``, float32 [], default 1; calibrated it is amax / 2688.
    """

    name: str

    def problems(self, tensor: Logical, path: str) -> tuple[Problem, ...]:
        """Blocks must fill a row."""
        return scaled_block_problems(tensor, path, BLOCK, self.name)

    def planes(self, tensor: Logical) -> tuple[Plane, ...]:
        """``data``: two codes a byte; ``scale``: E4M3 per block."""
        return (packed_plane(tensor), block_plane(tensor, "scale", E4M3, BLOCK))

    def constants(self, tensor: Logical) -> tuple[Constant, ...]:
        """``global_scale``, one a layer."""
        return (Constant("global_scale", (), 1.0, "amax", NVFP4_MAX),)

    def encode(
        self, tensor: Logical, x: Tensor, constants: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Codes and scales; a block with a NaN has the scale byte 0x7F and codes 0."""
        block = blocks(load(tensor, x), BLOCK)
        global_scale = constants["global_scale"]
        scale = to_fp8(divide(amax(block), e2m1.E2M1_MAX) / global_scale, E4M3)
        step = (scale.float() * global_scale).unsqueeze(-1)
        codes = e2m1.round_even(block / step).masked_fill(step == 0, 0)
        return {"data": pack(codes.flatten(-2)), "scale": scale}

    def decode(
        self,
        tensor: Logical,
        planes: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        dtype: str,
    ) -> Tensor:
        """(q * scale) * g in float32, then ``dtype``."""
        scale = planes["scale"].float().unsqueeze(-1)
        values = blocks(e2m1.values(unpack(planes["data"])), BLOCK) * scale
        return (values * constants["global_scale"]).flatten(-2).to(torch_dtype(dtype))

    def device(self, tensor: Logical) -> DeviceCodec:
        """The functions of E4M3 scales."""
        return DeviceCodec(*_nvfp4_triton())


@cache
def _block16_triton() -> tuple[Any, Any]:
    """encode and decode of E2M1 with a power-of-two scale per 16 elements."""
    global tl, device, extremes, fourbit
    import triton
    import triton.language as tl

    from kvfactory.quant.device import extremes, fourbit
    from kvfactory.quant.device import numerics as device

    @triton.jit
    def encode(x, constants, options: tl.constexpr):
        blocks = device.grouped(x, 16)
        # 94 is the code of 1e-10, below which no scale goes.
        scale = tl.maximum(device.exponent_over(extremes.amax(blocks, 2, True), 6), 94)
        codes = fourbit.e2m1_by_power(blocks, scale, True)
        return fourbit.pack(device.flat(codes)), scale.to(tl.uint8)

    @triton.jit
    def decode(planes, constants, options: tl.constexpr):
        values = fourbit.e2m1_values(fourbit.unpack(planes[0]))
        return device.unscaled(values, planes[1], 16)

    return encode, decode


@cache
def _nvfp4_triton() -> tuple[Any, Any]:
    """encode and decode of E2M1 with an E4M3 scale per 16 elements; g is the constant."""
    global tl, device, division, extremes, fourbit
    import triton
    import triton.language as tl

    from kvfactory.quant.device import division, extremes, fourbit
    from kvfactory.quant.device import numerics as device

    @triton.jit
    def encode(x, constants, options: tl.constexpr):
        blocks = device.grouped(x, 16)
        target = division.divide_by_small(extremes.amax(blocks, 2, True), 6.0)
        scale = device.to_e4m3(division.coded(target, constants[0], 448.0))
        step = (device.from_e4m3(scale) * constants[0])[:, :, None]
        size = division.eighths(blocks, step, step > 0.0)
        bias = tl.where(step > 0.0, fourbit.SIGN_BIAS, 0.0)
        codes = fourbit.with_sign(fourbit.e2m1_even(size, 4.0, bias), device.widen(blocks), bias)
        return fourbit.pack(device.flat(codes)), scale

    @triton.jit
    def decode(planes, constants, options: tl.constexpr):
        values = device.grouped(fourbit.e2m1_values(fourbit.unpack(planes[0])), 16)
        values = values * device.from_e4m3(planes[1])[:, :, None]
        return device.flat(values * constants[0])

    return encode, decode


PLUGINS = (
    token_scheme(
        Fp4Block16("fp4_block16"),
        summary="E2M1 with a power-of-two scale per 16 elements, ties away from zero",
        source="SGLang's FP4 KV cache (KVFP4QuantizeUtil)",
        relative_rms_error=0.113,
    ),
    token_scheme(
        NvFp4("nvfp4"),
        summary="E2M1 with an E4M3 scale per 16 elements and a calibrated global scale",
        source="Pretraining Large Language Models with NVFP4, arXiv 2509.25149",
        relative_rms_error=0.095,
    ),
)
