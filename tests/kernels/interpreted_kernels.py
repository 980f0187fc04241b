"""Run by ``test_kernels`` in a process with TRITON_INTERPRET=1: every kernel on the CPU."""

from __future__ import annotations

import pytest
import torch
from fused_writes import check_apart, check_fused
from index_steps import check_index, check_updates
from kernel_cells import (
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

from kvfactory.quant import SCHEMES

# The interpreter computes masked lanes too, so NumPy warns about numbers that nobody reads.
pytestmark = pytest.mark.filterwarnings("ignore")

TOKEN_FORMATS = [name for name in SCHEMES.names() if name != "state_int8"]


def bench(cell: Cell) -> Bench:
    laid = cell.plan()
    return Bench(laid, laid.groups[-1], "cpu")


@pytest.mark.parametrize("layout", ["nhd", "hnd", "record"])
@pytest.mark.parametrize("quant", TOKEN_FORMATS)
def test_rows(quant: str, layout: str) -> None:
    made = bench(Cell("dim128", quant, layout))
    check_write(made)
    check_read(made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("quant", TOKEN_FORMATS)
def test_many_rows(quant: str, dtype: torch.dtype) -> None:
    laid = Cell("dim128", quant, "nhd").plan(tokens=64)
    check_many_rows(Bench(laid, laid.groups[-1], "cpu"), 64, dtype)


@pytest.mark.parametrize("quant", ["plain", "int8_token_head", "mxfp4", "nvfp4"])
def test_rows_with_center(quant: str) -> None:
    made = bench(Cell("dim128", quant, "paged_kv", options={"center": True}))
    check_write(made)
    check_read(made)


@pytest.mark.parametrize(
    "cell",
    [
        Cell("dim96", "int4_g32", "paged_kv"),
        Cell("dim80", "nvfp4", "paged_kv"),
        Cell("dim192_128", "fp8_e4m3_token_head", "token_major"),
        Cell("dim128", "fp8_e4m3", "hnd", options={"scale": "head", "center": True}),
        Cell("dim128", ("fp8_e5m2", "int4_g128"), "page_major", 1),
        Cell("dim128", "mxfp8", "fa4_scales", 128),
        Cell("k_only", "plain", "vectorized"),
        Cell("mla512_64", ("fp8_tile128", "plain"), "record", 64),
        Cell("index128_64", ("fp8_tile128", "plain"), "paged_kv", 64),
        Cell("gdn", "state_int8", "state_split"),
        Cell("mamba2", "state_int8", "slot_major"),
        Cell("kda", "state_int8", "slot_major"),
    ],
    ids=str,
)
def test_everything(cell: Cell) -> None:
    made = bench(cell)
    for check in (check_write, check_strided_rows, check_read, check_bytes, check_moves):
        check(made)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "page_major", "token_major", "vectorized"])
def test_copies(layout: str) -> None:
    made = bench(Cell("dim128", ("plain", "int8_token_head"), layout))
    check_bytes(made)
    check_moves(made)


def test_foreign_ids_write_nothing_and_are_reported() -> None:
    check_foreign_ids(bench(Cell("dim128", ("plain", "nvfp4"), "nhd")))


def test_index() -> None:
    check_index("cpu")


def test_updates_of_tables() -> None:
    check_updates("cpu")


def test_one_launch_for_all_groups_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fused("cpu", monkeypatch)
    check_apart("cpu", monkeypatch)
