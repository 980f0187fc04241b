"""``TritonOps``: a pool's operations as kernels, one launch each over all planes.

What a group can launch is known from its plan; ``build`` compiles it (``kernels``), so that nothing
compiles in an engine's loop. Rows of another type than the tensor's own, unaligned rows and 64-bit
counts are compiled when they first appear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvfactory.kernels.baked import CopySpec, TensorSpec
from kvfactory.kernels.compiled import (
    ALL,
    COUNTS,
    MASK,
    TOGETHER,
    GroupKernels,
    copy_programs,
    row_programs,
)
from kvfactory.kernels.errorwords import ErrorWords
from kvfactory.kernels.launch import Kernel
from kvfactory.pools import GroupViews, Keep, MakeOps, Ops, TorchOps
from kvfactory.quant.codec import DeviceCodec
from kvfactory.quant.numerics import torch_dtype

MOST_FORMS = 256
"""Forms of rows (types, strides, alignment) that a group remembers."""


def kernel_ops(errors: ErrorWords, debug: bool = False) -> MakeOps:
    """What binds a group to kernels, or to torch where a codec of it brings no device functions.

    ``debug`` compiles assertions that stop the device at a foreign id and name the table.
    """

    def make(views: GroupViews) -> Ops:
        codecs: dict[str, DeviceCodec] = {}
        for tensor in views.group.tensors:
            codec = views.codecs[tensor.name].device(tensor.logical)
            if codec is None:
                return TorchOps(views)
            codecs[tensor.name] = codec
        return TritonOps(views, codecs, errors.word(views.group.table), debug)

    return make


class TritonOps:
    """``Ops`` in Triton; the arena's device must be the current one.

    ``error`` int64 [1] receives an id that was not in the pool, when there is one; ``rows`` is what
    writes bake in of the tensors ``names``.
    """

    def __init__(
        self,
        views: GroupViews,
        codecs: Mapping[str, DeviceCodec],
        error: Tensor,
        debug: bool = False,
    ) -> None:
        self._views, self._arena, self.error = views, views.arena, error
        self._kernels = GroupKernels(views, codecs, debug)
        self.names = self._kernels.names
        self.rows = self._kernels.rows(self.names)
        self._forms: dict[Any, tuple[Kernel, tuple[int, ...]]] = {}

    def kernels(self) -> Iterator[Kernel]:
        """All that the plan can launch, for a warm-up."""
        return self._kernels.likely()

    # ---- rows --------------------------------------------------------------------------------

    def write(
        self, layer_index: int, slots: Tensor, rows: Mapping[str, Tensor], keep: Keep | None
    ) -> None:
        """Encode ``rows`` (tensor name -> float [n, *axes]) and store them at ``slots``."""
        n = slots.shape[0]
        xs = [rows[name] for name in self.names]
        mode, flags, width = _keep(keep, slots)
        key = (mode, flags.dtype, *[(x.dtype, x.stride(), x.data_ptr() % 16) for x in xs])
        form = self._forms.get(key)
        if form is None:
            form = self._new_form(xs, mode, flags.dtype)
            if form is None:
                dense = {name: x.contiguous() for name, x in zip(self.names, xs, strict=True)}
                self.write(layer_index, slots, dense, keep)
                return
            if len(self._forms) > MOST_FORMS:
                self._forms.clear()
            self._forms[key] = form
        kernel, steps = form
        kernel.launch(
            row_programs(self.rows, n),
            self._arena, self.error, slots, flags, n, width, layer_index, tuple(xs), steps,
        )  # fmt: skip

    def _new_form(
        self, xs: Sequence[Tensor], mode: int, flags: torch.dtype
    ) -> tuple[Kernel, tuple[int, ...]] | None:
        """The kernel for rows of these types and strides, and its steps; None if not steppable."""
        specs = self.rows.tensors
        if not all(map(steppable, xs, specs)):
            return None
        steps, aligned = entry_steps(xs, specs)
        return self._kernels.write(tuple(x.dtype for x in xs), mode, flags, aligned), steps

    def read(
        self, layer_index: int, slots: Tensor, names: Sequence[str], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Decoded tensors: name -> fresh [n, *axes] in ``dtype``."""
        chosen, n = tuple(names), len(slots)
        found = {}
        for name in chosen:
            shape = [extent for _, extent in self._views.group.tensor(name).logical.axes]
            found[name] = torch.empty(n, *shape, dtype=dtype, device=self._arena.device)
        kernel = self._kernels.read(chosen, dtype)
        kernel.launch(
            row_programs(self._kernels.rows(chosen), n),
            self._arena, self.error, slots, n, layer_index, tuple(found.values()),
        )  # fmt: skip
        return found

    # ---- bytes -------------------------------------------------------------------------------

    def write_encoded(
        self, layer_index: int, slots: Tensor, planes: Mapping[str, Tensor], keep: Keep | None
    ) -> None:
        """Store ``planes`` (plane key -> [n, *plane]) at ``slots``."""
        data = (planes[plane.key].contiguous() for plane in self._views.group.planes)
        raw = tuple(_raw(x if x.data_ptr() % 16 == 0 else x.clone()) for x in data)
        self._dense(self._kernels.one_layer, slots, raw, keep, layer_index, into=True)

    def gather(self, layer_index: int | None, slots: Tensor) -> dict[str, Tensor]:
        """Raw planes in the order of ``slots``: key -> fresh [n, *plane], or [L, n, *plane]."""
        every = layer_index is None
        lead = (len(self._views.group.layers), len(slots)) if every else (len(slots),)
        found = {}
        for plane in self._views.group.planes:
            shape = (*lead, *self._views.plane_shapes[plane.key])
            dtype = torch_dtype(plane.dtype)
            found[plane.key] = torch.empty(shape, dtype=dtype, device=self._arena.device)
        spec = self._kernels.every_layer if every else self._kernels.one_layer
        raw = tuple(map(_raw, found.values()))
        self._dense(spec, slots, raw, None, layer_index or 0, into=False)
        return found

    def pack(self, pages: Tensor, out: Tensor) -> None:
        """Copy whole pages to ``out`` uint8 [n, image_bytes]."""
        self._dense(self._kernels.image, pages, out, None, 0, into=False)

    def unpack(self, pages: Tensor, data: Tensor) -> None:
        """The inverse of ``pack``."""
        self._dense(self._kernels.image_into, pages, data, None, 0, into=True)

    def zero(self, pages: Tensor, keep: Keep | None) -> None:
        """Every byte of all planes of all layers of ``pages`` becomes 0."""
        n = len(pages)
        mode, flags = _mask(keep, pages)
        programs = copy_programs(self._kernels.pages, n)
        self._kernels.zero(mode).launch(programs, self._arena, self.error, pages, flags, n)

    def move(
        self, dst_slots: Tensor, src_slots: Tensor, keep: Keep | None, disjoint: bool = False
    ) -> None:
        """Copy all planes of all layers, as if every source were read before any write."""
        self._move(self._kernels.slots, dst_slots, src_slots, keep, disjoint)

    def move_pages(self, dst_pages: Tensor, src_pages: Tensor, disjoint: bool = False) -> None:
        """``move`` of whole pages."""
        self._move(self._kernels.pages, dst_pages, src_pages, None, disjoint)

    def _move(
        self, spec: CopySpec, dst: Tensor, src: Tensor, keep: Keep | None, disjoint: bool
    ) -> None:
        n = dst.shape[0]
        mode, flags = _mask(keep, dst)
        if disjoint:
            kernel, programs = self._kernels.move(spec, mode), copy_programs(spec, n)
        elif n <= TOGETHER[-1]:
            units = next(size for size in TOGETHER if n <= size)
            kernel = self._kernels.together(spec, mode, units)
            programs = self._kernels.together_programs(spec, units) if n else 0
        else:
            self._move_through_image(spec, dst, src, keep)
            return
        kernel.launch(programs, self._arena, self.error, dst, src, flags, n)

    def _move_through_image(
        self, spec: CopySpec, dst: Tensor, src: Tensor, keep: Keep | None
    ) -> None:
        """Two launches, through memory that the allocator keeps until the second has run."""
        shape = (len(dst), spec.image_bytes)
        image = torch.empty(shape, dtype=torch.uint8, device=self._arena.device)
        self._dense(spec, src, image, keep, 0, into=False)
        self._dense(spec, dst, image, keep, 0, into=True)

    def _dense(
        self,
        spec: CopySpec,
        ids: Tensor,
        data: Tensor | tuple[Tensor, ...],
        keep: Keep | None,
        layer_index: int,
        into: bool,
    ) -> None:
        n = len(ids)
        mode, flags, width = _keep(keep, ids)
        image = isinstance(data, Tensor)
        kernel = self._kernels.dense(spec, mode, flags.dtype, into, image)
        kernel.launch(
            copy_programs(spec, n),
            self._arena, self.error, ids, flags, n, width, layer_index, data,
        )  # fmt: skip


def _keep(keep: Keep | None, ids: Tensor) -> tuple[int, Tensor, int]:
    """The kernel's mode, its flags (any address where unused), and the width of counted rows."""
    if keep is None:
        return ALL, ids, 1
    if keep.mask is not None:
        return MASK, keep.mask.contiguous(), 1
    assert keep.counts is not None
    return COUNTS, keep.counts.contiguous(), keep.width


def _mask(keep: Keep | None, ids: Tensor) -> tuple[int, Tensor]:
    return (ALL, ids) if keep is None else (MASK, keep.as_mask().contiguous())


def _raw(x: Tensor) -> Tensor:
    """``x`` under a type that Triton knows."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _outermost_is_row(spec: TensorSpec) -> bool:
    """Whether the caller's outermost own axis may have any step: rows do not run along it."""
    return spec.row_extents != (1,) and spec.steps[0] > spec.along


def steppable(x: Tensor, spec: TensorSpec) -> bool:
    """Whether entries and outermost rows step evenly over dense memory."""
    loose = 2 if _outermost_is_row(spec) else 1
    step, dense = 1, True
    for axis in range(x.dim() - 1, loose - 1, -1):
        dense &= x.shape[axis] == 1 or x.stride(axis) == step
        step *= x.shape[axis]
    return dense


def entry_steps(xs: Sequence[Tensor], specs: Sequence[TensorSpec]) -> tuple[tuple[int, ...], bool]:
    """Per tensor the steps of entries and of its outermost rows, and whether 16 bytes divide all.

    In units of 16 bytes then, else in elements.
    """
    steps: list[int] = []
    units: list[int] = []
    whole = 0
    for x, spec in zip(xs, specs, strict=True):
        size = x.element_size()
        first = x.stride(1) if _outermost_is_row(spec) else spec.steps[0]
        steps += (x.stride(0), first)
        units += (16 // size, 16 // size)
        whole |= x.data_ptr() | x.stride(0) * size | first * size
    if whole % 16:
        return tuple(steps), False
    return tuple(step // unit for step, unit in zip(steps, units, strict=True)), True
