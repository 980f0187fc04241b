"""One tensor of a state pool at some slots: through its number format, whatever the layout."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfactory.pools import Pool
from kvfactory.pools.ids import sent
from kvfactory.quant.numerics import torch_dtype


def fetch(pool: Pool, layer_index: int, slots: Tensor, name: str) -> Tensor:
    """Tensor ``name`` of one layer at ``slots`` int64 [n]: fresh [n, *axes] in its own type."""
    tensor = pool.group.tensor(name)
    own = torch_dtype(tensor.logical.dtype)
    if not own.is_floating_point:
        (plane,) = tensor.planes
        return pool.bound.planes[plane.key][layer_index][slots]
    return pool.read(layer_index, slots, own, (name,))[name]


def store(pool: Pool, layer_index: int, slots: Tensor, name: str, values: Tensor) -> None:
    """Write ``values`` [n, *axes] to tensor ``name`` alone; of equal slots any may win."""
    tensor, bound = pool.group.tensor(name), pool.bound
    constants = bound.layer_constants(name, layer_index)
    parts = bound.codecs[name].encode(tensor.logical, values, constants)
    for plane in tensor.planes:
        view = bound.planes[plane.key][layer_index]
        view[slots] = parts[plane.part].reshape(len(slots), *view.shape[1:])


def device_ids(pool: Pool, ids: object) -> Tensor:
    """Ids as int64 on the pool's device, which nobody waits for."""
    return sent(torch.as_tensor(ids, dtype=torch.int64), pool.bound.arena.device)
