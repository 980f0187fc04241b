# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803
"""One launch for the writes of a layer in several groups: K, V and index keys.

Groups of one table whose entries are the same tokens share slots, pages and error word; only the
index of the layer differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfactory.kernels.addressing import count
from kvfactory.kernels.baked import RowsSpec
from kvfactory.kernels.compiled import ALL, row_programs
from kvfactory.kernels.launch import Argument, Kernel, pointer
from kvfactory.kernels.ops import MOST_FORMS, TritonOps, entry_steps, steppable
from kvfactory.kernels.rows import write_tensor
from kvfactory.kernels.specs import WARPS
from kvfactory.planning.cacheplan import Attention, CachePlan, Select
from kvfactory.pools import Ops, Pool, Write
from kvfactory.quant.numerics import torch_dtype


@triton.jit
def write_groups(
    arena, errors, slots, n, layers, xs, steps,
    SPEC: tl.constexpr, KEEP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """``rows.write`` of all entries, with an index ``layers[i]`` for each tensor."""
    start = 0
    for i in tl.static_range(count(SPEC, "tensors")):
        start = write_tensor(
            arena, errors, slots, slots, n, 1, layers[i], xs[i], steps[2 * i], steps[2 * i + 1],
            start, SPEC, i, KEEP, ALIGNED,
        )  # fmt: skip


class FusedWrites:
    """Makes several writes of one layer in one launch where their pools share slots."""

    def __init__(self, arena: Tensor) -> None:
        self._arena = arena
        self._pairs: dict[tuple[int, ...], _Together | None] = {}

    def run(self, writes: Sequence[Write]) -> None:
        """Make ``writes``, in one launch or one each."""
        together = self._of([write.ops for write in writes]) if len(writes) > 1 else None
        if together is None or not _same_entries(writes):
            for write in writes:
                write.run()
            return
        together.run(writes)

    def kernels(self, plan: CachePlan, pools: Mapping[str, Pool]) -> Iterator[Kernel]:
        """All that layers of ``plan`` launch here, for a warm-up."""
        pairs: dict[tuple[str, str], None] = {}
        for layer, entries in plan.owners.items():
            own = [group for group, _ in entries if layer in group.layers]
            attending = [group for group in own if isinstance(group.work, Attention)]
            index = [group for group in own if isinstance(group.work, Select)]
            pairs |= dict.fromkeys((a.name, b.name) for a in attending for b in index)
        for names in pairs:
            together = self._of([pools[name].ops for name in names])
            tensors = [t for name in names for t in pools[name].group.tensors]
            if together is not None:
                yield together.kernel(tuple(torch_dtype(t.logical.dtype) for t in tensors), True)

    def _of(self, ops: Sequence[Ops]) -> _Together | None:
        key = tuple(map(id, ops))
        if key not in self._pairs:
            self._pairs[key] = self._make(ops)
        return self._pairs[key]

    def _make(self, ops: Sequence[Ops]) -> _Together | None:
        compiled = [own for own in ops if isinstance(own, TritonOps)]
        places = {(own.error.data_ptr(), own.rows.page_slots, own.rows.limit) for own in compiled}
        fits = len(compiled) == len(ops) and len(places) == 1
        return _Together(self._arena, compiled) if fits else None


class _Together:
    """The groups behind ``ops``, of one table and page size."""

    def __init__(self, arena: Tensor, ops: Sequence[TritonOps]) -> None:
        self._arena, self._error = arena, ops[0].error
        self._ops = tuple(ops)  # kept: they are known by their address
        tensors = tuple(tensor for own in ops for tensor in own.rows.tensors)
        self._rows: RowsSpec = replace(ops[0].rows, tensors=tensors)
        self._forms: dict[Any, tuple[Kernel, tuple[int, ...]]] = {}
        self.kernel: Callable[..., Kernel] = cache(self._make)

    def run(self, writes: Sequence[Write]) -> None:
        pairs = [
            (write.rows[name], write.layer_index)
            for write, own in zip(writes, self._ops, strict=True)
            for name in own.names
        ]
        xs, layers = (tuple(values) for values in zip(*pairs, strict=True))
        key = tuple([(x.dtype, x.stride(), x.data_ptr() % 16) for x in xs])
        form = self._forms.get(key)
        if form is None:
            if not all(map(steppable, xs, self._rows.tensors)):
                xs = tuple(x.contiguous() for x in xs)
            form = self._form(xs)
            if len(self._forms) > MOST_FORMS:
                self._forms.clear()
            if all(x is given for x, (given, _) in zip(xs, pairs, strict=True)):
                self._forms[key] = form
        kernel, steps = form
        slots = writes[0].target.slots
        n = slots.shape[0]
        programs = row_programs(self._rows, n)
        kernel.launch(programs, self._arena, self._error, slots, n, layers, xs, steps)

    def _form(self, xs: Sequence[Tensor]) -> tuple[Kernel, tuple[int, ...]]:
        steps, aligned = entry_steps(xs, self._rows.tensors)
        return self.kernel(tuple(x.dtype for x in xs), aligned), steps

    def _make(self, dtypes: tuple[torch.dtype, ...], aligned: bool) -> Kernel:
        many = len(dtypes)
        arguments = {
            "arena": Argument("*u8", aligned=True),
            "errors": Argument("*i64"),
            "slots": Argument("*i64"),
            "n": Argument("i32"),
            "layers": Argument(("i32",) * many),
            "xs": Argument(tuple(map(pointer, dtypes)), aligned),
            "steps": Argument(("i32",) * (2 * many)),
        }
        baked = {"SPEC": self._rows, "KEEP": ALL, "ALIGNED": aligned}
        return Kernel(write_groups, arguments, baked, WARPS)


def _same_entries(writes: Sequence[Write]) -> bool:
    """Whether all go to the same slots, none left out."""
    first = writes[0].target.slots
    return all(
        write.target.keep is None
        and write.target.slots.data_ptr() == first.data_ptr()
        and write.target.slots.shape == first.shape
        for write in writes
    )
