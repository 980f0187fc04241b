"""Stores, copies and the index beside FlashInfer and torch, in one run.

Run ``python -m benchmarks.move`` on a GPU; ``--json FILE`` keeps the numbers, ``--only store`` (or
quant, copies, index, host) runs a part. Times are microseconds of a call in a CUDA graph over
rotating buffers; ``copy`` is torch's copy of as many bytes, read + written; "of copy" is its time
over ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.move_scene import Entries, Scene, copies, entries, rows
from benchmarks.timing import Call, Timed, host_us, need_gpu, race
from kvfactory.quant import SCHEMES

STORE_LAYOUTS = ("nhd", "hnd", "paged_kv", "page_major", "token_major", "record")
STORE_TOKENS = (64, 1024, 4096, 16384, 65536)
QUANT_TOKENS = (64, 16384, 65536)
POOL_TOKENS = 2**17
COPY_BYTES = 2**28
Results = dict[str, Any]


def rotations(num_bytes: int) -> int:
    """Buffers to rotate over: beyond the cache for what exceeds it, and at least four."""
    return max(4, min(32, 2**30 // num_bytes))


class StoreInputs:
    """Rows and slots of ``tokens`` tokens, one set per rotation, shared by all competitors."""

    def __init__(self, tokens: int, num_pages: int) -> None:
        many = rotations(tokens * 8192)
        self.rows = [rows(tokens) for _ in range(many)]
        self.entries = [entries(num_pages, tokens) for _ in range(many)]

    def calls(self, make: Callable[[int, Mapping[str, Tensor], Entries], Call]) -> list[Call]:
        return [make(i, r, e) for i, (r, e) in enumerate(zip(self.rows, self.entries, strict=True))]


def store(scene: Scene, inputs: StoreInputs) -> list[Call]:
    def call(i: int, r: Mapping[str, Tensor], e: Entries) -> Call:
        return partial(scene.ops.write, i % scene.layers, e.slots, r, None)

    return inputs.calls(call)


def torch_put(scene: Scene, inputs: StoreInputs) -> list[Call]:
    def call(i: int, r: Mapping[str, Tensor], e: Entries) -> Call:
        planes = [scene.views.planes[name][i % scene.layers].flatten(0, 1) for name in "kv"]
        return lambda: [p.index_put_((e.slots,), r[n]) for p, n in zip(planes, "kv", strict=True)]

    return inputs.calls(call)


def flashinfer_append(scene: Scene, inputs: StoreInputs, form: str) -> list[Call] | None:
    """FlashInfer's append into the same pool, or None where it is not installed."""
    try:
        from flashinfer.page import append_paged_kv_cache
    except ImportError:
        return None

    def call(i: int, r: Mapping[str, Tensor], e: Entries) -> Call:
        views = [scene.views.planes[name][i % scene.layers] for name in "kv"]
        pools = tuple(v.transpose(1, 2) if form == "HND" else v for v in views)
        lists = (e.indices, e.indptr, e.last_page)
        return partial(
            append_paged_kv_cache, r["k"], r["v"], e.batch_indices, e.positions, pools, *lists, form
        )

    return inputs.calls(call)


def copy_calls(num_bytes: int) -> list[Call]:
    """Copies of as many bytes, read + written, as torch makes them fastest."""
    return [partial(copy, *pair) for pair in copies(num_bytes, rotations(num_bytes))]


def copy(dst: Tensor, src: Tensor) -> None:
    """In pieces: one copy of 512 MiB was seen to take half as long again as two of 256 MiB."""
    for start in range(0, len(dst), COPY_BYTES):
        dst[start : start + COPY_BYTES].copy_(src[start : start + COPY_BYTES])


def run_store(tokens_list: Sequence[int] = STORE_TOKENS) -> Results:
    found: Results = {}
    scenes = {layout: Scene(layout, "plain", POOL_TOKENS) for layout in STORE_LAYOUTS}
    for tokens in tokens_list:
        inputs = StoreInputs(tokens, scenes["nhd"].views.num_pages)
        num_bytes = tokens * 2 * scenes["nhd"].token_bytes
        cases = {"copy": copy_calls(num_bytes)}
        for form in ("NHD", "HND"):
            calls = flashinfer_append(scenes[form.lower()], inputs, form)
            if calls:
                cases[f"flashinfer {form.lower()}"] = calls
        cases |= {layout: store(scene, inputs) for layout, scene in scenes.items()}
        cases["torch"] = torch_put(scenes["nhd"], inputs)
        times = race(cases)
        found[str(tokens)] = summary(times, num_bytes)
        best = min((t.us for n, t in times.items() if n.startswith("flashinfer")), default=None)
        worst = max(times[layout].us for layout in STORE_LAYOUTS)
        line = f"  worst layout: {times['copy'].us / worst:.3f} of copy"
        if best is not None:
            line += f", {worst / best:.3f} x FlashInfer's best"
        show(f"store K and V, bf16, {tokens} tokens", times, num_bytes)
        print(line)
    return found


def run_quant(
    layouts: Sequence[str] = ("nhd", "hnd"), tokens_list: Sequence[int] = QUANT_TOKENS
) -> Results:
    found: Results = {}
    names = [name for name in SCHEMES.names() if name not in ("plain", "state_int8")]
    for tokens in tokens_list:
        inputs = StoreInputs(tokens, Scene("nhd", "plain", POOL_TOKENS, 1).views.num_pages)
        for name in names:
            scenes = {layout: Scene(layout, name, POOL_TOKENS) for layout in layouts}
            num_bytes = tokens * (4096 + scenes[layouts[0]].token_bytes)
            cases = {"copy": copy_calls(num_bytes)}
            cases |= {layout: store(scene, inputs) for layout, scene in scenes.items()}
            times = race(cases, rounds=7)
            found[f"{name} {tokens}"] = summary(times, num_bytes)
            show(f"quantize and store, {name}, {tokens} tokens", times, num_bytes)
    return found


def run_copies() -> Results:
    found: Results = {}
    for layout, quant in (
        ("nhd", "plain"),
        ("hnd", "plain"),
        ("page_major", "plain"),
        ("record", "plain"),
        ("hnd", "int8_token_head"),
        ("page_major", "nvfp4"),
    ):
        scene = Scene(layout, quant, 2**16, layers=8)
        for pages in (64, 1024):
            cases = page_cases(scene, pages)
            num_bytes = 2 * pages * scene.views.image_bytes
            times = race({"copy": copy_calls(num_bytes)} | cases, rounds=7)
            found[f"{layout} {quant} {pages} pages"] = summary(times, num_bytes)
            kib = scene.views.image_bytes // 1024
            show(f"{pages} pages of {kib} KiB in 8 layers, {layout} {quant}", times, num_bytes)
    return found


def page_cases(scene: Scene, pages: int) -> dict[str, list[Call]]:
    """Move, gather, pack and unpack of ``pages`` pages, in four rotations."""
    sets = []
    for _ in range(4):
        ids = torch.randperm(scene.views.num_pages - 1)[: 2 * pages].cuda() + 1
        slots = (ids[:pages, None] * 16 + torch.arange(16, device="cuda")).flatten()
        image = torch.empty(pages, scene.views.image_bytes, dtype=torch.uint8, device="cuda")
        sets.append((ids[:pages].contiguous(), ids[pages:].contiguous(), slots, image))
    ops = scene.ops
    cases: dict[str, list[Call]] = {
        "move": [partial(ops.move_pages, dst, src, True) for dst, src, _, _ in sets],
        "gather": [partial(ops.gather, None, slots) for _, _, slots, _ in sets],
        "pack": [partial(ops.pack, src, image) for src, _, _, image in sets],
        "unpack": [partial(ops.unpack, dst, image) for dst, _, _, image in sets],
    }
    if pages <= 256:
        cases["move, overlap allowed"] = [
            partial(ops.move_pages, dst, src) for dst, src, _, _ in sets
        ]
    return cases


def run_index() -> Results:
    from benchmarks.index_scene import index_calls

    times = race({"build": index_calls()})
    show("index: 256 decodes at 4k, pages of 16, three tables", times, 0)
    return {"build": times["build"].us}


def run_host() -> Results:
    scene = Scene("nhd", "plain", POOL_TOKENS)
    given, e = rows(64), entries(scene.views.num_pages, 64)
    calls: dict[str, Call] = {"write": partial(scene.ops.write, 0, e.slots, given, None)}
    inputs = StoreInputs(64, scene.views.num_pages)
    append = flashinfer_append(scene, inputs, "NHD")
    if append:
        calls["flashinfer append"] = append[0]
    found = {name: host_us(call) for name, call in calls.items()}
    print("host microseconds a call: " + ", ".join(f"{n} {us:.1f}" for n, us in found.items()))
    return found


def summary(times: Mapping[str, Timed], num_bytes: int) -> Results:
    base = times["copy"].us
    return {
        name: {"us": t.us, "low": t.low, "high": t.high, "of_copy": base / t.us}
        | {"gb_per_s": num_bytes / t.us / 1e3}
        for name, t in times.items()
    }


def show(title: str, times: Mapping[str, Timed], num_bytes: int) -> None:
    base = times["copy"].us if "copy" in times else 0.0
    print(title)
    for name, t in times.items():
        rate = f"{num_bytes / t.us / 1e3:7.0f} GB/s" if num_bytes else ""
        share = f"{base / t.us:6.3f} of copy" if base else ""
        print(f"  {name:22s} {t.us:9.2f} us {rate} {share}")
    sys.stdout.flush()


PARTS: dict[str, Callable[[], Results]] = {
    "store": run_store,
    "quant": run_quant,
    "copies": run_copies,
    "index": run_index,
    "host": run_host,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    chosen = parser.parse_args()
    need_gpu()
    found = {"device": torch.cuda.get_device_name()}
    found |= {name: PARTS[name]() for name in chosen.only}
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
