"""Arithmetic that every number format shares: float32, correctly rounded, clamped before a cast.

Torch is imported inside the functions that need it, so that formats can be planned without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfactory.errors import Problem, SpecError
from kvfactory.quant.codec import Logical, Plane

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Axes = tuple[tuple[str, int], ...]

INPUT_MAX = 3.3895e38
"""Inputs are clamped to +- this (just below bfloat16's largest value), so infinities are finite."""

E4M3, E4M3_MAX = "float8_e4m3fn", 448.0
E5M2, E5M2_MAX = "float8_e5m2", 57344.0
INT8_MAX = 127.0
FP8_MAX = {E4M3: E4M3_MAX, E5M2: E5M2_MAX}


def torch_dtype(name: str) -> torch.dtype:
    """Torch's type called ``name``, such as ``bfloat16``."""
    import torch

    dtype: torch.dtype = vars(torch)[name]
    return dtype


def without(axes: Axes, axis: str) -> Axes:
    """``axes`` lacking ``axis``."""
    return tuple((name, extent) for name, extent in axes if name != axis)


def block_plane(tensor: Logical, part: str, dtype: str, block: int) -> Plane:
    """``part`` with one element for every ``block`` elements along ``dim``."""
    axes = tuple((name, n // block if name == "dim" else n) for name, n in tensor.axes)
    return Plane(part, dtype, axes)


def block_problems(
    tensor: Logical, path: str, block: int, reason: str, instead: str
) -> tuple[Problem, ...]:
    """A problem when ``block`` does not divide ``dim``; the scheme ``instead`` would fit."""
    dim = tensor.extent("dim")
    if dim % block == 0:
        return ()
    return (Problem(path, f"dim {dim}", f"a multiple of {block} ({reason})", f"{path}={instead}"),)


def scaled_block_problems(tensor: Logical, path: str, block: int, name: str) -> tuple[Problem, ...]:
    """A problem when the blocks that the scheme ``name`` scales do not fill a row."""
    return block_problems(tensor, path, block, f"{name} scales blocks of {block}", "fp8_e4m3")


def check_shape(tensor: Logical, x: Tensor) -> None:
    """``x`` is [rows..., *tensor axes].

    Raises:
        SpecError: its trailing dims are not the tensor's axes.
    """
    shape = [extent for _, extent in tensor.axes]
    if list(x.shape[-len(shape) :]) != shape:
        need = ", ".join(f"{axis}={extent}" for axis, extent in tensor.axes)
        raise SpecError(Problem(tensor.name, f"shape {list(x.shape)}", f"[rows..., {need}]"))


def load(tensor: Logical, x: Tensor) -> Tensor:
    """``x`` [rows..., *tensor axes] in float32, clamped to +-``INPUT_MAX``; NaN stays.

    Raises:
        SpecError: the trailing dims of ``x`` are not the tensor's axes.
    """
    check_shape(tensor, x)
    return x.float().clamp(-INPUT_MAX, INPUT_MAX)


def blocks(x: Tensor, block: int) -> Tensor:
    """``x`` [..., D] seen as [..., D / block, block]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def canonical(x: Tensor) -> Tensor:
    """``x`` with every NaN replaced by the positive quiet one, so that stored bytes are unique."""
    return x.masked_fill(x.isnan(), float("nan"))


def amax(x: Tensor, dim: int = -1) -> Tensor:
    """Largest magnitude along ``dim``, which disappears; NaN when any element is."""
    return canonical(x.abs().amax(dim))


def divide(x: Tensor, by: float) -> Tensor:
    """``x / by``, correctly rounded, a NaN as the positive quiet one.

    Torch on CUDA multiplies by the reciprocal when the divisor is a Python number, which is one
    unit off for some values; a divisor on the device is divided by.
    """
    return canonical(x / x.new_full((), by))


def nonzero(scale: Tensor) -> Tensor:
    """``scale`` with 1 for 0, so that all-zero rows divide."""
    return scale.masked_fill(scale == 0, 1.0)


def to_fp8(x: Tensor, dtype: str) -> Tensor:
    """``x`` in the small float ``dtype``: saturated, ties to even, NaN as 0x7F."""
    limit = FP8_MAX[dtype]
    return canonical(x).clamp(-limit, limit).to(torch_dtype(dtype))


def widen(codes: Tensor) -> Tensor:
    """Small floats as float32; on a CPU by a table of all codes, six times torch's own speed."""
    import torch

    if not codes.is_cpu:
        return codes.float()
    table = torch.arange(256, dtype=torch.uint8).view(codes.dtype).float()
    rows = codes.view(torch.uint8).reshape(-1).int()
    return table.index_select(0, rows).view(codes.shape)


def to_int8(x: Tensor) -> Tensor:
    """``x`` as int8 in +-127, ties to even, NaN as 0."""
    import torch

    return (
        x.nan_to_num(nan=0.0, posinf=127.0, neginf=-127.0).round().clamp(-127, 127).to(torch.int8)
    )
