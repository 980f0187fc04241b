"""One plan put through every kernel and held to the torch operations, byte for byte.

Runs compiled on a GPU, or on the CPU in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from same_bytes import same_bytes
from torch import Tensor

from kvfactory.errors import BooksError
from kvfactory.kernels import ErrorWords, TritonOps, kernel_ops
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan, GroupPlan
from kvfactory.pools import Keep, TorchOps, group_views
from kvfactory.pools.constants import assign, fill_defaults
from kvfactory.spec import Spec

GQA = {"kind": "full", "layers": [1, 3]}
INDEX = {"kind": "sparse_index", "layers": [1, 3], "selects": "main"}
LINEAR = {"kind": "linear", "layers": [1, 3]}
MLA = {"geometry": "mla", "q_heads": 2, "kv_lora_rank": 512, "scale": 0.07}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "dim128": {"q_heads": 2, "kv_heads": 2, "head_dim": 128},
    "dim96": {"q_heads": 3, "kv_heads": 3, "head_dim": 96},
    "dim80": {"q_heads": 4, "kv_heads": 2, "head_dim": 80},
    "dim192_128": {"q_heads": 2, "kv_heads": 2, "head_dim": 192, "v_head_dim": 128},
    "k_only": {"q_heads": 2, "kv_heads": 2, "head_dim": 128, "v_head_dim": 0},
    "mla512_64": MLA | {"qk_rope_head_dim": 64},
}
STATES: dict[str, dict[str, Any]] = {
    "gdn": {"conv": [[24, 3]], "recurrent": {"head": 2, "key": 8, "value": 16}},
    "mamba2": {"conv": [[24, 3]], "recurrent": {"head": 2, "value": 8, "key": 16}},
    "kda": {
        "conv": [[8, 3], [8, 3], [16, 3]],
        "recurrent": {"head": 2, "key": 8, "value": 16},
        "conv_window_first": True,
        "state_dtype": "bfloat16",
    },
}
INDEXES: dict[str, dict[str, Any]] = {
    "index128_64": {"index_heads": 4, "head_dim": 128, "v_head_dim": 64, "topk": 8},
}
ROLES = {
    "k_only": ("k",),
    "mla512_64": ("latent", "rope"),
    "index128_64": ("index_k", "index_v"),
} | dict.fromkeys(STATES, ("state",))


@dataclass(frozen=True)
class Cell:
    """A geometry, one format for all its roles or one each, a layout, a page size."""

    geometry: str
    quant: str | tuple[str, ...]
    layout: str
    page_tokens: int = 16
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.geometry} {self.quant} {self.layout} {self.page_tokens} {dict(self.options)}"

    def plan(self, requests: int = 1, tokens: int | None = None) -> CachePlan:
        """Three pages of tokens, or 24 states, beside the sink."""
        group = "main"
        if self.geometry in GEOMETRIES:
            granularity, groups = "tokens", {"main": GQA | GEOMETRIES[self.geometry]}
        elif self.geometry in INDEXES:
            granularity, group = "index", "index"
            groups = {"main": GQA | GEOMETRIES["dim80"], "index": INDEX | INDEXES[self.geometry]}
        else:
            granularity = "state"
            groups = {"main": LINEAR | {"recurrence": self.geometry} | STATES[self.geometry]}
        roles = ROLES.get(self.geometry, ("k", "v"))
        names = (self.quant,) * len(roles) if isinstance(self.quant, str) else self.quant
        quant = {r: {"name": q, "options": self.options} for r, q in zip(roles, names, strict=True)}
        many = granularity == "state" or self.page_tokens == 1
        return plan(
            Spec.parse(
                {
                    "model": {"name": "cell", "num_layers": 5, "groups": groups},
                    "kv": {
                        "groups": {group: {"quant": quant, "layout": {granularity: self.layout}}},
                        "page_tokens": self.page_tokens,
                    },
                    "workload": {
                        "requests": 24 if many else requests,
                        "tokens": 1 if many else tokens or 3 * self.page_tokens,
                    },
                    "engine": {"prefill_chunk_tokens": 1},
                }
            )
        )


class Bench:
    """The same bytes twice: under torch on the host, and under kernels on ``device``."""

    def __init__(self, laid: CachePlan, group: GroupPlan, device: str) -> None:
        torch.manual_seed(0)
        self.group, self.device = group, torch.device(device)
        poison = torch.randint(0, 256, (laid.bytes,), dtype=torch.uint8)
        self.want_views = group_views(group, poison.clone())
        self.got_views = group_views(group, poison.to(device))
        self.errors = ErrorWords(
            [table.name for table in (*laid.tables, *laid.states)], self.device
        )
        for views in (self.want_views, self.got_views):
            fill_defaults(views)
        constants = {
            (layer, tensor.name, constant.name): torch.rand(constant.shape) + 0.25
            for layer in group.layers
            for tensor in group.tensors
            for constant in tensor.constants
        }
        assign(self.want_views, constants)
        assign(self.got_views, constants)
        self.want = TorchOps(self.want_views)
        made = kernel_ops(self.errors)(self.got_views)
        assert isinstance(made, TritonOps)
        self.got = made
        spots = torch.randperm(self.want_views.num_slots - group.page_slots) + group.page_slots
        self.slots = spots[:12]

    def rows(self, *lead: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """Rows of many magnitudes with zeros, infinities and NaN in some of them."""
        found = {}
        for tensor in self.group.tensors:
            x = torch.randn(*lead, *(extent for _, extent in tensor.logical.axes))
            scales = torch.exp2(torch.randint(-20, 16, (*x.shape[:-1], 1)).float())
            x = (x * scales).to(dtype)
            flat = x.view(-1, x.shape[-1])
            if len(flat) > 3:
                flat[0, 1], flat[1, 0], flat[2] = float("inf"), float("nan"), 0.0
            narrowed = dtype == torch.float32 or "center" in dict(tensor.options)
            if narrowed and tensor.planes[0].dtype in ("bfloat16", "float16"):
                x.nan_to_num_(0.0)  # how torch narrows a NaN depends on its vector unit
            found[tensor.name] = x
        return found

    def there(self, values: Tensor) -> Tensor:
        """``values`` on the kernels' device with the same strides."""
        if self.device.type == "cpu":
            return values
        out = torch.empty_strided(
            values.shape, values.stride(), dtype=values.dtype, device=self.device
        )
        return out.copy_(values)

    def check(self, what: str) -> None:
        """All bytes of both arenas are equal, and no kernel complained."""
        self.sync()
        got, want = self.got_views.arena.cpu(), self.want_views.arena
        if not torch.equal(got, want):
            wrong = (got != want).nonzero().flatten()
            raise AssertionError(f"{what}: {len(wrong)} bytes differ: {self._where(wrong)}")
        self.errors.check()

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _where(self, offsets: Tensor) -> str:
        first = int(offsets[0])
        for plane in self.group.planes:
            place = plane.place
            end = place.offset + place.itemsize
            end += sum((n - 1) * s for n, s in zip(place.shape, place.strides, strict=True))
            if place.offset <= first < end:
                got, want = self.got_views.arena.cpu(), self.want_views.arena
                some = [(int(i), int(got[i]), int(want[i])) for i in offsets[:6]]
                return f"first in or about {plane.key}: (offset, got, want) {some}"
        return f"first at {first}, outside the group"

    def both(self, name: str, *arguments: Any) -> None:
        """``name`` on both sides with equal arguments."""
        self.want.__getattribute__(name)(*arguments)
        self.got.__getattribute__(name)(*(self._sent(a) for a in arguments))
        self.check(name)

    def _sent(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.there(value)
        if isinstance(value, Mapping):
            return {key: self.there(x) for key, x in value.items()}
        if isinstance(value, Keep):
            mask = None if value.mask is None else self.there(value.mask)
            counts = None if value.counts is None else self.there(value.counts)
            return Keep(mask, counts, value.width)
        return value


def check_write(bench: Bench) -> None:
    """Rows in their own type, then in float32, strided, masked and counted."""
    bench.both("write", 0, bench.slots[:4], bench.rows(4), None)
    check_write_variants(bench)


def check_write_variants(bench: Bench) -> None:
    wide = bench.rows(4, dtype=torch.float32)
    bench.both("write", 1, bench.slots[:3], {n: x[1:] for n, x in bench.rows(4).items()}, None)
    bench.both("write", 1, bench.slots[4 : 4 + 3], {n: x[-3:] for n, x in wide.items()}, None)
    mask = torch.tensor([True, False, True, False])
    bench.both("write", 1, bench.slots[4:8], bench.rows(4), Keep(mask=mask))
    counts = torch.tensor([1, 0, 2], dtype=torch.int32)
    slots = torch.tensor([bench.slots[7], -7, -7, -7, bench.slots[8], bench.slots[9]])
    bench.both("write", 0, slots, bench.rows(6), Keep(counts=counts, width=2))


def check_many_rows(bench: Bench, n: int, dtype: torch.dtype) -> None:
    """``n`` rows of every magnitude that ``dtype`` has, subnormal and infinite ones too."""
    start = bench.group.page_slots
    slots = torch.randperm(bench.want_views.num_slots - start)[:n] + start
    largest = torch.finfo(dtype).max
    low = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    rows = {}
    for tensor in bench.group.tensors:
        x = torch.randn(n, *(extent for _, extent in tensor.logical.axes), dtype=torch.float64)
        sizes = torch.rand(*x.shape[:-1], 1, dtype=torch.float64) * math.log2(largest / low)
        rows[tensor.name] = (x * low * torch.exp2(sizes)).to(dtype)
    bench.both("write", 0, slots, rows, None)


def check_strided_rows(bench: Bench) -> None:
    """Rows cut out of a fused projection, with heads outermost, and not dense at all."""
    for cut in (
        lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.stack([x, x], -1)[..., 0],
    ):
        rows = {name: cut(x) for name, x in bench.rows(5).items()}
        bench.both("write", 1, bench.slots[:5], rows, None)


def check_read(bench: Bench, dtypes: Sequence[torch.dtype] = (torch.bfloat16,)) -> None:
    """Decoded values; NaN equals NaN."""
    names = [tensor.name for tensor in bench.group.tensors]
    slots = bench.slots[:6].flip(0)
    for dtype in dtypes:
        for chosen in (names, names[-1:]) if len(names) > 1 else (names,):
            want = bench.want.read(1, slots, chosen, dtype)
            got = bench.got.read(1, bench.there(slots), chosen, dtype)
            for name, x in want.items():
                found = got[name].cpu()
                same = (found == x) | (found.isnan() & x.isnan())
                assert bool(same.all()), f"read {name}: {int((~same).sum())} of {same.numel()}"


def check_bytes(bench: Bench) -> None:
    """Raw planes out and in, images out and in."""
    for layer in (None, 1):
        want = bench.want.gather(layer, bench.slots)
        got = bench.got.gather(layer, bench.there(bench.slots))
        assert all(same_bytes(got[key].cpu(), x) for key, x in want.items()), "gather"
    planes = bench.want.gather(0, bench.slots[:5])
    bench.both("write_encoded", 1, bench.slots[5:10], planes, None)
    mask = torch.tensor([False, True, True, False, True])
    bench.both("write_encoded", 0, bench.slots[5:10], planes, Keep(mask=mask))
    pages = torch.tensor([2, 1])
    shape = (2, bench.want_views.image_bytes)
    want_image = torch.zeros(shape, dtype=torch.uint8)
    got_image = bench.there(torch.zeros(shape, dtype=torch.uint8))
    bench.want.pack(pages, want_image)
    bench.got.pack(bench.there(pages), got_image)
    assert torch.equal(got_image.cpu(), want_image), "pack"
    bench.both("unpack", torch.tensor([3, 2]), want_image)


def check_moves(bench: Bench) -> None:
    """Overlapping, masked and cyclic moves; cleared pages."""
    bench.both("move", bench.slots[1:8], bench.slots[:7], None)
    mask = torch.tensor([False, True])
    dst, src = torch.tensor([-1, int(bench.slots[0])]), torch.tensor([-1, int(bench.slots[5])])
    bench.both("move", dst, src, Keep(mask=mask))
    bench.both("move_pages", torch.tensor([2, 3, 1]), torch.tensor([1, 2, 3]))
    bench.want.move_pages(torch.tensor([3]), torch.tensor([1]))
    bench.got.move_pages(bench.there(torch.tensor([3])), bench.there(torch.tensor([1])), True)
    bench.check("disjoint move of pages")
    bench.want.move(bench.slots[6:12], bench.slots[:6], None)
    bench.got.move(bench.there(bench.slots[6:12]), bench.there(bench.slots[:6]), None, True)
    bench.check("disjoint move of slots")
    bench.both("zero", torch.tensor([1, 2]), Keep(mask=torch.tensor([False, True])))
    bench.both("zero", torch.tensor([3]), None)


def check_foreign_ids(bench: Bench) -> None:
    """Ids outside the pool write nothing anywhere, and the table's word says so."""
    good, limit = bench.slots[:2].tolist(), bench.want_views.num_slots
    before = bench.got_views.arena.clone()
    bad = bench.there(torch.tensor([limit, -1, 2**40, -(2**40)]))
    rows = {name: bench.there(x) for name, x in bench.rows(4).items()}
    planes = bench.got.gather(0, bench.there(bench.slots[:4]))
    image = torch.zeros(4, bench.got_views.image_bytes, dtype=torch.uint8, device=bench.device)
    fine = bench.there(bench.slots[:4])
    pages = bench.there(torch.tensor([1, 2, 3, 1]))
    calls = {
        "write": lambda: bench.got.write(0, bad, rows, None),
        "write_encoded": lambda: bench.got.write_encoded(0, bad, planes, None),
        "move to": lambda: bench.got.move(bad, fine, None),
        "move from": lambda: bench.got.move(fine, bad, None),
        "move_pages": lambda: bench.got.move_pages(bad, pages),
        "disjoint move": lambda: bench.got.move_pages(bad, pages, True),
        "zero": lambda: bench.got.zero(bad, None),
        "unpack": lambda: bench.got.unpack(bad, image),
        "pack": lambda: bench.got.pack(bad, image),
        "gather": lambda: bench.got.gather(None, bad),
        "read": lambda: bench.got.read(0, bad, [bench.group.tensors[0].name], torch.bfloat16),
    }
    for name, call in calls.items():
        call()
        bench.sync()
        assert torch.equal(bench.got_views.arena, before), name
        with pytest.raises(BooksError, match=f"table {bench.group.table}"):
            bench.errors.check()
        bench.errors.check()
    mixed = torch.tensor([good[0], -5, good[1], limit])
    given = bench.rows(4)
    bench.got.write(1, bench.there(mixed), {n: bench.there(x) for n, x in given.items()}, None)
    kept = torch.tensor([True, False, True, False])
    bench.want.write(1, mixed, given, Keep(mask=kept))
    with pytest.raises(BooksError):
        bench.check("the others of a write with foreign ids")
