"""Kernels that steps launch compile for a GPU that is not here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fused_writes import fused_plan
from index_steps import TABLES, index_plan
from kernel_cells import Cell

from kvfactory.kernels import ErrorWords, FusedWrites, kernel_ops
from kvfactory.kernels.compiled import ALL, COUNTS, TOGETHER, GroupKernels
from kvfactory.kernels.index import IndexBuild
from kvfactory.kernels.launch import Kernel
from kvfactory.pools import Pool, group_views
from kvfactory.quant import SCHEMES

triton = pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel: Kernel) -> str:
    """The PTX for an H200."""
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    found = triton.compile(kernel.source(), target=target, options=kernel.options)
    text: str = found.asm["ptx"]
    return text


def test_index_and_updates() -> None:
    laid = index_plan(TABLES, 7, 200)
    build = IndexBuild(laid, torch.zeros(laid.bytes, dtype=torch.uint8))
    for kernel in build.kernels():
        assert kernel.function.__name__ in compiled(kernel)


def test_writes_of_several_groups() -> None:
    laid = fused_plan("DSA plain")
    arena = torch.zeros(laid.bytes, dtype=torch.uint8)
    make = kernel_ops(ErrorWords([laid.tables[0].name], arena.device))
    pools = {group.name: Pool(group, arena, make) for group in laid.groups}
    (kernel,) = FusedWrites(arena).kernels(laid, pools)
    assert "write_groups" in compiled(kernel)


TOKEN_FORMATS = [name for name in SCHEMES.names() if name != "state_int8"]
PAIRS = [tuple((TOKEN_FORMATS * 2)[i : i + 2]) for i in range(0, len(TOKEN_FORMATS), 2)]


def group_kernels(cell: Cell) -> GroupKernels:
    laid = cell.plan()
    views = group_views(laid.groups[-1], torch.zeros(laid.bytes, dtype=torch.uint8))
    codecs = {t.name: views.codecs[t.name].device(t.logical) for t in views.group.tensors}
    return GroupKernels(views, {name: codec for name, codec in codecs.items() if codec})


@pytest.mark.parametrize("quant", PAIRS, ids=" ".join)
def test_writes_and_reads_of_every_format(quant: tuple[str, str]) -> None:
    made = group_kernels(Cell("dim128", quant, "nhd"))
    rows = (torch.bfloat16, torch.bfloat16)
    assert "st.global" in compiled(made.write(rows, ALL, torch.int64, True))
    assert "st.global" in compiled(made.read(made.names, torch.bfloat16))


@pytest.mark.parametrize("quant", ["nvfp4", "mxfp4", "int4_g32"])
def test_threads_own_whole_groups(quant: str) -> None:
    """Four-bit formats exchange no elements through shared memory."""
    made = group_kernels(Cell("dim128", quant, "nhd"))
    rows = (torch.bfloat16, torch.bfloat16)
    assert "st.shared" not in compiled(made.write(rows, ALL, torch.int64, True))


def test_state_rows() -> None:
    made = group_kernels(Cell("gdn", "state_int8", "slot_major"))
    own = (torch.bfloat16, torch.float32)[: len(made.names)]
    assert "st.global" in compiled(made.write(own, COUNTS, torch.int32, False))


def test_copies() -> None:
    made = group_kernels(Cell("dim128", ("plain", "int8_token_head"), "hnd"))
    kernels = [
        made.move(made.slots, ALL),
        made.together(made.pages, ALL, TOGETHER[0]),
        made.zero(ALL),
        made.dense(made.image, ALL, torch.int64, False, True),
        made.dense(made.image_into, ALL, torch.int64, True, True),
        made.dense(made.every_layer, ALL, torch.int64, False, False),
    ]
    for kernel in kernels:
        assert "st.global" in compiled(kernel)
