"""A double of FlashInfer for the CPU: it keeps what it is handed and answers by its semantics.

Lengths come from where the real kernels take them: fa2, CUDA cores and XQA read the page lists,
fa3 and latent attention what the plan wrote. A plan that was overwritten since, or that is too
short for the lists, is an error. FA3 leaves NaN where a query sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from flashinfer_plans import (
    Taken,
    decode_plan,
    latent_lengths,
    latent_plan,
    prefill_plan,
)
from flashinfer_tape import Tape
from torch import Tensor

from kvfactory.backends.flashinfer.calls import Call, Lists, Module, Sizes, Space, XqaCall
from kvfactory.backends.flashinfer.choose import ModuleKey
from kvfactory.backends.flashinfer.latent import RunFields

H200_SMS = 132


@dataclass
class Double:
    """Implements ``Library``; ``plans`` and ``calls`` are what it was handed, in order."""

    loaded: list[ModuleKey] = field(default_factory=list)
    plans: list[tuple[ModuleKey, Sizes]] = field(default_factory=list)
    calls: list[tuple[ModuleKey, Call | XqaCall, Lists | None]] = field(default_factory=list)
    memory: dict[int, tuple[int, Sizes]] = field(default_factory=dict)
    tape: Tape | None = None

    def load(self, keys: Iterable[ModuleKey]) -> None:
        self.loaded += keys

    def module(self, key: ModuleKey) -> Module:
        assert key in self.loaded, f"{key} is loaded when it is first wanted"
        return DoubleModule(self, key)

    def xqa(self, key: ModuleKey) -> Callable[[XqaCall], None]:
        assert key in self.loaded

        def run(call: XqaCall) -> None:
            self.calls.append((key, call, None))
            self.launch(lambda again: _xqa(call))

        return run

    def launch(self, work: Callable[[bool], None]) -> None:
        """Do ``work``, as one step of the tape that is recorded, if any."""
        if self.tape is None:
            work(False)
        else:
            self.tape.whole(work)

    def kernels(self) -> list[str]:
        return [key.kernel for key, _, _ in self.calls]


@dataclass(frozen=True)
class DoubleModule:
    library: Double
    key: ModuleKey

    def plan(self, space: Space, sizes: Sizes) -> int:
        for name in ("q_indptr", "kv_indptr", "kv_tokens"):
            values = getattr(sizes, name)
            assert values.dtype == torch.int32
            assert not values.is_cuda
        assert len(space.ints) == len(space.pinned) > 0
        self._check_room(space, sizes)
        copies = Sizes(*(x.clone() if isinstance(x, Tensor) else x for x in sizes))
        self.library.plans.append((self.key, copies))
        number = len(self.library.plans)
        self.library.memory[space.ints.data_ptr()] = (number, copies)
        if self._latent_decode(sizes):
            ints = torch.from_numpy(latent_plan(sizes, H200_SMS).ints)
            space.pinned[: len(ints)] = ints
            space.ints[: len(ints)] = ints
        return number

    def _latent_decode(self, sizes: Sizes) -> bool:
        one_row = bool((sizes.q_indptr.diff() == 1).all())
        return self.key.kernel.startswith("mla") and one_row and not sizes.causal

    def runs(self, space: Space, info: int) -> RunFields | None:
        sizes = self.library.plans[info - 1][1]
        return latent_plan(sizes, H200_SMS).fields if self._latent_decode(sizes) else None

    def splits(self, info: int) -> bool:
        sizes = self.library.plans[info - 1][1]
        return self.key.kernel in LENGTHS_IN_PLAN or taken_by(self.key, sizes).split

    def _check_room(self, space: Space, sizes: Sizes) -> None:
        """The real library refuses plans that outgrow their workspaces."""
        if self.key.kernel in LENGTHS_IN_PLAN:
            return
        taken = taken_by(self.key, sizes)
        assert taken.floats <= len(space.floats), "partial results outgrow their workspace"
        assert taken.ints <= len(space.ints), "a schedule outgrows its workspace"

    def run(self, space: Space, info: int, call: Call, lists: Lists | None) -> None:
        self.library.calls.append((self.key, call, lists))
        _check(self.key, call, lists)

        def work(again: bool) -> None:
            number, sizes = self.library.memory[space.ints.data_ptr()]
            if again:
                first = self.library.plans[info - 1][1]
                same = ("graph", "rows", "window_left", "causal", "split")
                assert all(getattr(sizes, name) == getattr(first, name) for name in same)
                assert len(sizes.kv_tokens) == len(first.kv_tokens)
            else:
                assert number == info, "the plan was overwritten before its launch"
            if self._latent_decode(sizes):
                fields = latent_plan(sizes, H200_SMS).fields
                first, tokens = latent_lengths(space.ints, fields, len(sizes.kv_tokens))
                ends = torch.cat([first, first[-1:]])
                sizes = sizes._replace(kv_indptr=ends, kv_tokens=tokens)
            self._answer(call, lists, sizes)

        self.library.launch(work)

    def _answer(self, call: Call, lists: Lists | None, sizes: Sizes) -> None:
        if self.key.kernel.startswith("mla"):
            call = _as_gqa(call)
        spans = _ragged(call) if lists is None else _paged(self.key, call, lists, sizes)
        q_indptr = sizes.q_indptr if self.key.kernel in LENGTHS_IN_PLAN else call.q_indptr
        q_indptr = torch.arange(len(call.q) + 1) if self.key.kernel == "cuda_cores" else q_indptr
        for entry, (k, v) in enumerate(spans):
            _attend(self.key, call, entry, q_indptr.tolist(), (k, v))


LENGTHS_IN_PLAN = ("fa3", "mla_fa2", "mla_fa3")


def taken_by(key: ModuleKey, sizes: Sizes) -> Taken:
    """What a plan of fa2 or of the CUDA cores takes."""
    if key.kernel == "cuda_cores":
        return decode_plan(sizes, H200_SMS, blocks_per_sm=16)
    return prefill_plan(sizes, H200_SMS)


def _check(key: ModuleKey, call: Call, lists: Lists | None) -> None:
    """What FlashInfer demands of its arguments."""
    assert call.q.stride(-1) == call.k.stride(-1) == call.v.stride(-1) == 1
    assert call.out.is_contiguous()
    if lists is not None and not key.kernel.startswith("mla"):
        assert call.k.stride() == call.v.stride()
    assert key.window or call.window_left == -1
    assert bool(call.soft_cap) == key.soft_cap
    if call.mask is not None:
        assert key.kernel == "fa2"
        assert call.mask_indptr is not None
    if lists is not None:
        assert all(x.dtype == torch.int32 for x in lists)


def _as_gqa(call: Call) -> Call:
    k = torch.cat([call.k, call.v], -1).unsqueeze(2)
    return call._replace(k=k, v=call.k.unsqueeze(2))


def _ragged(call: Call) -> list[tuple[Tensor, Tensor]]:
    at = call.q_indptr.tolist()
    return [(call.k[a:b], call.v[a:b]) for a, b in pairwise(at)]


def _paged(key: ModuleKey, call: Call, lists: Lists, sizes: Sizes) -> list[tuple[Tensor, Tensor]]:
    page_tokens = call.k.shape[1]
    indptr, last = lists.indptr.tolist(), lists.last_page.tolist()
    planned = sizes.kv_indptr.tolist()
    assert len(planned) == len(indptr)
    split = key.kernel not in LENGTHS_IN_PLAN and taken_by(key, sizes).split
    spans = []
    for entry in range(len(last)):
        start, stop = indptr[entry], indptr[entry + 1]
        tokens = max(stop - start - 1, 0) * page_tokens + (last[entry] if stop > start else 0)
        if key.kernel in LENGTHS_IN_PLAN:
            start = planned[entry]
            tokens = int(sizes.kv_tokens[entry])
        else:
            room = planned[entry + 1] - planned[entry]
            assert stop - start <= room or not split, "a request outgrew its plan"
            assert key.kernel == "fa2" or stop - start == room or not split, "not as planned"
        pages = lists.indices[start : start + -(-tokens // page_tokens)].long()
        spans.append(tuple(x[pages].flatten(0, 1)[:tokens] for x in (call.k, call.v)))
    return spans


def _attend(
    key: ModuleKey, call: Call, entry: int, q_indptr: list[int], kv: tuple[Tensor, Tensor]
) -> None:
    start, stop = q_indptr[entry], q_indptr[entry + 1]
    q, (k, v) = call.q[start:stop].double(), (x.double() for x in kv)
    if not len(q):
        return
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * call.scale
    if call.soft_cap:
        logits = call.soft_cap * torch.tanh(logits / call.soft_cap)
    seen = _seen(call, entry, len(q), len(k))
    logits = torch.where(seen, logits, -torch.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    out = torch.einsum("hqk,khd->qhd", weights, torch.nan_to_num(v))
    poison = (seen & ~torch.isfinite(v).all(-1).all(-1)).any(-1)
    out[poison] = torch.nan
    lse = lse.T / torch.log(torch.tensor(2.0))
    blind = ~seen.any(-1)
    if key.kernel == "fa3" and len(k):
        out[blind], lse[blind] = torch.nan, torch.nan
    call.out[start:stop] = out.to(call.out.dtype)
    if call.lse is not None:
        call.lse[start:stop] = lse.float()


def _seen(call: Call, entry: int, queries: int, keys: int) -> Tensor:
    row, key = torch.arange(queries)[:, None], torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if call.mask is not None:
        assert call.mask_indptr is not None
        bit = row * keys + key
        packed = call.mask[int(call.mask_indptr[entry]) :].long()
        return (packed[bit // 8] >> (bit % 8)) & 1 == 1
    if call.causal:
        seen &= key <= keys - queries + row
    if call.window_left >= 0:
        seen &= key + queries + call.window_left >= keys + row
    return seen


def _xqa(call: XqaCall) -> None:
    """Tiles of 64 tokens are read whole, pages of -1 as zeros; a weight of 0 keeps NaN in V."""
    page_tokens = call.k.shape[1]
    assert not call.semaphores.any()
    assert call.q.is_contiguous()
    for entry, tokens in enumerate(call.lengths.tolist()):
        pages = call.tables[entry, : -(-tokens // page_tokens)].long()
        k, v = (_rows_of(x, pages).double() for x in (call.k, call.v))
        first = max(0, tokens - call.window_left - 1) if call.window_left >= 0 else 0
        poisoned = v[first // 64 * 64 :].isnan().any()
        group = call.q.shape[1] // k.shape[1]
        k, v = (x[first:tokens].repeat_interleave(group, 1) for x in (k, v))
        logits = torch.einsum("hd,khd->hk", call.q[entry].double(), k) * call.scale
        out = torch.einsum("hk,khd->hd", logits.softmax(-1), v) * call.v_scale
        call.out[entry] = torch.nan if poisoned else out.to(call.out.dtype)


def _rows_of(stored: Tensor, pages: Tensor) -> Tensor:
    rows = stored[pages.clamp(min=0)].float()
    return rows.masked_fill((pages < 0)[:, None, None, None], 0).flatten(0, 1)
