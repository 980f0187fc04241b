"""Ids that a pool is given: page ids and slots, from the host or the device.

Ids on the host are checked against the pool. Ids on a device are not, since that would wait for it;
there the operations guard memory themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfactory.errors import BooksError, Problem, SpecError
from kvfactory.pools.views import GroupViews

Ids = Tensor | NDArray[np.integer[Any]] | Sequence[int]
"""Page ids, slots or state slots: int32 or int64 on the host or the arena's device, or a list."""

INTEGERS = (torch.int32, torch.int64)


def as_ids(ids: Ids, what: str) -> Tensor:
    """``ids`` as a tensor of integers where they are; ``what`` names them.

    Raises:
        SpecError: not int32 or int64.
    """
    if isinstance(ids, Tensor):
        found = ids
    else:
        try:
            given = np.array(ids)
        except ValueError:
            raise SpecError(Problem(what, "rows of unequal lengths", "a list of ids")) from None
        if not given.size and given.ndim:
            given = given.astype(np.int64)
        if given.dtype.kind not in "iu":
            raise SpecError(Problem(what, str(given.dtype), "int64 or int32"))
        found = torch.from_numpy(given)
    if found.dtype not in INTEGERS:
        raise SpecError(Problem(what, str(found.dtype), "int64 or int32"))
    return found


def disjoint(dst: Tensor, src: Tensor) -> bool:
    """Whether no id is in both; False for ids on a device, which would have to be waited for."""
    if not (dst.is_cpu and src.is_cpu):
        return False
    return set(dst.flatten().tolist()).isdisjoint(src.flatten().tolist())


def flat_ids(views: GroupViews, ids: Ids, what: str, mask: Tensor | None = None) -> Tensor:
    """``ids`` as contiguous int64 [n] on the arena's device; ``what`` ends in slots or pages.

    Only entries that ``mask`` (bool, same shape) keeps are checked.

    Raises:
        SpecError: not integers.
        BooksError: an id on the host that is not in the pool.
    """
    if isinstance(ids, Tensor) and ids.is_cuda and _is_flat(ids, views.arena.device):
        return ids
    return sent(_in_pool(views, as_ids(ids, what), what, mask), views.arena.device).contiguous()


def _is_flat(ids: Tensor, device: torch.device) -> bool:
    """Whether ``ids`` are what operations take, as those of steps are."""
    flat = ids.dim() == 1 and ids.dtype == torch.int64 and ids.is_contiguous()
    return flat and ids.device == device


def sent(values: Tensor, device: torch.device) -> Tensor:
    """``values`` on ``device``, in the order of its current stream; nobody waits for that."""
    if values.device == device or device.type != "cuda" or not values.numel():
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def host_ids(views: GroupViews, ids: Ids, what: str) -> list[int]:
    """``ids`` as Python numbers, all of them checked; waits for the device if they are there.

    Raises:
        SpecError: not integers.
        BooksError: an id that is not in the pool.
    """
    found: list[int] = _in_pool(views, as_ids(ids, what).cpu(), what, None).tolist()
    return found


def _in_pool(views: GroupViews, ids: Tensor, what: str, mask: Tensor | None) -> Tensor:
    found = ids.to(torch.int64).reshape(-1)
    limit = views.num_pages if what.endswith("pages") else views.num_slots
    checked = found if mask is None or not found.is_cpu else _kept_on_host(found, mask)
    if checked is not None and checked.is_cpu and checked.numel():
        low, high = checked.aminmax()
        if low < 0 or high >= limit:
            wrong = int(low) if low < 0 else int(high)
            need = f"ids of group {views.group.name}, 0 to {limit - 1}"
            raise BooksError(Problem(what, str(wrong), need))
    return found


def _kept_on_host(ids: Tensor, mask: Tensor) -> Tensor | None:
    return ids[mask.reshape(-1)] if mask.is_cpu else None
