# mypy: disable-error-code="name-defined,no-untyped-def,untyped-decorator"
"""Eight-bit floats: static scales, one scale per row, one scale per tile of 128.

The element types are E4M3 (finite only, largest 448) and E5M2 (largest finite 57344) of
"FP8 Formats for Deep Learning" (arXiv 2209.05433). Casts saturate; ties go to even.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from kvfactory.errors import Problem
from kvfactory.quant.center import CenterOptions, centered, token_scheme
from kvfactory.quant.codec import (
    TOKEN_ROLES,
    Codec,
    Constant,
    DeviceCodec,
    Logical,
    Options,
    Plane,
    Scheme,
)
from kvfactory.quant.numerics import (
    E4M3,
    E4M3_MAX,
    E5M2,
    FP8_MAX,
    amax,
    block_plane,
    block_problems,
    blocks,
    divide,
    load,
    nonzero,
    to_fp8,
    torch_dtype,
    widen,
    without,
)

if TYPE_CHECKING:
    from torch import Tensor

TILE = 128
TILE_AMAX_MIN = 1e-4


class StaticFp8Options(CenterOptions):
    """``scale``: one de-scale per layer and tensor, or one per head of it."""

    scale: Literal["tensor", "head"] = "tensor"


@dataclass(frozen=True)
class StaticFp8:
    """q = fp8(x / scale); ``scale`` is a constant, float32 [] or [head], default 1."""

    name: str
    dtype: str
    per_head: bool = False

    def problems(self, tensor: Logical, path: str) -> tuple[Problem, ...]:
        """None: any row can be cast."""
        return ()

    def planes(self, tensor: Logical) -> tuple[Plane, ...]:
        """``data``: a byte per element."""
        return (Plane("data", self.dtype, tensor.axes),)

    def constants(self, tensor: Logical) -> tuple[Constant, ...]:
        """``scale``, one a layer or one a head."""
        axes = without(tensor.axes, "dim") if self.per_head else ()
        return (Constant("scale", axes, 1.0, "amax", FP8_MAX[self.dtype]),)

    def encode(
        self, tensor: Logical, x: Tensor, constants: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Saturated codes of x / scale; NaN is stored as the NaN code."""
        scale = constants["scale"].unsqueeze(-1)
        return {"data": to_fp8(load(tensor, x) / scale, self.dtype)}

    def decode(
        self,
        tensor: Logical,
        planes: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        dtype: str,
    ) -> Tensor:
        """q * scale in float32, then ``dtype``."""
        values = widen(planes["data"]) * constants["scale"].unsqueeze(-1)
        return values.to(torch_dtype(dtype))

    def device(self, tensor: Logical) -> DeviceCodec:
        """The functions of static scales, told the element type."""
        return DeviceCodec(*_static_triton(), (self.dtype == E4M3, self.per_head))


@dataclass(frozen=True)
class RowFp8:
    """scale = amax / 448 of a (token, head) row, 1 for a zero row; q = e4m3(x / scale)."""

    name: str

    def problems(self, tensor: Logical, path: str) -> tuple[Problem, ...]:
        """None: a row of any length has one scale."""
        return ()

    def planes(self, tensor: Logical) -> tuple[Plane, ...]:
        """``data``: a byte per element; ``scale``: float32 per row."""
        scale = Plane("scale", "float32", without(tensor.axes, "dim"))
        return (Plane("data", E4M3, tensor.axes), scale)

    def constants(self, tensor: Logical) -> tuple[Constant, ...]:
        """None."""
        return ()

    def encode(
        self, tensor: Logical, x: Tensor, constants: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Codes and scales; a row with a NaN has the scale NaN."""
        x = load(tensor, x)
        scale = nonzero(divide(amax(x), E4M3_MAX))
        return {"data": to_fp8(x / scale.unsqueeze(-1), E4M3), "scale": scale}

    def decode(
        self,
        tensor: Logical,
        planes: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        dtype: str,
    ) -> Tensor:
        """q * scale in float32, then ``dtype``."""
        values = widen(planes["data"]) * planes["scale"].unsqueeze(-1)
        return values.to(torch_dtype(dtype))

    def device(self, tensor: Logical) -> DeviceCodec:
        """The functions of scales per row."""
        return DeviceCodec(*_row_triton())


@dataclass(frozen=True)
class TileFp8:
    """scale = max(amax, 1e-4) / 448 of 128 elements of a row; q = e4m3(x / scale)."""

    name: str

    def problems(self, tensor: Logical, path: str) -> tuple[Problem, ...]:
        """Tiles must fill a row."""
        reason = f"{self.name} scales tiles of {TILE}"
        return block_problems(tensor, path, TILE, reason, "fp8_e4m3_token_head")

    def planes(self, tensor: Logical) -> tuple[Plane, ...]:
        """``data``: a byte per element; ``scale``: float32 per tile."""
        scale = block_plane(tensor, "scale", "float32", TILE)
        return (Plane("data", E4M3, tensor.axes), scale)

    def constants(self, tensor: Logical) -> tuple[Constant, ...]:
        """None."""
        return ()

    def encode(
        self, tensor: Logical, x: Tensor, constants: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Codes and scales; a tile with a NaN has the scale NaN."""
        tiles = blocks(load(tensor, x), TILE)
        scale = divide(amax(tiles).clamp(min=TILE_AMAX_MIN), E4M3_MAX)
        data = to_fp8(tiles / scale.unsqueeze(-1), E4M3)
        return {"data": data.flatten(-2), "scale": scale}

    def decode(
        self,
        tensor: Logical,
        planes: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        dtype: str,
    ) -> Tensor:
        """q * scale in float32, then ``dtype``."""
        tiles = widen(blocks(planes["data"], TILE)) * planes["scale"].unsqueeze(-1)
        return tiles.flatten(-2).to(torch_dtype(dtype))

    def device(self, tensor: Logical) -> DeviceCodec:
        """The functions of scales per tile."""
        return DeviceCodec(*_tile_triton())


@cache
def _static_triton() -> tuple[Any, Any]:
    """encode and decode; options: whether elements are E4M3, whether each head has a scale."""
    global tl, device, division
    import triton
    import triton.language as tl

    from kvfactory.quant.device import division
    from kvfactory.quant.device import numerics as device

    @triton.jit
    def encode(x, constants, options: tl.constexpr):
        high: tl.constexpr = 448.0 if options[0] else 57344.0
        if options[1]:
            codes = division.coded(x, constants[0], high)
        else:
            codes = division.coded_by_one(x, constants[0], high)
        data = device.to_e4m3(codes) if options[0] else device.to_e5m2(codes)
        return (data,)

    @triton.jit
    def decode(planes, constants, options: tl.constexpr):
        if options[0]:
            values = device.from_e4m3(planes[0])
        else:
            values = device.from_e5m2(planes[0])
        return values * constants[0]

    return encode, decode


@cache
def _row_triton() -> tuple[Any, Any]:
    """encode and decode of E4M3 with a scale per row."""
    global tl, device, division, extremes
    import triton
    import triton.language as tl

    from kvfactory.quant.device import division, extremes
    from kvfactory.quant.device import numerics as device

    @triton.jit
    def encode(x, constants, options: tl.constexpr):
        scale = device.nonzero(division.divide_by(extremes.amax(x, 1), 448.0))[:, None]
        return device.to_e4m3(division.coded(x, scale, 448.0)), scale

    @triton.jit
    def decode(planes, constants, options: tl.constexpr):
        return device.from_e4m3(planes[0]) * planes[1]

    return encode, decode


@cache
def _tile_triton() -> tuple[Any, Any]:
    """encode and decode of E4M3 with a scale per tile of 128."""
    global tl, device, division, extremes
    import triton
    import triton.language as tl

    from kvfactory.quant.device import division, extremes
    from kvfactory.quant.device import numerics as device

    @triton.jit
    def encode(x, constants, options: tl.constexpr):
        tiles = device.grouped(x, 128)
        amax = device.no_less(extremes.amax(tiles, 2), 1e-4)
        scale = division.divide_by_small(amax, 448.0)
        data = device.to_e4m3(division.coded(tiles, scale[:, :, None], 448.0))
        return device.flat(data), scale

    @triton.jit
    def decode(planes, constants, options: tl.constexpr):
        values = device.grouped(device.from_e4m3(planes[0]), 128)
        return device.flat(values * planes[1][:, :, None])

    return encode, decode


def _static(name: str, dtype: str, summary: str, relative_rms_error: float) -> Scheme:
    def make(options: Options) -> Codec:
        assert isinstance(options, StaticFp8Options)
        return centered(StaticFp8(name, dtype, options.scale == "head"), options)

    return Scheme(
        name=name,
        summary=summary,
        source="FP8 Formats for Deep Learning, arXiv 2209.05433; the static scales of vLLM, SGLang",
        make=make,
        options=StaticFp8Options,
        roles=TOKEN_ROLES,
        relative_rms_error=relative_rms_error,
    )


PLUGINS = (
    _static("fp8_e4m3", E4M3, "E4M3 with a static scale per tensor or head", 0.0265),
    _static("fp8_e5m2", E5M2, "E5M2 with a static scale per tensor or head", 0.0528),
    token_scheme(
        RowFp8("fp8_e4m3_token_head"),
        summary="E4M3 with a float32 scale per token and head",
        source="FP8 Formats for Deep Learning, arXiv 2209.05433; per-token-head scales of vLLM",
        relative_rms_error=0.0257,
    ),
    token_scheme(
        TileFp8("fp8_tile128"),
        summary="E4M3 with a float32 scale per 128 elements: DeepSeek's latents and index keys",
        source="DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3.2; FlashMLA",
        relative_rms_error=0.0257,
    ),
)
