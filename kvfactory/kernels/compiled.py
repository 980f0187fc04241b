"""Every kernel that one group can launch, made once each from its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import torch

from kvfactory.kernels import copies, rows
from kvfactory.kernels.baked import CopySpec, RowsSpec
from kvfactory.kernels.launch import Argument, Kernel, pointer
from kvfactory.kernels.specs import WARPS, gather_spec, image_spec, move_spec, rows_spec
from kvfactory.kinds import ceil_div
from kvfactory.pools import GroupViews
from kvfactory.quant.codec import DeviceCodec
from kvfactory.quant.numerics import torch_dtype

TOGETHER = (8, 64, 256)
"""Numbers of units up to which a program reads all of them before it writes any."""

TOGETHER_BYTES, TOGETHER_WARPS = 2**15, 8
"""What such a program copies, and its warps."""

COPY_WARPS = 1
"""Warps of other copies."""

ALL, MASK, COUNTS = 0, 1, 2
"""Which entries are kept; the flags are unused, bool [n], or integers per row of entries."""

_ARENA = {"arena": Argument("*u8", aligned=True), "errors": Argument("*i64")}
_IDS, _INT = Argument("*i64"), Argument("i32")


class GroupKernels:
    """The kernels of ``views`` with ``codecs`` (tensor name -> device functions)."""

    def __init__(
        self, views: GroupViews, codecs: Mapping[str, DeviceCodec], debug: bool = False
    ) -> None:
        self._views, self._codecs, self._debug = views, codecs, debug
        self.names = tuple(tensor.name for tensor in views.group.tensors)
        self.slots = move_spec(views, by_slot=True)
        self.pages = move_spec(views, by_slot=False)
        self.image = image_spec(views, into=False)
        self.image_into = image_spec(views, into=True)
        self.one_layer = gather_spec(views, every_layer=False)
        self.every_layer = gather_spec(views, every_layer=True)
        # Cached per object: a class-wide cache would keep dead groups alive.
        self.rows = cache(self._rows)
        self.write = cache(self._write)
        self.read = cache(self._read)
        self.dense = cache(self._dense)
        self.move = cache(self._move)
        self.together = cache(self._together)
        self.together_programs = cache(together_programs)
        self.zero = cache(self._zero)

    def likely(self) -> Iterator[Kernel]:
        """What an engine's loop launches: rows in the tensors' own types, aligned.

        Reads of all tensors in the first one's type and, for references, in float32; of each alone
        in its own.
        """
        own = tuple(torch_dtype(t.logical.dtype) for t in self._views.group.tensors)
        for mode, flags in ((ALL, torch.int64), (MASK, torch.bool), (COUNTS, torch.int32)):
            yield self.write(own, mode, flags, True)
            yield self.dense(self.one_layer, mode, flags, True, False)
        for dtype in {own[0]: None, torch.float32: None}:
            yield self.read(self.names, dtype)
        for name, dtype in zip(self.names, own, strict=True) if len(self.names) > 1 else ():
            yield self.read((name,), dtype)
        for spec, image in ((self.one_layer, False), (self.every_layer, False), (self.image, True)):
            yield self.dense(spec, ALL, torch.int64, False, image)
        yield self.dense(self.image_into, ALL, torch.int64, True, True)
        for units in TOGETHER:
            yield self.together(self.pages, ALL, units)
            yield self.together(self.slots, ALL, units)
            yield self.together(self.slots, MASK, units)
        for spec in (self.pages, self.slots):
            yield self.move(spec, ALL)
            yield self.move(spec, MASK)
            yield self.dense(spec, ALL, torch.int64, False, True)
            yield self.dense(spec, ALL, torch.int64, True, True)
        yield self.zero(ALL)
        yield self.zero(MASK)

    def _rows(self, names: tuple[str, ...]) -> RowsSpec:
        return rows_spec(self._views, [self._codecs[name] for name in names], names)

    def _write(
        self, dtypes: tuple[torch.dtype, ...], mode: int, flags: torch.dtype, aligned: bool
    ) -> Kernel:
        """Write of all tensors, rows of ``dtypes``."""
        arguments = _ARENA | {
            "slots": _IDS,
            "keep": Argument(pointer(flags)),
            "n": _INT,
            "width": _INT,
            "layer": _INT,
            "xs": Argument(tuple(map(pointer, dtypes)), aligned),
            "steps": Argument(("i32",) * (2 * len(dtypes))),
        }
        baked = {"SPEC": self.rows(self.names), "KEEP": mode, "ALIGNED": aligned}
        return self._kernel(rows.write, arguments, baked)

    def _read(self, names: tuple[str, ...], dtype: torch.dtype) -> Kernel:
        """Read of the tensors ``names`` into fresh rows of ``dtype``."""
        arguments = _ARENA | {
            "slots": _IDS,
            "n": _INT,
            "layer": _INT,
            "outs": Argument((pointer(dtype),) * len(names), aligned=True),
        }
        return self._kernel(rows.read, arguments, {"SPEC": self.rows(names)})

    def _dense(
        self, spec: CopySpec, mode: int, flags: torch.dtype, into: bool, image: bool
    ) -> Kernel:
        """Between the pool and dense memory: one image, or a tensor per plane."""
        arguments = _ARENA | {
            "ids": _IDS,
            "keep": Argument(pointer(flags)),
            "n": _INT,
            "width": _INT,
            "layer": _INT,
            "dense": Argument("*u8" if image else ("*u8",) * len(spec.parts), aligned=True),
        }
        baked = {"SPEC": spec, "KEEP": mode, "INTO": into, "IMAGE": image}
        return self._kernel(copies.copy_dense, arguments, baked, COPY_WARPS)

    def _move(self, spec: CopySpec, mode: int) -> Kernel:
        """Move of any number of units of which none is both source and destination."""
        baked = {"SPEC": spec, "KEEP": mode}
        return self._kernel(copies.move, _move_arguments(mode), baked, COPY_WARPS)

    def _together(self, spec: CopySpec, mode: int, units: int) -> Kernel:
        """Move of at most ``units`` units, all read before any is written."""
        baked = {"SPEC": spec, "KEEP": mode, "U": units, "BYTES": TOGETHER_BYTES // units}
        return self._kernel(copies.move_together, _move_arguments(mode), baked, TOGETHER_WARPS)

    def _zero(self, mode: int) -> Kernel:
        """Zero of pages."""
        arguments = {**_ARENA, "ids": _IDS, "keep": _flags(mode), "n": _INT}
        baked = {"SPEC": self.pages, "KEEP": mode}
        return self._kernel(copies.zero, arguments, baked, COPY_WARPS)

    def _kernel(
        self,
        function: object,
        arguments: Mapping[str, Argument],
        baked: Mapping[str, object],
        warps: int = WARPS,
    ) -> Kernel:
        return Kernel(function, arguments, baked, warps, self._debug)


def _move_arguments(mode: int) -> dict[str, Argument]:
    return {**_ARENA, "dst": _IDS, "src": _IDS, "keep": _flags(mode), "n": _INT}


def _flags(mode: int) -> Argument:
    return Argument(pointer(torch.bool if mode == MASK else torch.int64))


def copy_programs(spec: CopySpec, n: int) -> int:
    """Programs that copy ``n`` units."""
    return sum([-(-n // units) * chunks for units, chunks in spec.tiling])


def together_programs(spec: CopySpec, units: int) -> int:
    """Programs that move up to ``units`` units together."""
    wide = TOGETHER_BYTES // units
    return sum(ceil_div(part.total, max(1, wide // part.word_bytes)) for part in spec.parts)


def row_programs(spec: RowsSpec, n: int) -> int:
    """Programs that encode or decode ``n`` entries."""
    return sum([-(-n * rows // tile) for rows, tile in spec.tiling])
