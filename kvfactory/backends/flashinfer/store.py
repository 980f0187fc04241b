"""What a group's kernels read: views of the pool, or a decoded copy, with scales on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvfactory.backends.flashinfer.sizes import Served
from kvfactory.pools import Pool
from kvfactory.quant.numerics import torch_dtype


class Layer(NamedTuple):
    """One layer: ``k`` and ``v`` [pages, slots, heads, dim] (latent attention: latent and rope
    [pages, slots, dim]), x ~ stored * scale + center, centers float32 [heads, dim] or None.
    """

    k: Tensor
    v: Tensor
    k_scale: float
    v_scale: float
    k_center: Tensor | None
    v_center: Tensor | None


class Store(Protocol):
    """Where K and V of a group come from."""

    @property
    def copies(self) -> bool:
        """Whether ``layer`` decodes, which takes the slots of a step."""
        ...

    def refresh(self) -> int:
        """Read constants that were set since the last call; a number that grows when there were."""
        ...

    def layer(self, layer_index: int, slots: Tensor | None) -> Layer:
        """K and V of one layer; ``slots`` int64 [n] are those that a step reads."""
        ...


class PoolStore:
    """The pool itself, read in place."""

    copies = False

    def __init__(self, served: Served, pool: Pool) -> None:
        self._pool = pool
        names = [tensor.name for tensor in served.group.tensors]
        self._k, self._v, self._latent = names[0], names[-1], served.shape.latent
        self._version = -1
        self._layers: list[Layer] = []

    def refresh(self) -> int:
        """Read constants that were set since the last call; this waits for the device then."""
        if self._version != self._pool.constants_version:
            self._version = self._pool.constants_version
            indices = range(len(self._pool.group.layers))
            self._layers = [self._read(index) for index in indices]
        return self._version

    def layer(self, layer_index: int, slots: Tensor | None) -> Layer:
        """Views of one layer."""
        return self._layers[layer_index]

    def _read(self, index: int) -> Layer:
        views, constants = self._pool.views(index), self._pool.constants(index)
        k, v = views[self._k], views[self._v]
        if self._latent:
            k, v = k.squeeze(2), v.squeeze(2)
        k_fixed, v_fixed = constants[self._k], constants[self._v]
        return Layer(
            k,
            v,
            float(k_fixed["scale"]) if "scale" in k_fixed else 1.0,
            float(v_fixed["scale"]) if "scale" in v_fixed else 1.0,
            k_fixed.get("center"),
            v_fixed.get("center"),
        )


@dataclass(frozen=True)
class Copy:
    """A layer of a pool, decoded: [pages, slots, heads, dim] by tensor name, dense."""

    tensors: dict[str, Tensor]

    @classmethod
    def over(cls, served: Served, space: Tensor) -> Copy:
        """Views of the planned bytes ``space``, uint8."""
        dtype = torch_dtype(served.shape.q_dtype)
        pages = served.group.planes[0].place.shape[1]
        found, at = {}, 0
        for tensor in served.group.tensors:
            axes = tuple(extent for _, extent in tensor.logical.axes)
            shape = (pages, served.shape.page_tokens, *axes)
            size = dtype.itemsize * torch.Size(shape).numel()
            found[tensor.name] = space[at : at + size].view(dtype).view(shape)
            at += size
        return cls(found)


class CopyStore:
    """A decoded copy that all layers of all such groups share: good until the next ``layer``."""

    copies = True

    def __init__(self, served: Served, pool: Pool, space: Tensor) -> None:
        self._pool, self._copy = pool, Copy.over(served, space)
        self._dtype = torch_dtype(served.shape.q_dtype)
        self._latent = served.shape.latent

    def refresh(self) -> int:
        """Nothing: decoding reads the constants on the device."""
        return 0

    def layer(self, layer_index: int, slots: Tensor | None) -> Layer:
        """Decode ``slots`` of one layer into the copy."""
        assert slots is not None
        for name, values in self._pool.read(layer_index, slots, self._dtype).items():
            self._copy.tensors[name].flatten(0, 1)[slots] = values
        first, *rest = self._copy.tensors.values()
        k, v = first, (rest[0] if rest else first)
        if self._latent:
            k, v = k.squeeze(2), v.squeeze(2)
        return Layer(k, v, 1.0, 1.0, None, None)
