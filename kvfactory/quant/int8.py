# mypy: disable-error-code="name-defined,no-untyped-def,untyped-decorator"
"""Eight-bit integers with one symmetric scale per row: token heads, and recurrent state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from kvfactory.errors import Problem
from kvfactory.quant.center import token_scheme
from kvfactory.quant.codec import (
    Constant,
    DeviceCodec,
    Logical,
    Options,
    Plane,
    Scheme,
)
from kvfactory.quant.numerics import (
    INT8_MAX,
    amax,
    canonical,
    divide,
    load,
    nonzero,
    to_int8,
    torch_dtype,
    without,
)
from kvfactory.quant.plain import Plain

if TYPE_CHECKING:
    from torch import Tensor

STATE_AMAX_MIN = 1e-8


@dataclass(frozen=True)
class RowInt8:
    """scale = amax / 127 of a (token, head) row, 1 for a zero row; q = rint(x / scale)."""

    name: str

    def problems(self, tensor: Logical, path: str) -> tuple[Problem, ...]:
        """None: a row of any length has one scale."""
        return ()

    def planes(self, tensor: Logical) -> tuple[Plane, ...]:
        """``data``: int8 per element; ``scale``: float32 per row."""
        scale = Plane("scale", "float32", without(tensor.axes, "dim"))
        return (Plane("data", "int8", tensor.axes), scale)

    def constants(self, tensor: Logical) -> tuple[Constant, ...]:
        """None."""
        return ()

    def encode(
        self, tensor: Logical, x: Tensor, constants: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Codes in +-127, ties to even; a row with a NaN has the scale NaN and codes 0."""
        x = load(tensor, x)
        scale = nonzero(divide(amax(x), INT8_MAX))
        return {"data": to_int8(x / scale.unsqueeze(-1)), "scale": scale}

    def decode(
        self,
        tensor: Logical,
        planes: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        dtype: str,
    ) -> Tensor:
        """q * scale in float32, then ``dtype``."""
        values = planes["data"].float() * planes["scale"].unsqueeze(-1)
        return values.to(torch_dtype(dtype))

    def device(self, tensor: Logical) -> DeviceCodec:
        """The functions of scales per row."""
        return DeviceCodec(*_row_triton())


@dataclass(frozen=True)
class StateInt8:
    """scale = max(amax, 1e-8) / 127 over the ``value`` axis of a recurrent state, in its own type.

    A row is one (slot, head, key), wherever ``value`` stands among the axes. A tensor without that
    axis, such as a convolution state, is stored by ``other``.
    """

    name: str
    other: Plain

    def problems(self, tensor: Logical, path: str) -> tuple[Problem, ...]:
        """None: a row of any length has one scale."""
        return ()

    def planes(self, tensor: Logical) -> tuple[Plane, ...]:
        """``data``: int8 per element; ``scale``: the state's type per row."""
        if not _has_rows(tensor):
            return self.other.planes(tensor)
        scale = Plane("scale", tensor.dtype, without(tensor.axes, "value"))
        return (Plane("data", "int8", tensor.axes), scale)

    def constants(self, tensor: Logical) -> tuple[Constant, ...]:
        """None."""
        return ()

    def encode(
        self, tensor: Logical, x: Tensor, constants: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Codes in +-127 of x / scale, after the scale is rounded to the state's type."""
        if not _has_rows(tensor):
            return self.other.encode(tensor, x, constants)
        x, axis = load(tensor, x), _value_axis(tensor)
        scale = divide(amax(x, axis).clamp(min=STATE_AMAX_MIN), INT8_MAX)
        # How torch narrows a NaN depends on its vector unit; stored bytes must not.
        scale = canonical(scale.to(torch_dtype(tensor.dtype)))
        return {"data": to_int8(x / scale.float().unsqueeze(axis)), "scale": scale}

    def decode(
        self,
        tensor: Logical,
        planes: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        dtype: str,
    ) -> Tensor:
        """q * scale in float32, then ``dtype``."""
        if not _has_rows(tensor):
            return self.other.decode(tensor, planes, constants, dtype)
        values = planes["data"].float() * planes["scale"].float().unsqueeze(_value_axis(tensor))
        return values.to(torch_dtype(dtype))

    def device(self, tensor: Logical) -> DeviceCodec | None:
        """The functions of state rows, told the type of the scale; a convolution's are plain."""
        if not _has_rows(tensor):
            return self.other.device(tensor)
        encode, decode, dtypes = _state_triton()
        return DeviceCodec(encode, decode, (dtypes[tensor.dtype],), "value")


@cache
def _row_triton() -> tuple[Any, Any]:
    """encode and decode of int8 with a float32 scale per row."""
    global tl, device, division, extremes
    import triton
    import triton.language as tl

    from kvfactory.quant.device import division, extremes
    from kvfactory.quant.device import numerics as device

    @triton.jit
    def encode(x, constants, options: tl.constexpr):
        amax = extremes.amax(x, 1)
        scale = device.nonzero(division.divide_by_small(amax, 127.0))[:, None]
        # An odd divisor leaves no tie among subnormal quotients: the short division is exact there.
        codes = device.rint_bits(division.coded_integer(x, scale, 127.0))
        return codes.to(tl.int8), scale

    @triton.jit
    def decode(planes, constants, options: tl.constexpr):
        return planes[0].to(tl.float32) * planes[1]

    return encode, decode


@cache
def _state_triton() -> tuple[Any, Any, Mapping[str, Any]]:
    """encode and decode with the type of the scale as their option, and Triton's types by name."""
    global tl, device, division, extremes
    import triton
    import triton.language as tl

    from kvfactory.quant.device import division, extremes
    from kvfactory.quant.device import numerics as device

    @triton.jit
    def encode(x, constants, options: tl.constexpr):
        x = device.load(x)
        scale = division.divide_by(device.no_less(extremes.amax(x, 1), 1e-8), 127.0)
        scale = device.cast(scale, options[0])[:, None]
        return device.to_int8(tl.div_rn(x, scale.to(tl.float32))), scale

    @triton.jit
    def decode(planes, constants, options: tl.constexpr):
        return planes[0].to(tl.float32) * planes[1].to(tl.float32)

    return encode, decode, device.DTYPES


def _has_rows(tensor: Logical) -> bool:
    return "value" in dict(tensor.axes)


def _value_axis(tensor: Logical) -> int:
    """Position of ``value`` counted from the end, as leading row dims are free."""
    return [name for name, _ in tensor.axes].index("value") - len(tensor.axes)


def _make_state(options: Options) -> StateInt8:
    return StateInt8("state_int8", Plain())


PLUGINS = (
    token_scheme(
        RowInt8("int8_token_head"),
        summary="int8 with a float32 scale per token and head",
        source="LLM.int8() row-wise absmax, arXiv 2208.07339; per-token-head scales of vLLM",
        relative_rms_error=0.0065,
    ),
    Scheme(
        name="state_int8",
        summary="int8 recurrent state with a scale per head and key; convolution state stays plain",
        source="row-wise absmax, arXiv 2208.07339, over the value axis of a linear-attention state",
        make=_make_state,
        roles=frozenset({"state"}),
        relative_rms_error=0.0065,
    ),
)
