"""Pages on the host, bit for bit: offload and load in chunks, for every layout and format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfactory.errors import Problem
from kvfactory.pools.manifest import Manifest
from kvfactory.pools.ops import Ops
from kvfactory.pools.views import GroupViews

CHUNK_BYTES = 64 * 2**20
"""Default size of the staging buffer between the device and the host."""


@dataclass(frozen=True)
class PageImage:
    """Whole pages of one group in host memory, all planes and layers.

    ``data`` uint8 [pages, image_bytes] holds the planes in logical order, so that a pool of
    another layout can load them; the memory is pinned when the pool was on a GPU.
    """

    manifest: Manifest
    data: Tensor

    @property
    def num_pages(self) -> int:
        """Pages that the image holds."""
        return self.data.shape[0]

    @property
    def num_bytes(self) -> int:
        """Host bytes that it occupies."""
        return self.data.numel()


def offload(views: GroupViews, ops: Ops, pages: Tensor, chunk_bytes: int) -> Tensor:
    """The data of an image of ``pages`` int64 [n]; complete when this returns."""
    on_gpu = views.arena.is_cuda
    data = torch.zeros(len(pages), views.image_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    for part in _chunks(views, len(pages), chunk_bytes):
        if on_gpu:
            staged = torch.zeros_like(data[part], device=views.arena.device)
            ops.pack(pages[part], staged)
            data[part].copy_(staged, non_blocking=True)
        else:
            ops.pack(pages[part], data[part])
    if on_gpu:
        torch.cuda.current_stream(views.arena.device).synchronize()
    return data


def problems(image: PageImage, ours: Manifest, num_pages: int) -> tuple[Problem, ...]:
    """Why ``image`` cannot be loaded into ``num_pages`` pages of a pool with manifest ``ours``."""
    wrong = list(ours.mismatches(image.manifest, same_layout=False))
    if image.num_pages != num_pages:
        wrong.append(Problem("pages", f"{num_pages} pages", f"{image.num_pages}, as in the image"))
    return tuple(wrong)


def load(views: GroupViews, ops: Ops, data: Tensor, pages: Tensor, chunk_bytes: int) -> None:
    """An image's ``data`` into ``pages`` int64 [n], in the order of the current stream."""
    for part in _chunks(views, len(pages), chunk_bytes):
        staged = data[part].to(views.arena.device, non_blocking=True)
        ops.unpack(pages[part], staged)


def _chunks(views: GroupViews, num_pages: int, chunk_bytes: int) -> Iterator[slice]:
    step = max(1, chunk_bytes // views.image_bytes)
    for start in range(0, num_pages, step):
        yield slice(start, min(start + step, num_pages))
