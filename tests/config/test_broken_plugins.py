"""Third-party plugins that cannot be used: told by name, and in nobody's way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfactory.backends import BACKENDS
from kvfactory.builder import build
from kvfactory.composer import compose
from kvfactory.errors import BuildError, SpecError
from kvfactory.layouts import LAYOUTS
from kvfactory.memory import MEMORIES
from kvfactory.planner import plan
from kvfactory.quant import SCHEMES
from kvfactory.registry import Registry

Install = Callable[[str], None]
REGISTRIES: dict[str, Registry[Any]] = {
    "layouts": LAYOUTS,
    "quants": SCHEMES,
    "backends": BACKENDS,
    "memories": MEMORIES,
}
OBJECTS = """
class Empty:
    pass

class Memory:
    name, stores, device_types = "acme_bad", True, frozenset({"cpu"})
    def allocate(self, num_bytes, device):
        raise ValueError("no bytes today")

NONE, NUMBER, KLASS, EMPTY, MEMORY = None, 5, Memory, Empty(), Memory()
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution whose plugin ``acme_bad`` of every axis has the given value."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(value: str) -> None:
        (tmp_path / "acme_objects.py").write_text(OBJECTS)
        (tmp_path / "acme_exits.py").write_text("import sys; sys.exit(7)")
        info = tmp_path / "acme_kv-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kv\nVersion: 1.0\n")
        groups = "".join(f"[kvfactory.{axis}]\nacme_bad = {value}\n" for axis in REGISTRIES)
        (info / "entry_points.txt").write_text(groups)
        _forget()

    yield write
    monkeypatch.undo()
    sys.modules.pop("acme_objects", None)
    _forget()


def _forget() -> None:
    for registry in REGISTRIES.values():
        vars(registry).pop("_foreign", None)
        for kept in ("_loaded", "_failed"):
            vars(registry)[kept].pop("acme_bad", None)


BROKEN = {
    "acme_nowhere:X": "which fails to load: ModuleNotFoundError",
    "acme_exits:X": "which fails to load: SystemExit: 7",
    "acme_objects:NONE": "which is None",
    "acme_objects:NUMBER": "which is 5",
    "acme_objects:KLASS": "which is <class",
    "acme_objects:EMPTY": "which is <acme_objects.Empty",
}


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("axis", REGISTRIES)
def test_a_plugin_that_is_none_is_told(axis: str, value: str, install: Install) -> None:
    install(value)
    for _ in range(2):
        with pytest.raises(SpecError) as caught:
            REGISTRIES[axis].get("acme_bad", "some.key")
        (problem,) = caught.value.problems
        assert problem.path == "some.key"
        assert BROKEN[value] in problem.got
        assert problem.fix == "mend or uninstall acme-kv"


@pytest.mark.parametrize("action", ["plan", "explain"])
def test_a_broken_plugin_is_in_nobodys_way(action: str, install: Install, cli: Any) -> None:
    install("acme_nowhere:X")
    done = cli(f"action={action}", "model=bamba_9b", "device=cpu")
    assert (done.code, done.err) == (0, "")
    assert "acme_bad" in done.out  # passed over, with the reason
    refused = cli("action=plan", "device=cpu", "kv.quant.k=state_int8")
    assert refused.code == 2
    assert refused.err.startswith("kv.quant.k: got state_int8 for role k, need one of ")
    refused = cli("action=plan", "device=cpu", "backend.options.nope=1")
    assert refused.err.startswith("backend.options.nope: got an unknown key")


def test_a_plugin_has_one_name(install: Install) -> None:
    install("acme_objects:MEMORY")
    assert MEMORIES.get("acme_bad", "memory.name").name == "acme_bad"
    vars(MEMORIES.get("acme_bad", "memory.name"))["name"] = "other"
    _forget()
    with pytest.raises(SpecError, match="calls itself 'other'"):
        MEMORIES.get("acme_bad", "memory.name")


def test_a_memory_that_fails_is_named(install: Install) -> None:
    install("acme_objects:MEMORY")
    spec = compose("model=qwen3", "device=cpu", "memory.name=acme_bad")
    with pytest.raises(BuildError, match=r"memory\.name.*acme_bad.*ValueError: no bytes today"):
        build(plan(spec))
