"""What a pool refuses, with path, got and need; nothing is written then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from pool_cells import Cell
from torch import Tensor

from kvfactory.errors import BooksError, BuildError, KVFactoryError, SpecError
from kvfactory.pools import GroupViews, Keep, Pool, TorchOps


@pytest.fixture
def pool() -> Pool:
    """Two layers, 4 pages of 16, two heads of 128: K with scales, V with a constant."""
    laid = Cell("dim128", (("k", "mxfp8"), ("v", "fp8_e4m3")), "hnd").plan()
    return Pool(laid.groups[0], torch.zeros(laid.bytes, dtype=torch.uint8))


def rows(*lead: int) -> dict[str, Tensor]:
    return {name: torch.randn(*lead, 2, 128, dtype=torch.bfloat16) for name in ("k", "v")}


SLOTS = torch.arange(16, 20)
ONE = torch.zeros(4, 2, 128)
FP8 = ONE.to(torch.float8_e4m3fn)

Call = Callable[[Pool], object]


def _set(key: tuple[int, str, str], value: object) -> Call:
    return lambda p: p.set_constants({key: value})


def odd(value: Any) -> Any:
    """What the types do not allow."""
    return value


REFUSED: dict[str, tuple[type[KVFactoryError], str, Call]] = {
    "slot beyond": (BooksError, "slots", lambda p: p.write(0, SLOTS + 60, **rows(4))),
    "slot negative": (BooksError, "slots", lambda p: p.write(0, SLOTS - 17, **rows(4))),
    "slot read": (BooksError, "slots", lambda p: p.read(0, torch.tensor([64]))),
    "slot gathered": (BooksError, "slots", lambda p: p.gather(torch.tensor([-1]))),
    "slot moved to": (BooksError, "dst_slots", lambda p: p.move(SLOTS + 60, SLOTS)),
    "slot moved from": (BooksError, "src_slots", lambda p: p.move(SLOTS, SLOTS + 60)),
    "page cleared": (BooksError, "pages", lambda p: p.zero([4])),
    "page moved": (BooksError, "src_pages", lambda p: p.move_pages([1], [9])),
    "page saved": (BooksError, "pages", lambda p: p.offload(np.array([-1]))),
    "page loaded": (BooksError, "pages", lambda p: p.load(p.offload([1]), [4])),
    "page sent": (BooksError, "pages", lambda p: p.transfer_regions([4])),
    "layer": (BooksError, "layer_index", lambda p: p.write(2, SLOTS, **rows(4))),
    "layer negative": (BooksError, "layer_index", lambda p: p.views(-1)),
    "kept slot": (
        BooksError,
        "slots",
        lambda p: p.write(0, SLOTS + 60, torch.tensor([True, False, False, True]), **rows(4)),
    ),
    "counted slot": (
        BooksError,
        "slots",
        lambda p: p.write(0, torch.tensor([[1, 99]]), counts=torch.tensor([2]), **rows(1, 2)),
    ),
    "layer text": (BooksError, "layer_index", lambda p: p.write(odd("0"), SLOTS, **rows(4))),
    "layer half": (BooksError, "layer_index", lambda p: p.write(odd(0.5), SLOTS, **rows(4))),
    "layer true": (BooksError, "layer_index", lambda p: p.write(odd(True), SLOTS, **rows(4))),
    "half slots": (SpecError, "dst_slots", lambda p: p.move(odd([16.5]), [17])),
    "text slots": (SpecError, "src_slots", lambda p: p.move([16], odd(["17"]))),
    "ragged slots": (SpecError, "slots", lambda p: p.gather(odd([[16], [17, 18]]))),
    "huge slots": (SpecError, "slots", lambda p: p.gather(odd([10**30]))),
    "no slots": (SpecError, "slots", lambda p: p.gather(odd(None))),
    "list of slots": (SpecError, "slots", lambda p: p.write(0, odd([16, 17]), **rows(2))),
    "list of mask": (SpecError, "mask", lambda p: p.write(0, SLOTS, odd([True] * 4), **rows(4))),
    "list of rows": (SpecError, "k", lambda p: p.write(0, SLOTS, k=odd([1]), v=ONE)),
    "array of rows": (SpecError, "k", lambda p: p.write(0, SLOTS, k=odd(ONE.numpy()), v=ONE)),
    "none for rows": (SpecError, "k", lambda p: p.write(0, SLOTS, k=odd(None), v=ONE)),
    "list read": (SpecError, "slots", lambda p: p.read(0, odd([16]))),
    "loaded over itself": (SpecError, "pages", lambda p: p.load(p.offload([1, 2]), [3, 3])),
    "float slots": (SpecError, "slots", lambda p: p.write(0, SLOTS.float(), **rows(4))),
    "no v": (SpecError, "v", lambda p: p.write(0, SLOTS, k=ONE)),
    "unknown": (SpecError, "value", lambda p: p.write(0, SLOTS, value=ONE, **rows(4))),
    "too few rows": (SpecError, "k", lambda p: p.write(0, SLOTS, **rows(3))),
    "wrong dim": (SpecError, "k", lambda p: p.write(0, SLOTS, k=ONE[..., :64], v=ONE)),
    "heads missing": (SpecError, "v", lambda p: p.write(0, SLOTS, k=ONE, v=ONE[:, 0])),
    "codes": (SpecError, "k", lambda p: p.write(0, SLOTS, k=ONE.int(), v=ONE)),
    "fp8 input": (
        SpecError,
        "k",
        lambda p: p.write(0, SLOTS, k=ONE.to(torch.float8_e4m3fn), v=ONE),
    ),
    "encoded type": (
        SpecError,
        "k.scale",
        lambda p: p.write_encoded(0, SLOTS, {**p.gather(SLOTS, 0), "k.scale": ONE[..., :4]}),
    ),
    "encoded missing": (
        SpecError,
        "k.scale",
        lambda p: p.write_encoded(0, SLOTS, {"k": p.gather(SLOTS, 0)["k"]}),
    ),
    "encoded shape": (SpecError, "k", lambda p: p.write_encoded(0, SLOTS[:3], p.gather(SLOTS, 0))),
    "mask shape": (SpecError, "mask", lambda p: p.write(0, SLOTS, torch.tensor([True]), **rows(4))),
    "mask type": (SpecError, "mask", lambda p: p.write(0, SLOTS, SLOTS, **rows(4))),
    "mask of a move": (SpecError, "mask", lambda p: p.move(SLOTS, SLOTS, torch.tensor([True]))),
    "mask of zero": (SpecError, "mask", lambda p: p.zero([1, 2], torch.tensor([True]))),
    "counts flat": (SpecError, "slots", lambda p: p.write(0, SLOTS, counts=SLOTS, **rows(4))),
    "counts shape": (
        SpecError,
        "counts",
        lambda p: p.write(0, SLOTS[None], counts=SLOTS, **rows(1, 4)),
    ),
    "counts beyond": (
        SpecError,
        "counts",
        lambda p: p.write(0, SLOTS[None], counts=torch.tensor([5]), **rows(1, 4)),
    ),
    "mask and counts": (
        SpecError,
        "mask, counts",
        lambda p: p.write(0, SLOTS[None], torch.ones(1, 4) > 0, torch.tensor([4]), **rows(1, 4)),
    ),
    "unequal move": (SpecError, "src_slots", lambda p: p.move(SLOTS, SLOTS[:3])),
    "unequal pages": (SpecError, "src_pages", lambda p: p.move_pages([1, 2], [1])),
    "read type": (SpecError, "dtype", lambda p: p.read(0, SLOTS, torch.int8)),
    "read name": (SpecError, "values", lambda p: p.read(0, SLOTS, names=("values",))),
    "load count": (SpecError, "pages", lambda p: p.load(p.offload([1, 2]), [1])),
    "constant name": (SpecError, "layers.1.v.gain", _set((1, "v", "gain"), 1.0)),
    "constant layer": (SpecError, "layers.2.v.scale", _set((2, "v", "scale"), 1.0)),
    "constant shape": (SpecError, "layers.1.v.scale", _set((1, "v", "scale"), [1.0, 2.0])),
    "constant nan": (SpecError, "layers.1.v.scale", _set((1, "v", "scale"), float("nan"))),
    "constant overflow": (SpecError, "layers.1.v.scale", _set((1, "v", "scale"), 1e300)),
    "constant zero": (SpecError, "layers.1.v.scale", _set((1, "v", "scale"), 0.0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason_and_nothing_written(pool: Pool, name: str) -> None:
    kind, path, call = REFUSED[name]
    pool.write(0, SLOTS, **rows(4))
    before = pool.bound.arena.clone()
    with pytest.raises(kind) as caught:
        call(pool)
    assert path in [problem.path for problem in caught.value.problems]
    assert all(problem.got and problem.need for problem in caught.value.problems)
    assert torch.equal(before, pool.bound.arena)


def test_all_problems_at_once(pool: Pool) -> None:
    with pytest.raises(SpecError) as caught:
        pool.write(0, SLOTS, k=ONE[:2].int(), value=ONE)
    assert {problem.path for problem in caught.value.problems} == {"k", "v", "value"}


def test_one_bad_constant_sets_none(pool: Pool) -> None:
    with pytest.raises(SpecError):
        pool.set_constants({(1, "v", "scale"): 2.0, (3, "v", "scale"): -1.0})
    assert [float(pool.constants(layer)["v"]["scale"]) for layer in (0, 1)] == [1.0, 1.0]


@pytest.mark.parametrize(
    "arena",
    [
        lambda size: torch.zeros(size - 1, dtype=torch.uint8),
        lambda size: torch.zeros(size, dtype=torch.int8),
        lambda size: torch.zeros(size, 1, dtype=torch.uint8),
        lambda size: torch.zeros(2 * size, dtype=torch.uint8)[::2],
    ],
    ids=["short", "int8", "two-dimensional", "strided"],
)
def test_an_arena_that_does_not_fit_is_refused(arena: Callable[[int], Tensor]) -> None:
    group = Cell("dim128", (("k", "plain"), ("v", "fp8_e4m3")), "nhd").plan().groups[0]
    end = group.tensor("v").constants[0].offset + 8
    with pytest.raises(BuildError) as caught:
        Pool(group, arena(end))
    assert "arena" in caught.value.problems[0].path


def test_meta_memory_counts_bytes_and_refuses_data() -> None:
    laid = Cell("dim128", (("k", "nvfp4"), ("v", "int4_g32")), "page_major").plan()
    pool = Pool(laid.groups[0], torch.zeros(laid.bytes, dtype=torch.uint8, device="meta"))
    assert pool.plane_bytes()["k.scale"].entry_bytes == 2 * 8
    assert pool.views(0)["v"].shape == (4, 16, 2, 64)
    assert len(pool.transfer_regions([1])) == 1
    calls: Sequence[Call] = (
        lambda p: p.write(0, SLOTS, **rows(4)),
        lambda p: p.read(0, SLOTS),
        lambda p: p.zero([1]),
        lambda p: p.offload([1]),
        lambda p: p.manifest(),
    )
    for call in calls:
        with pytest.raises(BuildError, match="memory=meta"):
            call(pool)


@dataclass(frozen=True)
class Liar:
    """A codec that stores another type than it planned."""

    honest: object
    name: str = "liar"

    def encode(self, tensor: object, x: Tensor, constants: object) -> dict[str, Tensor]:
        return {"data": x.to(torch.int16)}


def test_a_codec_that_stores_another_type_is_caught() -> None:
    laid = Cell("dim128", (("k", "plain"), ("v", "plain")), "nhd").plan()

    def ops(views: GroupViews) -> TorchOps:
        return TorchOps(replace(views, codecs={name: Liar(c) for name, c in views.codecs.items()}))

    pool = Pool(laid.groups[0], torch.zeros(laid.bytes, dtype=torch.uint8), ops)
    with pytest.raises(SpecError, match="as it planned"):
        pool.write(0, SLOTS, **rows(4))


def test_keep_by_counts_is_a_mask() -> None:
    keep = Keep(counts=torch.tensor([2, 0, 3]), width=3)
    assert keep.as_mask().tolist() == [True, True, False, False, False, False, True, True, True]
