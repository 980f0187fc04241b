"""What a pool asks of its device code: a few bulk operations over all planes of one group.

The torch implementation is the specification; kernels bound to the same views do the same, bit for
bit. A pool validates before it calls, so an implementation may rely on every shape and type below
and on what it says about ids.

Legend: ``n`` entries, ``L`` layers of the group, ``*axes`` a logical tensor's own axes (``head
dim`` for token tensors), ``*plane`` a plane's own axes in whole, unsplit form. A slot is page x
page_slots + offset; in state groups a slot is a page. ``slots`` and ``pages`` are contiguous int64
[n] on the arena's device. Address arithmetic is int64. ``n`` may be 0.

Ids: a pool has checked those that it was given on the host. Ids that never left the device cannot
be checked without waiting for it, so an implementation for such a device guards memory itself: an
entry whose id is not in the pool is not written, and what it reads is unspecified.

Left-out entries (``Keep``) are not written either; an implementation may let them, and the guarded
ones, write to the sink (slot 0) instead. Of several kept entries that name one slot any may win,
plane by plane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvfactory.pools.views import GroupViews


@dataclass(frozen=True)
class Keep:
    """Which of n entries count: a bool ``mask`` [n], or the first of each row of ``width`` entries.

    With ``counts`` (int32 or int64 [n / width], on the arena's device) entry i is kept when
    i % width < counts[i // width]. Exactly one of ``mask`` and ``counts`` is given.
    """

    mask: Tensor | None = None
    counts: Tensor | None = None
    width: int = 1

    def as_mask(self) -> Tensor:
        """Bool [n]."""
        if self.mask is not None:
            return self.mask
        assert self.counts is not None
        columns = torch.arange(self.width, device=self.counts.device)
        return (columns < self.counts.unsqueeze(-1)).flatten()


class Ops(Protocol):
    """Bulk operations over one group's planes, bound to its ``GroupViews``."""

    def write(
        self, layer_index: int, slots: Tensor, rows: Mapping[str, Tensor], keep: Keep | None
    ) -> None:
        """Encode ``rows`` and store them at ``slots`` of one layer, all tensors of the group.

        ``rows``: tensor name -> float [n, *axes] with any strides, never changed. Codecs use the
        layer's constants. The bytes equal those of ``Codec.encode`` in torch.
        """
        ...

    def write_encoded(
        self, layer_index: int, slots: Tensor, planes: Mapping[str, Tensor], keep: Keep | None
    ) -> None:
        """Store encoded ``planes`` (plane key -> [n, *plane] in the plane's type) at ``slots``."""
        ...

    def read(
        self, layer_index: int, slots: Tensor, names: Sequence[str], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Decoded tensors ``names`` of one layer: name -> fresh [n, *axes] in ``dtype``."""
        ...

    def gather(self, layer_index: int | None, slots: Tensor) -> dict[str, Tensor]:
        """Raw planes in the order of ``slots``: key -> fresh [n, *plane], or [L, n, *plane]."""
        ...

    def move(self, dst_slots: Tensor, src_slots: Tensor, keep: Keep | None, disjoint: bool) -> None:
        """Copy all planes of all layers from ``src_slots`` to ``dst_slots``, entry by entry.

        As if every source were read before any destination is written. ``disjoint`` promises that
        no slot is both, so that the order does not matter.
        """
        ...

    def move_pages(self, dst_pages: Tensor, src_pages: Tensor, disjoint: bool) -> None:
        """``move`` of whole pages."""
        ...

    def zero(self, pages: Tensor, keep: Keep | None) -> None:
        """Every byte of all planes of all layers of ``pages`` becomes 0."""
        ...

    def pack(self, pages: Tensor, out: Tensor) -> None:
        """Copy whole pages to ``out``, contiguous uint8 [n, image_bytes], whatever the layout.

        A row holds the planes one after another in the plan's order, each dense in the order
        [L, slot, *plane] ([L, *plane] in state groups), at ``GroupViews.image_offsets``; the bytes
        between planes are left alone.
        """
        ...

    def unpack(self, pages: Tensor, data: Tensor) -> None:
        """The inverse of ``pack``; ``data`` is contiguous uint8 [n, image_bytes]."""
        ...


MakeOps = Callable[[GroupViews], Ops]
"""Binds an implementation to the views of one group."""
