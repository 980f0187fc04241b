"""Layer sets, the meaning of ``device: auto``, and reports."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import pytest

from kvfactory.composer import compose
from kvfactory.config import devices
from kvfactory.errors import SpecError
from kvfactory.planner import plan
from kvfactory.report.tables import columns, plan_text, size
from kvfactory.spec.layers import parse_layers


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("0-3", (0, 1, 2, 3)),
        ("2-2", (2,)),
        ("1::2", (1, 3, 5)),
        ("0:4:3", (0, 3)),
        ("-2:", (4, 5)),
        (":", (0, 1, 2, 3, 4, 5)),
        ("not 1::2", (0, 2, 4)),
        ("not 0-4", (5,)),
        ([3, 0], (0, 3)),
        ([0, -1], (0, 5)),
        ((5,), (5,)),
    ],
)
def test_layer_sets(layers: Any, expected: tuple[int, ...]) -> None:
    assert parse_layers(layers, 6) == expected


@pytest.mark.parametrize(
    ("layers", "word"),
    [
        ("6-7", "layer 6"),
        ("0-99999999999", "layer 99999999999"),
        ("not 0-9", "layer 9"),
        ("3-1", "ascends"),
        ("::0", "slice"),
        ("", "slice"),
        ("all", "slice"),
        ("0,1", "slice"),
        ("not not 0-1", "slice"),
        ("4:2", "at least one"),
        ("not 0-5", "at least one"),
        ([], "at least one"),
        ([6], "layer 6"),
        ([-7], "layer -7"),
        ([1, 1], "layer 1 twice"),
        ([0, -6], "layer 0 twice"),
    ],
)
def test_layer_sets_that_cannot_be(layers: Any, word: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_layers(layers, 6, "a.layers")
    assert str(caught.value).startswith("a.layers: got ")
    assert word in str(caught.value)


def test_sets_of_many_layers_take_no_longer_than_their_length() -> None:
    start = time.perf_counter()
    assert len(parse_layers("not 5::6", 1_000_000)) == 833_334
    with pytest.raises(SpecError, match="layer 299999 twice"):
        parse_layers([*range(300_000), 299_999], 300_000)
    assert time.perf_counter() - start < 5


def test_auto_takes_what_was_found_and_keeps_what_was_given() -> None:
    found = {"name": "x", "type": "cuda", "sm": 90, "num_sms": 132, "memory_bytes": 8}
    assert devices.resolve({"name": "auto", "type": "auto"}, found) == found
    given = devices.resolve({"name": "auto", "type": "auto", "num_sms": 1}, found)
    assert given == {**found, "num_sms": 1}
    assert devices.resolve({"type": "auto"}, None)["type"] == "cpu"


def test_without_a_driver_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert devices.ask_driver() is None


@pytest.mark.parametrize("failure", ["hangs", "fails"])
def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    def run(command: list[str], **options: Any) -> None:
        assert options["timeout"] <= 10
        if failure == "hangs":
            raise subprocess.TimeoutExpired(command, 1)
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    monkeypatch.setattr(subprocess, "run", run)
    assert devices.ask_driver() is None


def test_a_driver_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 0, b'["NVIDIA H200", 90, 132, 150000000000]\n')
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: answer)
    found = devices.ask_driver()
    assert found == {
        "name": "NVIDIA-H200",
        "type": "cuda",
        "sm": 90,
        "num_sms": 132,
        "memory_bytes": 150_000_000_000,
        "granule_bytes": 2**21,
    }
    monkeypatch.undo()
    spec = compose(
        "device.type=cuda", *(f"device.{k}={v}" for k, v in found.items() if k != "type")
    )
    assert spec.device.sm == 90


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**50, "1024.00 TiB"),
    ],
)
def test_sizes_in_words(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_columns() -> None:
    assert columns(("a", "count"), [("x", "1"), ("long", "22")]) == (
        "a     count\nx         1\nlong     22"
    )
    assert columns(("a",), []) == ""


@pytest.mark.parametrize("model", ["gemma3_27b", "deepseek_v32", "qwen3_next", "whisper_large_v3"])
def test_a_report_accounts_for_every_byte(model: str) -> None:
    laid = plan(compose(f"model={model}", "kv=dsa", "device=h200", "memory.budget=80GiB"))
    text = plan_text(laid)
    assert f"{laid.bytes:,} B" in text
    for group in laid.groups:
        assert f"\n{group.name} " in text
    total = next(line for line in text.splitlines() if line.startswith("total"))
    assert total.split()[-1] == f"{laid.bytes:,}"
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    assert all(note in text for note in laid.notes)
