# mypy: disable-error-code="name-defined,no-untyped-def,untyped-decorator"
"""``center``: a static mean per channel is removed before coding and added back after decoding.

Formats that share one scale among channels lose the small channels of a row with a few constant
large ones; the mean of a channel carries no information and need not be coded at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from kvfactory.errors import Problem
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
from kvfactory.quant.numerics import load, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

CENTERED_ROLES = frozenset({"k", "v"})


class CenterOptions(Options):
    """``center``: remove a calibrated mean per (head, channel) of k and v before coding."""

    center: bool = False


@dataclass(frozen=True)
class Centered:
    """``codec`` applied to x - center; ``center`` is a constant, float32 [head, dim], default 0."""

    codec: Codec

    @property
    def name(self) -> str:
        """The name of the scheme that codes the remainder."""
        return self.codec.name

    def problems(self, tensor: Logical, path: str) -> tuple[Problem, ...]:
        """Those of the codec itself; center serves k and v only."""
        found = self.codec.problems(tensor, path)
        if tensor.role in CENTERED_ROLES:
            return found
        need = "no center, which is for k and v; never for index keys, latents or state"
        refusal = Problem(path, f"center for role {tensor.role}", need, f"{path}={self.name}")
        return (*found, refusal)

    def planes(self, tensor: Logical) -> tuple[Plane, ...]:
        """Those of the codec."""
        return self.codec.planes(tensor)

    def constants(self, tensor: Logical) -> tuple[Constant, ...]:
        """Those of the codec and ``center`` [head, dim]."""
        return (*self.codec.constants(tensor), Constant("center", tensor.axes, 0.0, "mean"))

    def encode(
        self, tensor: Logical, x: Tensor, constants: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Planes of x - center, subtracted in float32."""
        return self.codec.encode(tensor, load(tensor, x) - constants["center"], constants)

    def decode(
        self,
        tensor: Logical,
        planes: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        dtype: str,
    ) -> Tensor:
        """The decoded remainder plus center, added in float32 before the cast to ``dtype``."""
        remainder = self.codec.decode(tensor, planes, constants, "float32")
        return (remainder + constants["center"]).to(torch_dtype(dtype))

    def device(self, tensor: Logical) -> DeviceCodec | None:
        """The codec's functions around those below, which take them as their option."""
        inner = self.codec.device(tensor)
        if inner is None:
            return None
        encode, decode = _triton()
        return DeviceCodec(encode, decode, inner, inner.axis)


@cache
def _triton() -> tuple[Any, Any]:
    """encode and decode; ``center`` is the last constant."""
    global tl, device, inner_encode, inner_decode, inner_options
    import triton
    import triton.language as tl

    from kvfactory.quant.device import numerics as device

    @triton.constexpr_function
    def inner_encode(codec):
        return codec.encode

    @triton.constexpr_function
    def inner_decode(codec):
        return codec.decode

    @triton.constexpr_function
    def inner_options(codec):
        return codec.options

    @triton.jit
    def encode(x, constants, options: tl.constexpr):
        code: tl.constexpr = inner_encode(options)
        return code(device.load(x) - constants[-1], constants, inner_options(options))

    @triton.jit
    def decode(planes, constants, options: tl.constexpr):
        value: tl.constexpr = inner_decode(options)
        remainder = value(planes, constants, inner_options(options))
        return remainder.to(tl.float32) + constants[-1]

    return encode, decode


def centered(codec: Codec, options: Options) -> Codec:
    """``codec``, wrapped when ``options`` ask for a center."""
    assert isinstance(options, CenterOptions)
    return Centered(codec) if options.center else codec


def maker(codec: Codec) -> Callable[[Options], Codec]:
    """The ``make`` of a scheme whose only option is ``center``."""

    def make(options: Options) -> Codec:
        return centered(codec, options)

    return make


def token_scheme(codec: Codec, summary: str, source: str, relative_rms_error: float) -> Scheme:
    """The scheme of ``codec`` for all tensors of tokens; its only option is ``center``."""
    return Scheme(
        name=codec.name,
        summary=summary,
        source=source,
        make=maker(codec),
        options=CenterOptions,
        roles=TOKEN_ROLES,
        relative_rms_error=relative_rms_error,
    )
