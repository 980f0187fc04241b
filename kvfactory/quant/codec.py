"""The quant contract: how one logical tensor becomes planes of bytes, and back.

A codec is row-local: one (token, head) row in, its bytes out. ``encode`` and ``decode`` in torch
are the specification; kernels must store the same bytes. Planning calls only the pure methods, so
a codec module imports torch inside ``encode`` and ``decode``, never at module level.

Scales are de-scales: x ~ q * scale. Encoding never changes its input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from kvfactory.dtypes import itemsize
from kvfactory.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_ROLES = frozenset({"k", "v", "latent", "rope", "index_k", "index_v"})
ROLES = TOKEN_ROLES | {"state"}


@dataclass(frozen=True)
class Logical:
    """A tensor that the model sees, without its leading (page, slot) axes.

    ``axes`` are named extents from outermost to innermost: ``(("head", 8), ("dim", 128))`` for
    token tensors, ``(("head", 32), ("key", 128), ("value", 128))`` for a recurrent state,
    ``(("channel", 8192), ("tap", 3))`` for a convolution state. ``dtype`` is the type in which
    the model reads and writes it.
    """

    name: str
    role: str
    axes: tuple[tuple[str, int], ...]
    dtype: str

    def extent(self, axis: str) -> int:
        """Length of ``axis``; 1 when the tensor lacks it."""
        return dict(self.axes).get(axis, 1)

    @property
    def elements(self) -> int:
        """Number of elements in one slot."""
        return prod(extent for _, extent in self.axes)


@dataclass(frozen=True)
class Plane:
    """One physical tensor: ``part`` is ``data``, ``scale`` or ``zero``.

    ``axes`` are named extents of one slot, in the order of the logical tensor; an axis may be
    absent (a scale per row has no ``dim``) or shorter (a scale per 32 elements).
    """

    part: str
    dtype: str
    axes: tuple[tuple[str, int], ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return itemsize(self.dtype)


@dataclass(frozen=True)
class Constant:
    """A float32 table entry per layer that lives beside the pool and never moves with slots.

    ``axes`` are named extents per layer, ``()`` for one value a layer. ``default`` fills it until
    calibrated values arrive: the ``statistic`` of observed values along all other axes, over
    ``full_scale``. Those from ``amax`` are positive.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    default: float
    statistic: Literal["amax", "mean"] = "amax"
    full_scale: float = 1.0

    @property
    def elements(self) -> int:
        """Float32 values per layer."""
        return prod(extent for _, extent in self.axes)


@dataclass(frozen=True, repr=False)
class DeviceCodec:
    """A codec as Triton functions, which kernels take as compile-time arguments.

    ``encode(x, constants, OPTIONS)``: tile ``x`` [R, D] in the caller's type -> a tuple of tiles
    [R, n], one per plane in order, each of the plane's element type or of integers of its size.
    ``decode(planes, constants, OPTIONS)``: such tiles -> [R, D] in any float type. Rows run along
    ``axis`` of the tensor; D is its extent padded with zeros to a power of two, and every n is
    padded alike ([R, 1] for a plane without that axis). ``constants`` are those of the codec in
    order, float32, each broadcastable to [R, D]. ``options`` reach the functions as OPTIONS.
    """

    encode: Any
    decode: Any
    options: tuple[Any, ...] | DeviceCodec = ()
    axis: str = "dim"

    @property
    def cache_key(self) -> str:
        """What compiled kernels depend on: the sources of both functions, and the options."""
        below = self.options
        inner = below.cache_key if isinstance(below, DeviceCodec) else str(below)
        return f"{self.encode.cache_key} {self.decode.cache_key} {inner} {self.axis}"

    def __repr__(self) -> str:
        return f"codec_{hashlib.sha256(self.cache_key.encode()).hexdigest()[:16]}"


class Codec(Protocol):
    """One number format with its options bound."""

    @property
    def name(self) -> str:
        """The scheme's name."""
        ...

    def problems(self, tensor: Logical, path: str) -> tuple[Problem, ...]:
        """Why this codec cannot store ``tensor``; empty when it can. Pure."""
        ...

    def planes(self, tensor: Logical) -> tuple[Plane, ...]:
        """The physical planes, data first. Pure."""
        ...

    def constants(self, tensor: Logical) -> tuple[Constant, ...]:
        """Static values per layer that encode and decode need. Pure."""
        ...

    def encode(
        self, tensor: Logical, x: Tensor, constants: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Bytes of ``x`` [rows..., *tensor axes]: plane part -> [rows..., *plane axes].

        ``x`` has any float dtype. ``constants`` holds this layer's values by name, float32, on
        the device of ``x``.

        Raises:
            SpecError: the trailing dims of ``x`` are not the tensor's axes.
        """
        ...

    def decode(
        self,
        tensor: Logical,
        planes: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        dtype: str,
    ) -> Tensor:
        """Values [rows..., *tensor axes] in ``dtype`` from planes by part."""
        ...

    def device(self, tensor: Logical) -> DeviceCodec | None:
        """The same bytes from Triton; None where the torch functions serve GPUs too."""
        ...


class Options(BaseModel):
    """Options of a scheme; a scheme without any uses this class itself."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@dataclass(frozen=True)
class Scheme:
    """A registered number format: its name, the roles it serves, its options and its maker.

    ``relative_rms_error`` is the error on N(0,1) rows of 128 that tests assert (None: not
    stated). ``source`` names the paper, specification or engine that defines the format.
    """

    name: str
    summary: str
    source: str
    make: Callable[[Options], Codec]
    options: type[Options] = Options
    roles: frozenset[str] = ROLES
    relative_rms_error: float | None = None
