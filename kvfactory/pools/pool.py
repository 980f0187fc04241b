"""The pool: every operation over one group's planes, for all layouts and number formats.

A slot is page x page_slots + offset; where an entry covers several tokens the pool knows entries
only. In state groups a page is a state slot and slots are pages. Page 0, the sink, is an ordinary
page here. ``layer_index`` counts the layers of the group.

Raised by every operation: SpecError for names, shapes, types and devices, BooksError for ids on the
host that are not in the pool, BuildError for memory without storage. Nothing is written then. When
entries of one call name a slot twice, any of them may win.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfactory.calibration import Key
from kvfactory.errors import Problem, SpecError
from kvfactory.planning.cacheplan import GroupPlan
from kvfactory.pools import checks, image, slices, transfer
from kvfactory.pools.constants import assign, fill_defaults, keys
from kvfactory.pools.ids import Ids, as_ids, disjoint, flat_ids, host_ids, sent
from kvfactory.pools.manifest import Manifest, manifest_of
from kvfactory.pools.ops import Keep, MakeOps, Ops
from kvfactory.pools.torch_ops import TorchOps
from kvfactory.pools.views import group_views
from kvfactory.quant.numerics import torch_dtype


@dataclass(frozen=True)
class PlaneBytes:
    """Bytes of a plane without padding: one entry of a layer, a page of all layers, all pages."""

    entry_bytes: int
    page_bytes: int
    pool_bytes: int


@dataclass(frozen=True)
class Write:
    """New rows of one layer, checked: tensor name -> float [n, *axes] for the ``target`` slots."""

    ops: Ops
    layer_index: int
    target: checks.Entries
    rows: Mapping[str, Tensor]

    def run(self) -> None:
        """Encode and store them."""
        self.ops.write(self.layer_index, self.target.slots, self.rows, self.target.keep)


class Pool:
    """One group of layers on the arena; ``make_ops`` binds the code that moves its bytes.

    Raises:
        BuildError: ``arena`` is not a flat uint8 tensor that covers the group.
    """

    def __init__(self, group: GroupPlan, arena: Tensor, make_ops: MakeOps = TorchOps) -> None:
        self.group = group
        self.bound = group_views(group, arena)
        self.ops = make_ops(self.bound)
        fill_defaults(self.bound)
        self.constants_version = 0

    def __repr__(self) -> str:
        group = self.group
        planes = ", ".join(f"{plane.key} {plane.dtype}" for plane in group.planes)
        return f"Pool({group.name}, {len(group.layers)} layers, {self.num_pages} pages: {planes})"

    @property
    def num_pages(self) -> int:
        """Pages (state slots), the sink included; page ids are below this."""
        return self.bound.num_pages

    @property
    def num_slots(self) -> int:
        """Entries, the sink's included; slots are below this."""
        return self.bound.num_slots

    @property
    def num_bytes(self) -> int:
        """Bytes of the group's region, padding included, as planned."""
        return self.group.num_bytes

    def plane_bytes(self) -> dict[str, PlaneBytes]:
        """Plane key -> its bytes."""
        found = {}
        for key, view in self.bound.planes.items():
            pool = view.numel() * view.element_size()
            page = pool // self.num_pages
            entry = page // (len(self.group.layers) * self.group.page_slots)
            found[key] = PlaneBytes(entry, page, pool)
        return found

    def views(self, layer_index: int) -> dict[str, Tensor]:
        """Plane key -> view [pages, slots, *axes] of one layer in the plane's own type.

        State groups have [pages, *axes]; a split axis is two. Writing to a view writes the pool.
        """
        index = checks.layer(self.bound, layer_index)
        return {key: view[index] for key, view in self.bound.planes.items()}

    # ---- entries ---------------------------------------------------------------------------

    def write(
        self,
        layer_index: int,
        slots: Tensor,
        mask: Tensor | None = None,
        counts: Tensor | None = None,
        **rows: Tensor,
    ) -> None:
        """Encode and store ``rows`` (``k=``, ``v=`` ...: float [*slots.shape, *axes]) at ``slots``.

        ``slots`` int64 or int32, [n] or [rows, width]. ``mask`` bool of that shape: only entries
        that are True are written. ``counts`` int [rows], also on the device: the first counts[r]
        entries of row r are. All tensors of the group are written together; inputs may have any
        strides and are never changed.
        """
        self.ready(layer_index, slots, mask, counts, **rows).run()

    def ready(
        self,
        layer_index: int,
        slots: Tensor,
        mask: Tensor | None = None,
        counts: Tensor | None = None,
        **rows: Tensor,
    ) -> Write:
        """A ``write`` that was checked and not made, for several pools to write all or none."""
        checks.storage(self.bound)
        index = checks.layer(self.bound, layer_index)
        target = checks.entries(self.bound, slots, mask, counts)
        return Write(self.ops, index, target, checks.rows(self.bound, rows, target.shape))

    def write_encoded(
        self,
        layer_index: int,
        slots: Tensor,
        planes: Mapping[str, Tensor],
        mask: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> None:
        """Store ``planes`` (plane key -> [*slots.shape, *plane axes] in its type) as they are.

        ``mask`` and ``counts`` as in ``write``.
        """
        checks.storage(self.bound)
        index = checks.layer(self.bound, layer_index)
        target = checks.entries(self.bound, slots, mask, counts)
        flat = checks.encoded(self.bound, planes, target.shape)
        self.ops.write_encoded(index, target.slots, flat, target.keep)

    def read(
        self,
        layer_index: int,
        slots: Tensor,
        dtype: torch.dtype | None = None,
        names: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Decoded tensors: name -> fresh [*slots.shape, *axes] in ``dtype``.

        ``names`` picks tensors, such as ``("latent",)``; the default is all. ``dtype`` defaults to
        the type of the group's first tensor.
        """
        checks.storage(self.bound)
        index = checks.layer(self.bound, layer_index)
        wanted = checks.names(self.bound, names)
        own = torch_dtype(self.group.tensors[0].logical.dtype)
        checks.tensors(slots=slots)
        flat = flat_ids(self.bound, slots, "slots")
        found = self.ops.read(index, flat, wanted, checks.read_dtype(dtype or own))
        return {name: x.view(*slots.shape, *x.shape[1:]) for name, x in found.items()}

    def gather(self, slots: Tensor, layer_index: int | None = None) -> dict[str, Tensor]:
        """Raw planes in the order of ``slots`` [n]: key -> fresh [n, *plane axes] of one layer.

        Without ``layer_index`` [layers, n, *plane axes]. ``write_encoded`` takes them back.
        """
        checks.storage(self.bound)
        index = None if layer_index is None else checks.layer(self.bound, layer_index)
        return self.ops.gather(index, flat_ids(self.bound, slots, "slots"))

    def move(self, dst_slots: Ids, src_slots: Ids, mask: Tensor | None = None) -> None:
        """Copy entries of all planes and layers, ``src_slots`` [n] to ``dst_slots`` [n].

        The two may overlap: as if all sources were read first. ``mask`` bool [n] leaves entries
        out. In state groups this copies whole states.
        """
        checks.storage(self.bound)
        dst = as_ids(dst_slots, "dst_slots")
        src = as_ids(src_slots, "src_slots")
        wrong = checks.move_problems(dst, src, mask)
        if wrong:
            raise SpecError(*wrong)
        apart = disjoint(dst, src)
        dst = flat_ids(self.bound, dst, "dst_slots", mask)
        src = flat_ids(self.bound, src, "src_slots", mask)
        if len(dst):
            self.ops.move(dst, src, self._keep(mask), apart)

    def set_constants(self, values: Mapping[Key, Any]) -> None:
        """Set (model layer id, tensor, name) -> number, array or tensor of the constant's shape.

        Raises:
            SpecError: unknown keys, wrong shapes, values not finite, scales not above 0.
        """
        checks.storage(self.bound)
        assign(self.bound, values)
        self.constants_version += 1

    def constant_keys(self) -> frozenset[Key]:
        """The keys that ``set_constants`` takes."""
        return keys(self.bound)

    def constants(self, layer_index: int) -> dict[str, dict[str, Tensor]]:
        """Tensor -> constant -> float32 [*shape] of one layer, views of the arena."""
        index = checks.layer(self.bound, layer_index)
        names = checks.names(self.bound, None)
        return {name: self.bound.layer_constants(name, index) for name in names}

    # ---- pages -----------------------------------------------------------------------------

    def move_pages(self, dst_pages: Ids, src_pages: Ids) -> None:
        """``move`` of whole pages."""
        checks.storage(self.bound)
        dst, src = as_ids(dst_pages, "dst_pages"), as_ids(src_pages, "src_pages")
        apart = disjoint(dst, src)
        dst = flat_ids(self.bound, dst, "dst_pages")
        src = flat_ids(self.bound, src, "src_pages")
        if len(dst) != len(src):
            raise SpecError(Problem("src_pages", f"{len(src)} pages", f"{len(dst)}"))
        if len(dst):
            self.ops.move_pages(dst, src, apart)

    def copy_pages(self, pairs: Tensor | NDArray[np.integer[Any]]) -> None:
        """``move_pages`` for ``pairs`` int [n, 2] of (source, destination)."""
        self.move_pages(pairs[:, 1], pairs[:, 0])

    def _keep(self, mask: Tensor | None) -> Keep | None:
        return None if mask is None else Keep(mask=sent(mask, self.bound.arena.device))

    def zero(self, pages: Ids, mask: Tensor | None = None) -> None:
        """All planes and layers of ``pages`` [n] become 0; ``mask`` bool [n] leaves pages out."""
        checks.storage(self.bound)
        wrong = checks.mask_problems((len(pages),), mask)
        if wrong:
            raise SpecError(*wrong)
        flat = flat_ids(self.bound, pages, "pages", mask)
        if len(flat):
            self.ops.zero(flat, self._keep(mask))

    def offload(self, pages: Ids, chunk_bytes: int = image.CHUNK_BYTES) -> image.PageImage:
        """Copy ``pages`` to the host, through at most ``chunk_bytes`` (or one page) of staging."""
        checks.storage(self.bound)
        flat = flat_ids(self.bound, pages, "pages")
        data = image.offload(self.bound, self.ops, flat, chunk_bytes)
        return image.PageImage(self.manifest(), data)

    def load(
        self, saved: image.PageImage, pages: Ids, chunk_bytes: int = image.CHUNK_BYTES
    ) -> None:
        """Copy ``saved`` into ``pages``, bit for bit; layouts and page ids may differ.

        Raises:
            SpecError: an image with another number of pages, formats, dims, layers or constants;
                or, of ids on the host, a page twice.
        """
        checks.storage(self.bound)
        flat = flat_ids(self.bound, pages, "pages")
        wrong = image.problems(saved, self.manifest(), len(flat))
        if flat.is_cpu and len(set(flat.tolist())) < len(flat):
            wrong = (*wrong, Problem("pages", "a page twice", "each page once"))
        if wrong:
            raise SpecError(*wrong)
        image.load(self.bound, self.ops, saved.data, flat, chunk_bytes)

    def transfer_regions(self, pages: Ids) -> tuple[transfer.Region, ...]:
        """The fewest contiguous runs per page that hold ``pages``, page by page.

        Copied in order to the runs of as many pages of a pool with an equal manifest they
        reproduce every byte; ``transfer.copies`` pairs them and joins neighbours.
        """
        found = host_ids(self.bound, pages, "pages")
        return tuple(run.of_page(page) for page in found for run in self._runs)

    def slicings(self) -> tuple[slices.Slicing, ...]:
        """How tensor-parallel ranks share every plane: axis, stacked blocks, pieces."""
        return slices.slicings(self.group)

    def slice_regions(self, pages: Ids, part: int, parts: int) -> tuple[transfer.Region, ...]:
        """The runs of ``pages`` that hold share ``part`` of ``parts`` of the heads or channels.

        They match, in order and size, ``slice_regions(pages, 0, 1)`` of a pool of one share.

        Raises:
            SpecError: a block that ``parts`` does not divide, or an axis that the layout splits.
        """
        found = host_ids(self.bound, pages, "pages")
        runs = slices.slice_regions(self.group, part, parts)
        return tuple(run.of_page(page) for page in found for run in runs)

    @cached_property
    def _runs(self) -> tuple[transfer.Region, ...]:
        return transfer.regions(self.group)

    def manifest(self) -> Manifest:
        """What the other side of a transfer must match."""
        checks.storage(self.bound)
        return manifest_of(self.bound, self._runs)
