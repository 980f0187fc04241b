"""Pages on the host, bit for bit: offload and load in chunks, for every layout and format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfactory.errors import Problem, SpecError
from kvfactory.pools.ops import Ops
from kvfactory.pools.transfer import Manifest, manifest
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


def offload(views: GroupViews, ops: Ops, pages: Tensor, chunk_bytes: int) -> PageImage:
    """The image of ``pages`` int64 [n]; complete when this returns."""
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
    return PageImage(manifest(views), data)


def load(views: GroupViews, ops: Ops, image: PageImage, pages: Tensor, chunk_bytes: int) -> None:
    """``image`` into ``pages`` int64 [n], in the order of the current stream.

    Raises:
        SpecError: another number of pages, or an image of other formats, dims or constants.
    """
    wrong = list(manifest(views).mismatches(image.manifest, same_layout=False))
    if image.num_pages != len(pages):
        wrong.append(Problem("pages", f"{len(pages)} pages", f"{image.num_pages}, as in the image"))
    if wrong:
        raise SpecError(*wrong)
    for part in _chunks(views, len(pages), chunk_bytes):
        staged = image.data[part].to(views.arena.device, non_blocking=True)
        ops.unpack(pages[part], staged)


def _chunks(views: GroupViews, num_pages: int, chunk_bytes: int) -> Iterator[slice]:
    step = max(1, chunk_bytes // views.image_bytes)
    for start in range(0, num_pages, step):
        yield slice(start, min(start + step, num_pages))
