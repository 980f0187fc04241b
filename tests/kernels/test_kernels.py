"""Every kernel stores the bytes of the torch operations: interpreted here, compiled on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from index_steps import check_index, check_large_index
from kernel_cells import (
    GEOMETRIES,
    INDEXES,
    STATES,
    Bench,
    Cell,
    check_bytes,
    check_foreign_ids,
    check_moves,
    check_read,
    check_strided_rows,
    check_write,
)

from kvfactory.errors import KVFactoryError
from kvfactory.layouts import LAYOUTS
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
def test_foreign_ids() -> None:
    check_foreign_ids(gpu_bench(Cell("dim128", ("plain", "nvfp4"), "nhd")))


@pytest.mark.gpu
@NO_GPU
def test_index() -> None:
    check_index("cuda")
    check_large_index("cuda")
