"""A cell of the product: one plan put through every operation and held to the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from pool_reference import POISON, Reference
from same_bytes import same_bytes
from torch import Tensor

from kvfactory.errors import KVFactoryError
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan, GroupPlan
from kvfactory.pools import Pool, copies
from kvfactory.spec import Spec

LAYERS = 2
GEOMETRIES: dict[str, dict[str, Any]] = {
    "dim80": {"q_heads": 4, "kv_heads": 2, "head_dim": 80},
    "dim96": {"q_heads": 3, "kv_heads": 3, "head_dim": 96},
    "dim192_128": {"q_heads": 2, "kv_heads": 2, "head_dim": 192, "v_head_dim": 128},
    "dim128_k_only": {"q_heads": 2, "kv_heads": 2, "head_dim": 128, "v_head_dim": 0},
    "mla512_64": {
        "geometry": "mla",
        "q_heads": 2,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "scale": 0.07,
    },
    "mla512_0": {
        "geometry": "mla",
        "q_heads": 2,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 0,
        "scale": 0.07,
    },
    "dim128": {"q_heads": 2, "kv_heads": 2, "head_dim": 128},
}
STATES: dict[str, dict[str, Any]] = {
    "mamba2": {"conv": [[24, 3]], "recurrent": {"head": 2, "value": 8, "key": 16}},
    "gdn": {"conv": [[24, 3]], "recurrent": {"head": 2, "key": 8, "value": 16}},
    "kda": {
        "conv": [[8, 3], [8, 3], [16, 3]],
        "recurrent": {"head": 2, "key": 8, "value": 16},
        "conv_window_first": True,
        "state_dtype": "bfloat16",
    },
    "lightning": {"recurrent": {"head": 2, "key": 8, "value": 8}},
}


INDEXES: dict[str, dict[str, Any]] = {
    "index128": {"index_heads": 4, "head_dim": 128, "topk": 8},
    "index128_64": {"index_heads": 4, "head_dim": 128, "v_head_dim": 64, "topk": 8},
}


@dataclass(frozen=True)
class Cell:
    """One point of the product: geometry, formats by role, layout, page size, options."""

    geometry: str
    quant: tuple[tuple[str, str], ...]
    layout: str
    page_tokens: int = 16
    options: Mapping[str, Any] = field(default_factory=dict)
    align_bytes: int = 1

    def __str__(self) -> str:
        formats = " ".join(f"{role}={name}" for role, name in self.quant)
        options = "".join(f" {key}={value}" for key, value in self.options.items())
        return f"{self.geometry} {formats}{options} {self.layout} page {self.page_tokens}"

    def plan(self) -> CachePlan:
        """The plan of a small cache of three or more pages beside the sink."""
        group = "main"
        if self.geometry in GEOMETRIES:
            granularity, groups = "tokens", {"main": GQA | GEOMETRIES[self.geometry]}
        elif self.geometry in INDEXES:
            granularity, group = "index", "index"
            groups = {"main": GQA | GEOMETRIES["dim80"], "index": INDEX | INDEXES[self.geometry]}
        else:
            linear = {"kind": "linear", "layers": [1, 3], "recurrence": self.geometry}
            granularity, groups = "state", {"main": linear | STATES[self.geometry]}
        quant = {role: {"name": name, "options": self.options} for role, name in self.quant}
        policy = {"quant": quant, "layout": {granularity: self.layout}}
        many = self.page_tokens == 1 or granularity == "state"
        return plan(
            Spec.parse(
                {
                    "model": {"name": "cell", "num_layers": 5, "groups": groups},
                    "kv": {
                        "groups": {group: policy},
                        "page_tokens": self.page_tokens,
                        "align_bytes": self.align_bytes,
                    },
                    "workload": {
                        "requests": 24 if many else 1,
                        "tokens": 1 if many else 3 * self.page_tokens,
                    },
                    "engine": {"prefill_chunk_tokens": 1},
                }
            )
        )


GQA = {"kind": "full", "layers": [1, 3]}
INDEX = {"kind": "sparse_index", "layers": [1, 3], "selects": "main"}


@dataclass
class Account:
    """Cells that plan and pass, cells that the plan refuses (with got and need), and failures."""

    accepted: int = 0
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def run(self, cells: Iterable[Cell]) -> None:
        """Exercise every cell; a refusal must carry path, got and need."""
        for cell in cells:
            try:
                laid = cell.plan()
            except KVFactoryError as error:
                if not all(p.path and p.got and p.need for p in error.problems):
                    self.failed.append(f"{cell}: refused without a reason")
                first = error.problems[0]
                self.refused.append((str(cell), first.got, first.need))
                continue
            try:
                exercise(laid)
                self.accepted += 1
            except Exception as error:
                what = str(error).strip().splitlines()
                self.failed.append(f"{cell}: {type(error).__name__}: {what[0] if what else ''}")


def exercise(laid: CachePlan) -> None:
    """Every operation of the pool of the last group of ``laid``, against the reference."""
    assert laid.bytes == sum(row.num_bytes for row in laid.rows)
    bench = Bench(laid, laid.groups[-1])
    bench.writes()
    bench.reads()
    bench.moves()
    bench.copies_out()
    bench.zeroes()


class Bench:
    """A pool and its reference; every step ends with all bytes of both arenas equal."""

    def __init__(self, laid: CachePlan, group: GroupPlan) -> None:
        self.laid, self.group = laid, group
        self.pool, self.ref = self._make()
        self.random = np.random.default_rng(0)
        torch.manual_seed(0)
        constants = self._constants()
        self.pool.set_constants(constants)
        self.ref.set_constants(constants)
        spots = self.random.permutation(np.arange(group.page_slots, self.pool.num_slots))
        self.slots = [int(slot) for slot in spots[:12]]

    def _make(self) -> tuple[Pool, Reference]:
        """A pool over poisoned bytes, and its reference."""
        arena = torch.zeros(self.laid.bytes, dtype=torch.uint8)
        arena[self.group.offset : self.group.offset + self.group.num_bytes] = POISON
        pool = Pool(self.group, arena)
        return pool, Reference(self.group, arena.numpy().copy())

    def _constants(self) -> dict[tuple[int, str, str], Tensor]:
        """Values far from the defaults, different in every layer."""
        return {
            (layer, tensor.name, constant.name): torch.rand(constant.shape) + 0.25
            for layer in self.group.layers
            for tensor in self.group.tensors
            for constant in tensor.constants
        }

    def rows(self, *lead: int) -> dict[str, Tensor]:
        """Normal rows [*lead, *axes] by tensor name, in bfloat16, not contiguous."""
        found = {}
        for tensor in self.group.tensors:
            shape = [extent for _, extent in tensor.logical.axes]
            wide = torch.randn(*lead, *shape[:-1], 2 * shape[-1], dtype=torch.bfloat16)
            found[tensor.name] = wide[..., ::2]
        return found

    def check(self) -> None:
        """All bytes of the arena are the reference's: nothing else was touched."""
        assert bool((self.pool.bound.arena.numpy() == self.ref.arena).all()), "bytes differ"

    def writes(self) -> None:
        """Plain, masked, prefix-valid and encoded writes."""
        given = self.rows(4)
        before = {name: x.clone() for name, x in given.items()}
        self.pool.write(0, torch.tensor(self.slots[:4]), **given)
        assert all(torch.equal(before[name], x) for name, x in given.items()), "input changed"
        self.ref.store(0, self.slots[:4], self.ref.encode(0, given))
        self._masked()
        self._prefix()
        given = self.rows(3)
        planes = self.ref.encode(1, given)
        self.pool.write_encoded(1, torch.tensor(self.slots[4:7]), planes)
        self.ref.store(1, self.slots[4:7], planes)
        self.pool.write(0, torch.tensor([], dtype=torch.int64), **self.rows(0))
        self.check()

    def _masked(self) -> None:
        given = self.rows(4)
        mask = torch.tensor([True, False, True, False])
        slots = [self.slots[4], -1, self.slots[5], 2**40]
        self.pool.write(1, torch.tensor(slots), mask=mask, **given)
        kept = {name: x[mask] for name, x in given.items()}
        self.ref.store(1, self.slots[4:6], self.ref.encode(1, kept))

    def _prefix(self) -> None:
        given = self.rows(3, 2)
        counts = torch.tensor([1, 0, 2], dtype=torch.int32)
        junk = -7
        a, b, c = self.slots[7:10]
        slots = torch.tensor([[a, junk], [junk, junk], [b, c]])
        self.pool.write(1, slots, counts=counts, **given)
        kept = {name: torch.stack([x[0, 0], x[2, 0], x[2, 1]]) for name, x in given.items()}
        self.ref.store(1, [a, b, c], self.ref.encode(1, kept))

    def reads(self) -> None:
        """Decoded and raw rows, in an order that is not the writing order."""
        for layer, slots in ((0, self.slots[3::-1]), (1, self.slots[9:3:-1])):
            found = self.pool.read(layer, torch.tensor(slots), torch.bfloat16)
            wanted = self.ref.decode(layer, slots, "bfloat16")
            for name, x in wanted.items():
                assert bool((found[name] == x).all()), f"read {name}"
        everything = self.pool.gather(torch.tensor(self.slots))
        for key, x in everything.items():
            wanted_rows = self.ref.rows[key][:, self.slots]
            got = x.contiguous().view(-1).view(torch.uint8).numpy().reshape(wanted_rows.shape)
            assert bool((got == wanted_rows).all()), f"gather {key}"
        one = self.pool.gather(torch.tensor(self.slots[:2]), layer_index=1)
        assert all(same_bytes(one[key], everything[key][1, :2]) for key in one), "gather of a layer"

    def moves(self) -> None:
        """Overlapping moves of slots, a masked one, and a cycle of pages."""
        dst, src = self.slots[1:10], self.slots[:9]
        self.pool.move(torch.tensor(dst), torch.tensor(src))
        self.ref.move(dst, src)
        mask = torch.tensor([False, True])
        self.pool.move(torch.tensor([-1, self.slots[0]]), torch.tensor([-1, self.slots[5]]), mask)
        self.ref.move(self.slots[:1], self.slots[5:6])
        pages = self._pages()
        turned = [*pages[1:], pages[0]]
        self.pool.move_pages(turned, pages)
        self.ref.move(self.ref.slots_of(turned), self.ref.slots_of(pages))
        self.check()

    def _pages(self) -> list[int]:
        return list(range(1, min(self.pool.num_pages, 5)))

    def copies_out(self) -> None:
        """Offload and load, and transfer by memcpy, into second pools at other page ids."""
        src, dst = self._pages()[:2], self._pages()[:0:-1][:2]
        other, expected = self._make()
        other.set_constants(self._constants_of(self.ref))
        expected.set_constants(self._constants_of(self.ref))
        expected.take(self.ref, self.ref.slots_of(dst), self.ref.slots_of(src))
        image = self.pool.offload(src, chunk_bytes=1)
        other.load(image, dst, chunk_bytes=2 * image.data.shape[1])
        _equal(other, expected, "loaded")
        third, _ = self._make()
        third.set_constants(self._constants_of(self.ref))
        assert not self.pool.manifest().mismatches(third.manifest())
        sent, got = self.pool.transfer_regions(src), third.transfer_regions(dst)
        for copy in copies(sent, got):
            there = third.bound.arena[copy.dst_offset : copy.dst_offset + copy.num_bytes]
            there.copy_(self.pool.bound.arena[copy.src_offset : copy.src_offset + copy.num_bytes])
        _equal(third, expected, "transferred")

    def _constants_of(self, ref: Reference) -> dict[tuple[int, str, str], Tensor]:
        return {
            (layer, tensor, name): table[index]
            for tensor, tables in ref.constants.items()
            for name, table in tables.items()
            for index, layer in enumerate(self.group.layers)
        }

    def zeroes(self) -> None:
        """Cleared pages, one of them left out by a mask."""
        first, second = self._pages()[:2]
        self.pool.zero([first, second], mask=torch.tensor([False, True]))
        self.ref.zero(self.ref.slots_of([second]))
        self.check()


def _equal(pool: Pool, expected: Reference, what: str) -> None:
    assert bool((pool.bound.arena.numpy() == expected.arena).all()), f"{what} bytes differ"


Record = Callable[[str, object], None]


def report(account: Account, record: Record) -> None:
    """Hand the account to the terminal summary, then fail on what failed."""
    record("pool_cells", [account.accepted, account.refused])
    assert not account.failed, "\n".join(account.failed)
