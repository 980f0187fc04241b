"""Two four-bit codes in a byte: the even element is the low nibble."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfactory.quant.codec import Logical, Plane
from kvfactory.quant.numerics import block_plane

if TYPE_CHECKING:
    from torch import Tensor


def packed_plane(tensor: Logical) -> Plane:
    """The ``data`` plane of a four-bit format: uint8, half of ``dim``."""
    return block_plane(tensor, "data", "uint8", 2)


def pack(codes: Tensor) -> Tensor:
    """``codes`` [..., D] uint8 in 0..15 as bytes [..., D / 2]."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(data: Tensor) -> Tensor:
    """Bytes [..., D / 2] as codes [..., D] uint8."""
    import torch

    return torch.stack((data & 15, data >> 4), -1).flatten(-2)
