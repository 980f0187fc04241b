"""What is handed to FlashInfer: workspaces, sizes to plan, calls; and what is needed of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kvfactory.backends.flashinfer.choose import ModuleKey
from kvfactory.backends.flashinfer.latent import RunFields


class Space(NamedTuple):
    """Workspaces of one plan: uint8 ``floats`` and ``ints`` on the device, ``pinned`` on the host.

    ``ints`` and ``pinned`` have equal sizes; a plan writes ``pinned`` and copies it to ``ints``.
    """

    floats: Tensor
    ints: Tensor
    pinned: Tensor


class Sizes(NamedTuple):
    """What is planned: lengths on the host, int32, and the numbers that do not vary by request.

    ``q_indptr`` [batch + 1] in tokens, ``kv_indptr`` [batch + 1] in pages, ``kv_tokens`` [batch].
    ``rows`` is the most query rows that the plan must hold for, ``graph`` whether its launch shape
    has to stay the same, ``split`` whether requests may be split over keys, and ``idle_blocks`` how
    many thread blocks of two per SM that must leave.
    """

    q_indptr: Tensor
    kv_indptr: Tensor
    kv_tokens: Tensor
    rows: int
    q_heads: int
    kv_heads: int
    page_tokens: int
    dim: int
    v_dim: int
    graph: bool
    causal: bool
    window_left: int
    split: bool
    idle_blocks: int
    soft_cap: float


class Lists(NamedTuple):
    """Pages of requests, int32: request b has ``indices[indptr[b]:indptr[b + 1]]``.

    ``last_page`` [batch] counts the entries of the last one.
    """

    indptr: Tensor
    last_page: Tensor
    indices: Tensor


class Call(NamedTuple):
    """One launch: ``q`` [rows, q_heads, dim], ``k`` and ``v`` [pages, slots, heads, dim] with any
    outer strides (ragged: [tokens, heads, dim]), ``out`` like q, ``lse`` float32 [rows, q_heads] in
    base 2 or None. ``mask`` are packed bits with ``mask_indptr`` in bytes.

    With ``overlap`` the kernel may start while the one before it ends (programmatic dependent
    launch). It then reads its plan, ``q_indptr``, the lists and ``mask_indptr`` before it waits, so
    the kernel just before it must not have written those.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None
    q_indptr: Tensor
    scale: float
    causal: bool
    window_left: int
    soft_cap: float
    overlap: bool
    mask: Tensor | None = None
    mask_indptr: Tensor | None = None


class Module(Protocol):
    """A compiled kernel family for one type and head dim."""

    def plan(self, space: Space, sizes: Sizes) -> Any:
        """The schedule, copied to ``space.ints`` in stream order; what ``run`` wants to be given.

        Nothing is read from the device.
        """
        ...

    def splits(self, info: Any) -> bool:
        """Whether the schedule ``info`` splits requests over keys, or is made for their lengths."""
        ...

    def runs(self, space: Space, info: Any) -> RunFields | None:
        """Where the schedule ``info``, just made, carries lengths; None if it cannot get others."""
        ...

    def run(self, space: Space, info: Any, call: Call, lists: Lists | None) -> None:
        """Launch over pages, or without ``lists`` over ragged K and V with q's indptr."""
        ...


class XqaCall(NamedTuple):
    """A decode by XQA: block ``tables`` int32 [batch, pages], ``lengths`` int32 [batch].

    ``semaphores`` are zero before the first call and after every one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    tables: Tensor
    lengths: Tensor
    semaphores: Tensor
    scratch: Tensor
    scale: float
    v_scale: float
    window_left: int
    num_sms: int


class Library(Protocol):
    """What is needed of FlashInfer."""

    def load(self, keys: Iterable[ModuleKey]) -> None:
        """Compile or load all of ``keys``, side by side."""
        ...

    def module(self, key: ModuleKey) -> Module:
        """The module of a key that is not ``xqa``."""
        ...

    def xqa(self, key: ModuleKey) -> Callable[[XqaCall], None]:
        """The launch function of an ``xqa`` key."""
        ...
