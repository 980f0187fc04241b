# mypy: disable-error-code="name-defined,no-untyped-def,untyped-decorator"
"""``plain``: the tensor in its own type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from kvfactory.errors import Problem
from kvfactory.quant.center import CenterOptions, maker
from kvfactory.quant.codec import Constant, DeviceCodec, Logical, Plane, Scheme
from kvfactory.quant.numerics import check_shape, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Plain:
    """A cast to the tensor's type and nothing else: NaN and infinities are stored as they are."""

    name: str = "plain"

    def problems(self, tensor: Logical, path: str) -> tuple[Problem, ...]:
        """None: any tensor can be stored as it is."""
        return ()

    def planes(self, tensor: Logical) -> tuple[Plane, ...]:
        """``data`` with the tensor's own axes and type."""
        return (Plane("data", tensor.dtype, tensor.axes),)

    def constants(self, tensor: Logical) -> tuple[Constant, ...]:
        """None."""
        return ()

    def encode(
        self, tensor: Logical, x: Tensor, constants: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """``x`` in the tensor's type; ``x`` itself when it has it already."""
        check_shape(tensor, x)
        return {"data": x.to(torch_dtype(tensor.dtype))}

    def decode(
        self,
        tensor: Logical,
        planes: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        dtype: str,
    ) -> Tensor:
        """The stored values in ``dtype``; the plane itself when it has it already."""
        return planes["data"].to(torch_dtype(dtype))

    def device(self, tensor: Logical) -> DeviceCodec | None:
        """A cast; rows run along the last axis, though any would do. None for integers."""
        encode, decode, dtypes = _triton()
        if tensor.dtype not in dtypes:
            return None
        return DeviceCodec(encode, decode, (dtypes[tensor.dtype],), tensor.axes[-1][0])


@cache
def _triton() -> tuple[Any, Any, Mapping[str, Any]]:
    """encode and decode with the stored type as their option, and Triton's types by name."""
    global tl, device
    import triton
    import triton.language as tl

    from kvfactory.quant.device import numerics as device

    @triton.jit
    def encode(x, constants, options: tl.constexpr):
        return (device.convert(x, options[0]),)

    @triton.jit
    def decode(planes, constants, options: tl.constexpr):
        return planes[0]

    return encode, decode, device.DTYPES


PLUGINS = (
    Scheme(
        name="plain",
        summary="the tensor in its own type, unscaled",
        source="IEEE 754 and bfloat16",
        make=maker(Plain()),
        options=CenterOptions,
        relative_rms_error=0.00166,
    ),
)
