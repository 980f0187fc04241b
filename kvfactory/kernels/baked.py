"""What is known at build and compiled into a kernel: frozen objects as compile-time arguments."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvfactory.kinds import ceil_div
from kvfactory.quant.codec import DeviceCodec


@dataclass(frozen=True, repr=False, eq=False)
class Baked:
    """A compile-time argument; compiled code is cached by its content."""

    @property
    def cache_key(self) -> str:
        """Text that differs whenever the compiled code would."""
        return str(_plain(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}_{hashlib.sha256(self.cache_key.encode()).hexdigest()[:16]}"


def _plain(value: Any) -> Any:
    if isinstance(value, Baked):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _plain(vars(value)[name]) for name in names}
    if isinstance(value, DeviceCodec):
        return value.cache_key
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value)


AxisSteps = tuple[int, int, int]
"""(divisor, high, low): index i of an axis lies at (i // divisor) * high + (i % divisor) * low."""


@dataclass(frozen=True, repr=False, eq=False)
class PlaneSpec(Baked):
    """Where a plane's elements are, in elements of ``dtype`` from the arena's start.

    ``slot_step`` is the step between slots where it is the same within and across pages, else 0.
    ``rows`` are the tensor's axes other than the one its rows run along, ``along`` is that one,
    of ``extent`` elements.
    """

    offset: int
    layer: int
    page: int
    slot: AxisSteps
    slot_step: int
    rows: tuple[AxisSteps, ...]
    along: AxisSteps
    extent: int
    dtype: str
    itemsize: int


@dataclass(frozen=True, repr=False, eq=False)
class ConstantSpec(Baked):
    """A float32 table: its offset and steps in elements; a step of 0 for an axis that it lacks."""

    offset: int
    layer: int
    rows: tuple[int, ...]
    along: int


@dataclass(frozen=True, repr=False, eq=False)
class TensorSpec(Baked):
    """One logical tensor: rows of ``extent`` elements padded to ``width``, ``row_extents`` a slot.

    ``steps`` are the dense steps of the row axes, and ``along`` that of a row's elements. A
    program takes ``tile_rows`` rows.
    """

    codec: DeviceCodec
    row_extents: tuple[int, ...]
    extent: int
    width: int
    steps: tuple[int, ...]
    along: int
    elements: int
    planes: tuple[PlaneSpec, ...]
    constants: tuple[ConstantSpec, ...]
    tile_rows: int

    @property
    def slot_rows(self) -> int:
        """Rows in one slot."""
        return math.prod(self.row_extents)


@dataclass(frozen=True, repr=False, eq=False)
class RowsSpec(Baked):
    """The tensors that one launch writes or reads; ids at or above ``limit`` are foreign."""

    tensors: tuple[TensorSpec, ...]
    page_slots: int
    limit: int
    message: str

    @cached_property
    def tiling(self) -> tuple[tuple[int, int], ...]:
        """Per tensor the rows of an entry and those of a program."""
        return tuple((tensor.slot_rows, tensor.tile_rows) for tensor in self.tensors)


@dataclass(frozen=True, repr=False, eq=False)
class Part(Baked):
    """Bytes of a unit (a page or a slot) that one loop copies, in words of ``word_bytes``.

    ``dims`` are (extent, step) pairs, innermost first; their product is ``total`` words.
    ``image`` is where the part begins in a unit's dense image, ``run`` the words of one layer;
    ``dense`` are the steps of ``dims`` there, or nothing where they are in its order.
    A program takes ``units`` x ``width`` words.
    """

    word_bytes: int
    offset: int
    layer: int
    page: int
    slot: AxisSteps
    slot_step: int
    dims: tuple[int, ...]
    total: int
    run: int
    image: int
    width: int
    units: int
    dense: tuple[int, ...] = ()


@dataclass(frozen=True, repr=False, eq=False)
class CopySpec(Baked):
    """All parts of a unit; ``page_slots`` is 1 where units are pages.

    ``image_bytes`` is the size of a unit's dense image.
    """

    parts: tuple[Part, ...]
    page_slots: int
    limit: int
    image_bytes: int
    message: str

    @cached_property
    def tiling(self) -> tuple[tuple[int, int], ...]:
        """Per part the units of a program, and how many programs share the words of a unit."""
        return tuple((part.units, ceil_div(part.total, part.width)) for part in self.parts)
