"""Kernels that steps launch compile for a GPU that is not here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fused_writes import fused_plan
from index_steps import TABLES, index_plan

from kvfactory.kernels import ErrorWords, FusedWrites, kernel_ops
from kvfactory.kernels.index import IndexBuild
from kvfactory.kernels.launch import Kernel
from kvfactory.pools import Pool

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
