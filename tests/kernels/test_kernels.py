"""Every kernel stores the bytes of the torch operations: interpreted here, compiled on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fused_writes import check_apart, check_fused
from index_steps import check_index, check_large_index, check_updates
from kernel_cells import (
    GEOMETRIES,
    INDEXES,
    STATES,
    Bench,
    Cell,
    check_bytes,
    check_foreign_ids,
    check_many_rows,
    check_moves,
    check_read,
    check_strided_rows,
    check_write,
)

from kvfactory.errors import KVFactoryError
from kvfactory.kernels import ErrorWords, kernel_ops
from kvfactory.layouts import LAYOUTS
from kvfactory.pools import Keep, group_views
from kvfactory.quant import SCHEMES

HERE = Path(__file__).parent
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
PLANES_OF_ALL_SIZES = ("plain", "int8_token_head", "int4_g32", "nvfp4", "state_int8")
CHECKS = (check_write, check_strided_rows, check_read, check_bytes, check_moves)


def test_interpreted() -> None:
    """The interpreter must be chosen before Triton is imported, so it gets its own process."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "interpreted_kernels.py"],
        cwd=HERE,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def gpu_bench(cell: Cell) -> Bench:
    try:
        laid = cell.plan()
    except KVFactoryError as error:
        pytest.skip(f"refused: {error.problems[0]}")
    return Bench(laid, laid.groups[-1], "cuda")


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("layout", LAYOUTS.names())
@pytest.mark.parametrize("quant", SCHEMES.names())
def test_product(quant: str, layout: str) -> None:
    geometry = "gdn" if quant == "state_int8" else "dim128"
    made = gpu_bench(Cell(geometry, quant, layout, 128 if layout == "fa4_scales" else 16))
    check_write(made)
    check_read(made)
    if quant in PLANES_OF_ALL_SIZES:
        check_bytes(made)
        check_moves(made)


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("geometry", [*GEOMETRIES, *INDEXES, *STATES])
def test_geometries(geometry: str) -> None:
    state = geometry in STATES
    quants = ("plain", "state_int8") if state else ("plain", "nvfp4")
    layouts = ("state_split", "slot_major") if state else ("nhd", "vectorized")
    for quant, layout in zip(quants, layouts, strict=True):
        made = gpu_bench(Cell(geometry, quant, layout, 1 if state else 64))
        for check in CHECKS:
            check(made)


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("quant", sorted({*SCHEMES.names()} - {"state_int8"}))
def test_options(quant: str) -> None:
    options = {"center": True}
    if quant in ("fp8_e4m3", "fp8_e5m2"):
        options["scale"] = "head"
    made = gpu_bench(Cell("dim128", quant, "paged_kv", options=options))
    check_write(made)
    check_read(made, (torch.bfloat16, torch.float16, torch.float32))


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("quant", sorted({*SCHEMES.names()} - {"state_int8"}))
def test_many_rows(quant: str, dtype: torch.dtype) -> None:
    laid = Cell("dim128", quant, "nhd").plan(tokens=4096)
    check_many_rows(Bench(laid, laid.groups[-1], "cuda"), 4000, dtype)


@pytest.mark.gpu
@NO_GPU
def test_foreign_ids() -> None:
    check_foreign_ids(gpu_bench(Cell("dim128", ("plain", "nvfp4"), "nhd")))


@pytest.mark.gpu
@NO_GPU
def test_index() -> None:
    check_index("cuda")
    check_large_index("cuda")
    check_updates("cuda")


@pytest.mark.gpu
@NO_GPU
def test_one_launch_for_all_groups_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fused("cuda", monkeypatch)
    check_apart("cuda", monkeypatch)


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("number", range(4))
def test_divisions_are_correctly_rounded(number: int) -> None:
    """Every divisor of a binade, and pairs whose quotients come close to a tie."""
    from division import HARDWARE, LONG, pairs, quotients

    torch.manual_seed(number)
    for _ in range(8):
        x, scale = pairs(number, 2**23)
        both, scales = torch.cat([x, -x]), torch.cat([scale, scale])
        assert torch.equal(quotients(both, scales, LONG), quotients(both, scales, HARDWARE))
    zeros = torch.tensor([0.0, -0.0], device="cuda")
    assert quotients(zeros, torch.ones_like(zeros), LONG).signbit().tolist() == [False, True]


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("hard", ["hard_short_dividends", "hard_short_divisors"])
def test_short_divisions_round_to_the_same_codes(hard: str) -> None:
    """One correction leaves every quotient on its side of every code and midpoint."""
    import division

    x, scale = vars(division)[hard]()
    wanted = division.quotients(x, scale, division.HARDWARE)
    want = division.side(wanted, wanted)
    assert (want == 0).any()
    assert (want != 0).any()
    for form in (division.SHORT, division.PART):
        found = division.quotients(x, scale, form)
        assert torch.equal(division.side(found, wanted), want)
    zeros = torch.tensor([0.0, -0.0], device="cuda")
    signs = division.quotients(zeros, torch.ones_like(zeros), division.SHORT).signbit()
    assert signs.tolist() == [False, True]


@pytest.mark.gpu
@NO_GPU
def test_replayed_with_other_slots_and_counts() -> None:
    """A graph reads ids, counts and rows when it runs, not when it was captured."""
    made = gpu_bench(Cell("dim128", ("fp8_e4m3", "int4_g32"), "hnd"))
    slots, counts = made.there(made.slots[:6]), made.there(torch.tensor([2, 1, 0]).int())
    rows = {name: made.there(x) for name, x in made.rows(6).items()}
    sources = made.there(made.slots[6:12])

    def run() -> None:
        made.got.write(1, slots, rows, Keep(counts=counts, width=2))
        made.got.move(sources, slots, None)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    made = replace_bytes(made)
    for _ in range(3):
        order, given = torch.randperm(12), made.rows(6)
        kept = torch.randint(0, 3, (3,), dtype=torch.int32)
        slots.copy_(made.slots[order[:6]])
        sources.copy_(made.slots[order[6:]])
        counts.copy_(kept)
        for name, x in given.items():
            rows[name].copy_(x)
        graph.replay()
        made.want.write(1, made.slots[order[:6]], given, Keep(counts=kept, width=2))
        made.want.move(made.slots[order[6:]], made.slots[order[:6]], None)
        made.check("replay")


def replace_bytes(made: Bench) -> Bench:
    """The kernels' bytes back to those of the host."""
    torch.cuda.synchronize()
    made.got_views.arena.copy_(made.want_views.arena)
    return made


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("layout", ["nhd", "hnd", "page_major", "record"])
def test_beyond_two_to_the_31(layout: str) -> None:
    """Offsets above 2^31 bytes and elements: the last pages of a pool of 20 GiB, and its first."""
    laid = Cell("dim128", "plain", layout).plan(requests=1, tokens=10 * 2**20)
    group = laid.groups[0]
    arena = torch.zeros(laid.bytes, dtype=torch.uint8, device="cuda")
    assert arena.numel() > 2**33
    views = group_views(group, arena)
    ops = kernel_ops(ErrorWords([group.table], arena.device))(views)
    last = views.num_slots
    slots = torch.tensor([last - 1, last - 17, last // 2 + 5, 20], device="cuda")
    shape = (4, 2, 128)
    rows = {n: torch.randn(shape, dtype=torch.bfloat16, device="cuda") for n in ("k", "v")}
    ops.write(1, slots, rows, None)
    for name, x in rows.items():
        pages, offsets = slots // 16, slots % 16
        assert torch.equal(views.planes[name][1][pages, offsets], x)
        assert torch.equal(ops.read(1, slots, [name], torch.bfloat16)[name], x)
    pages = torch.tensor([views.num_pages - 1, 1], device="cuda")
    ops.move_pages(pages.flip(0).contiguous(), pages, False)
    offset = int(slots[0]) % 16
    assert torch.equal(views.planes["k"][1, 1, offset], rows["k"][0])
    image = torch.empty(2, views.image_bytes, dtype=torch.uint8, device="cuda")
    ops.pack(pages, image)
    ops.zero(pages, None)
    assert not views.planes["k"][:, pages].any()
    ops.unpack(pages, image)
    ops.move(slots[1:2], torch.tensor([16 + offset], device="cuda"), None, True)
    assert torch.equal(views.planes["v"][1, last // 16 - 2, 15], rows["v"][0])
