"""The plan's bytes are what build allocates: nothing overlaps, nothing is left over."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kvfactory.builder import build
from kvfactory.errors import KVFactoryError
from kvfactory.memory import MEMORIES
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import CachePlan
from kvfactory.spec import Spec

CONF = Path(__file__).parents[2] / "conf"
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem != "hf")
PRESETS = sorted(path.stem for path in (CONF / "kv").glob("*.yaml"))
PAGES = (1, 16, 64, 128)
SMALL = {"requests": 3, "tokens": 200}


def read(group: str, name: str) -> dict[str, Any]:
    """A YAML file behind the files that it builds on, without Hydra."""
    data = yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for base in data.pop("defaults", ["_self_"]):
        found = merged(found, data if base == "_self_" else read(group, base))
    return found


def merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """``b`` over ``a``; a plugin with options replaces the one it stands over."""
    both = {
        key: merged(a[key], b[key])
        for key in a.keys() & b.keys()
        if isinstance(a[key], dict) and isinstance(b[key], dict) and "name" not in b[key]
    }
    return {**a, **b, **both}


def small(model: str, kv: dict[str, Any], memory: str = "meta") -> Spec:
    """A spec of few short requests."""
    whole = {"model": read("model", model), "kv": kv, "workload": SMALL}
    return Spec.parse({**whole, "memory": {"name": memory}})


def _pieces(laid: CachePlan) -> Iterator[tuple[int, int, str]]:
    """Offset, bytes and name of everything that lies in the arena."""
    for group in (*laid.groups, *laid.annexes):
        yield group.offset, group.num_bytes, group.name
        for tensor in group.tensors:
            for table in tensor.constants:
                size = 4 * len(group.layers) * math.prod(table.shape)
                yield table.offset, size, f"{group.name}.{tensor.name}.{table.name}"
    for pages in laid.tables:
        size = 4 * (laid.limits.max_requests + 1) * pages.row_pages
        yield pages.offset, size, f"table {pages.name}"
    for number in range(laid.limits.steps_in_flight + 1):
        for field in laid.fields:
            size = {"int32": 4, "int64": 8}[field.dtype] * field.elements
            yield field.offset + number * laid.step_bytes, size, f"step {field.name}"
    for space in laid.workspaces:
        yield space.offset, space.num_bytes, space.use


def check(laid: CachePlan) -> None:
    """Build it on memory without bytes: the arena, its parts and every view agree."""
    asked: list[int] = []
    memory = MEMORIES.get(laid.memory, "memory")

    class Counting:
        name, device_types, stores = memory.name, memory.device_types, memory.stores

        def allocate(self, num_bytes: int, device: str) -> torch.Tensor:
            asked.append(num_bytes)
            return memory.allocate(num_bytes, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvfactory.builder.MEMORIES", _Only(Counting()))
        cache = build(laid)
    assert asked == [laid.bytes]
    end = 0
    for offset, size, name in sorted(_pieces(laid)):
        assert offset >= end, f"{name} begins inside of another"
        end = offset + size
    assert laid.bytes - 256 * max(1, laid.spec.kv.align_bytes) < end <= laid.bytes
    assert sum(row.num_bytes for row in laid.rows) == laid.bytes
    for group in laid.groups:
        pool, _ = cache.pool(group.layers[0], group.group)
        for key, view in pool.bound.planes.items():
            assert view.shape[:2] == (len(group.layers), pool.num_pages), key


class _Only:
    """A registry of one memory."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def get(self, name: str, path: str) -> Any:
        return self._memory


@pytest.mark.parametrize("model", MODELS)
def test_every_model(model: str) -> None:
    """Each with a preset and a page size, in turn, where they fit."""
    number = MODELS.index(model)
    preset = read("kv", PRESETS[number % len(PRESETS)])
    for kv in ({**preset, "page_tokens": PAGES[number % len(PAGES)]}, preset, {}):
        try:
            laid = plan(small(model, kv))
        except KVFactoryError:
            assert kv, "a model with the default preset"
            continue
        check(laid)
        break


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset(preset: str, page: int) -> None:
    kv = {**read("kv", preset), "page_tokens": page}
    for model in ("gemma3n_e4b", "kimi_linear", "lfm2_1_2b"):
        try:
            laid = plan(small(model, kv))
        except KVFactoryError:
            continue
        check(laid)


def test_drafts_tracking_rings_and_checkpoints() -> None:
    data = read("model", "qwen3_next")
    draft = {"num_layers": 1, "groups": {"full": {**data["groups"]["full"], "layers": "0"}}}
    for engine in (
        {"draft_tokens": 3},
        {"draft_tokens": 3, "draft_tree": True},
        {"draft_tokens": 3, "state_replay": "verify_ring", "state_tracking": "two"},
        {"state_replay": "decode_ring", "steps_in_flight": 3},
    ):
        spec = Spec.parse(
            {
                "model": {**data, "draft": draft},
                "memory": {"name": "meta", "checkpoints": 5},
                "engine": engine,
                "workload": {"requests": 2, "tokens": 100},
            }
        )
        check(plan(spec))


def test_a_cache_on_the_cpu_is_as_large_as_planned() -> None:
    laid = plan(small("falcon_h1_0_5b", read("kv", "int8_hnd"), "cpu"))
    cache = build(laid)
    views = [
        view
        for group in laid.groups
        for view in cache.pool(group.layers[0], group.group)[0].bound.planes.values()
    ]
    assert {view.untyped_storage().nbytes() for view in views} == {laid.bytes}
