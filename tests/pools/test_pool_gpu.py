"""Pools on a GPU: pinned images, counts and ids that never leave the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool_cells import Cell
from torch import Tensor

from kvfactory.errors import BooksError, SpecError
from kvfactory.pools import Pool, copies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LAYOUTS = ("nhd", "hnd", "page_major", "record", "vectorized")
FORMATS = (("k", "nvfp4"), ("v", "fp8_e4m3_token_head"))


def make(layout: str, device: str = "cuda") -> Pool:
    laid = Cell("dim128", FORMATS, layout, 64).plan()
    return Pool(laid.groups[0], torch.zeros(laid.bytes, dtype=torch.uint8, device=device))


def rows(*lead: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(*lead, 2, 128, generator=generator) for name in ("k", "v")}


def same_but_for_the_sink(gpu: Pool, cpu: Pool) -> None:
    slots = torch.arange(gpu.group.page_slots, gpu.num_slots)
    there, here = gpu.gather(slots.cuda()), cpu.gather(slots)
    for key, x in here.items():
        assert torch.equal(as_bytes(there[key].cpu()), as_bytes(x)), key


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def on_gpu(value: Any) -> Any:
    return value.cuda() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bytes_as_on_a_host(layout: str) -> None:
    gpu, cpu = make(layout), make(layout, "cpu")
    slots = torch.tensor([[70, 64, -1], [130, -1, -1]])
    counts = torch.tensor([2, 1], dtype=torch.int32)
    mask = torch.tensor([[True, False, False], [True, False, False]])
    for pool, there in ((cpu, lambda x: x), (gpu, on_gpu)):
        given = {name: there(x) for name, x in rows(2, 3).items()}
        pool.write(0, there(slots), counts=there(counts), **given)
        pool.write(1, there(slots), mask=there(mask), **given)
        pool.move(there(torch.tensor([65, 70])), there(torch.tensor([70, 64])))
        pool.move_pages([3, 1], [1, 3])
        pool.zero(there(torch.tensor([2])))
    same_but_for_the_sink(gpu, cpu)


def test_foreign_ids_on_the_device_touch_nothing() -> None:
    gpu = make("nhd")
    before = gpu.gather(torch.arange(64, gpu.num_slots).cuda())
    far = torch.tensor([-5, 2**40, gpu.num_slots]).cuda()
    gpu.write(0, far, **{name: x.cuda() for name, x in rows(3).items()})
    gpu.move(far, far)
    gpu.zero(far)
    assert gpu.read(0, far)["k"].shape == (3, 2, 128)
    after = gpu.gather(torch.arange(64, gpu.num_slots).cuda())
    assert all(torch.equal(as_bytes(before[key]), as_bytes(after[key])) for key in before)
    with pytest.raises(BooksError):
        gpu.zero([gpu.num_pages])
    with pytest.raises(SpecError, match="device"):
        gpu.write(0, torch.tensor([64]).cuda(), **rows(1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_are_pinned_and_exact(layout: str) -> None:
    gpu, other = make(layout), make("page_major")
    slots = torch.arange(64, gpu.num_slots).cuda()
    given = {name: x.cuda() for name, x in rows(len(slots)).items()}
    for layer in (0, 1):
        gpu.write(layer, slots, **given)
    image = gpu.offload([3, 1], chunk_bytes=1)
    assert image.data.is_pinned()
    other.load(image, [1, 2], chunk_bytes=1)
    there, here = other.gather(torch.arange(64, 192).cuda()), gpu.gather(slots)
    for key, x in there.items():
        wanted = torch.cat([here[key][:, 128:], here[key][:, :64]], 1)
        assert torch.equal(as_bytes(x), as_bytes(wanted)), key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transfer_between_arenas(layout: str) -> None:
    gpu, other = make(layout), make(layout)
    slots = torch.arange(64, 128).cuda()
    gpu.write(1, slots, **{name: x.cuda() for name, x in rows(64).items()})
    assert not gpu.manifest().mismatches(other.manifest())
    for a, b, size in copies(gpu.transfer_regions([1]), other.transfer_regions([3])):
        other.bound.arena[b : b + size] = gpu.bound.arena[a : a + size]
    there, here = other.gather(slots + 128), gpu.gather(slots)
    assert all(torch.equal(as_bytes(there[key]), as_bytes(here[key])) for key in here)
