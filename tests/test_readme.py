"""The README, executed: every command and every example under a ``<!-- run -->`` mark."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"<!-- run -->\n```sh\n(.*?)```", TEXT, re.S)
    for line in block.splitlines()
]
EXAMPLES = re.findall(r"<!-- run -->\n```python\n(.*?)```", TEXT, re.S)


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command)
    assert program == "python"
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
@pytest.mark.parametrize("name", ["attention", "move"])
def test_a_benchmark_without_a_gpu_says_so_in_one_line(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "device: got no CUDA device here, need one to measure on\n"


def test_two_setup_commands_begin_from_nothing() -> None:
    setup = re.findall(r"<!-- command: (\w+) -->\n```sh\n(.*?)\n```", TEXT, re.S)
    assert [name for name, _ in setup] == ["run", "test"]
    for _, command in setup:
        assert "\n" not in command
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install")


def test_layouts_in_the_readme_are_the_catalog() -> None:
    from kvfactory.layouts import LAYOUTS

    shipped = [name for name in LAYOUTS.names() if LAYOUTS.origin(name) == "built-in"]
    layouts = [LAYOUTS.get(name, "layout") for name in shipped]
    catalog = {each.name: {family: each.text(family) for family in FAMILIES} for each in layouts}
    section = TEXT.split("## Layouts")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*`) \|$", section, re.M)
    assert {name: _patterns(text) for name, text in rows} == catalog


FAMILIES = ("k", "v", "scale")


def _patterns(text: str) -> dict[str, str]:
    """Patterns by family: each stands behind its families, alone it is the pattern of all."""
    found = {}
    for families, pattern in re.findall(r"([\w, ]*)`([^`]+)`", text):
        found |= dict.fromkeys(re.findall(r"\w+", families) or FAMILIES, pattern)
    return found
