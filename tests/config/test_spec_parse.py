"""Specs from dicts of code: what is no plain data, and numbers that mean nothing."""

from __future__ import annotations

import math
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from kvfactory.errors import PlanError, SpecError
from kvfactory.planner import plan
from kvfactory.spec import Spec

FULL = {"kind": "full", "layers": "0-3", "q_heads": 8, "kv_heads": 2, "head_dim": 64}
GDN = {"kind": "linear", "layers": "0-3", "recurrence": "gdn"}


def model(group: dict[str, Any] = FULL, **keys: Any) -> dict[str, Any]:
    """A model of four layers in one group."""
    return {"name": "m", "num_layers": 4, "groups": {"g": group}, **keys}


def _loop() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["kv"] = found
    return found


def _deep() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(100_000):
        found = {"kv": found}
    return found


def refusal(data: Any) -> list[tuple[str, str, str]]:
    """Path, got and need of each problem."""
    with pytest.raises((SpecError, PlanError)) as raised:
        plan(Spec.parse(data))
    return [(problem.path, problem.got, problem.need) for problem in raised.value.problems]


@pytest.mark.parametrize(
    ("data", "path", "got"),
    [
        ({"model": {1, 2}}, "model", "a value of type set"),
        ({"model": b"x"}, "model", "a value of type bytes"),
        ({"model": model(num_layers=np.int64(4))}, "model.num_layers", "type int64"),
        ({"model": model(), "kv": {"constants": Path("c")}}, "kv.constants", "type PosixPath"),
        ({"model": model(FULL | {"layers": range(4)})}, "model.groups.g.layers", "type range"),
        ({"model": model(), 1: 2}, "spec", "the key 1 of type int"),
        ({"model": model(), (1, 2): 2}, "spec", "the key (1, 2) of type tuple"),
        ({"model": model(name="\ud800")}, "model.name", "'\\ud800', which is no UTF-8"),
        ({"model": model(num_layers=10**5000)}, "model.num_layers", "too many digits"),
        (_loop(), ".".join(["kv"] * 32), "more than 32 deep"),
        (_deep(), ".".join(["kv"] * 32), "more than 32 deep"),
        (Spec.parse({"model": model()}), "spec", "a value of type Spec"),
        (None, "spec", "null"),
        ([], "spec", "[]"),
    ],
)
def test_what_is_no_plain_data_is_refused_by_path(data: Any, path: str, got: str) -> None:
    ((where, found, _),) = refusal(data)
    assert where == path
    assert got in found


def test_all_of_it_at_once() -> None:
    data = {"model": model(num_layers=np.int64(4)), "kv": {"constants": Path("c")}}
    assert [path for path, _, _ in refusal(data)] == ["model.num_layers", "kv.constants"]


def test_mappings_and_tuples_are_plain() -> None:
    group = MappingProxyType(FULL | {"layers": (0, 1, 2, 3)})
    given = Spec.parse(MappingProxyType({"model": MappingProxyType(model(group))}))  # type: ignore[arg-type]
    assert given == Spec.parse({"model": model(FULL | {"layers": [0, 1, 2, 3]})})


@pytest.mark.parametrize(
    ("data", "path", "need"),
    [
        ({"model": model(FULL | {"scale": math.inf})}, "model.groups.g.scale", "a finite number"),
        ({"model": model(FULL | {"soft_cap": math.inf})}, "model.groups.g.soft_cap", "finite"),
        ({"model": model(), "workload": {"step_ms": math.inf}}, "workload.step_ms", "finite"),
        ({"model": model(), "workload": {"step_ms": 1e300}}, "workload.step_ms", "less than"),
        ({"model": model(), "memory": {"budget": "9" * 500 + "GiB"}}, "memory.budget", "'64GiB'"),
        ({"model": model(), "memory": {"budget": "\u0663GiB"}}, "memory.budget", "'64GiB'"),
        ({"model": model(groups={})}, "model.groups", "at least 1 item"),
        ({"model": model(GDN | {"conv": [[1, 2, 3]]})}, "model.groups.g.conv.0", "at most 2 items"),
        ({"model": model(), "device": {"name": "a b"}}, "device.name", "a name that matches"),
        ({"model": model(FULL | {"layers": [True]})}, "model.groups.g.layers.0", "a valid integer"),
        ({"model": model(FULL | {"layers": 3})}, "model.groups.g.layers", "a valid array"),
        ({"model": model(FULL | {"layers": "0:4:00"})}, "model.groups.g.layers", "a slice"),
        ({"model": model(FULL | {"layers": "0-" + "9" * 5000})}, "model.groups.g.layers", "slice"),
        (
            {"model": model(), "kv": {"layout": {"k": "nhd", "tokens": "hnd"}}},
            "kv.layout",
            "k, v and scale, or tokens with a layout each, not both",
        ),
    ],
)
def test_odd_values_are_refused_in_words(data: Any, path: str, need: str) -> None:
    ((where, _, wanted),) = refusal(data)
    assert where == path
    assert need in wanted


@pytest.mark.parametrize(
    ("recurrence", "axes"),
    [
        ("gdn", {"head": 2, "key": 4}),
        ("gdn", {"page": 2, "key": 4, "value": 4}),
        ("gdn", {"head": 2, "key": 4, "value": 4, "layer": 5}),
        ("mamba2", {}),
        ("mamba1", {"head": 2, "key": 4, "value": 4}),
        ("lightning", {"channel": 2, "state": 4}),
    ],
)
def test_states_have_the_axes_of_their_recurrence(recurrence: str, axes: dict[str, int]) -> None:
    """An axis called ``page`` would be taken for the layout's own."""
    group = GDN | {"recurrence": recurrence, "recurrent": axes}
    ((path, _, need),) = refusal({"model": model(group)})
    assert path == "model.groups.g"
    assert need.endswith(f"of recurrence {recurrence}")
