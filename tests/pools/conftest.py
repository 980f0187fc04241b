"""Third-party plugins for the product tests, and the account of its cells at the end of a run."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfactory.layouts import LAYOUTS
from kvfactory.quant import SCHEMES

TOYS = Path(__file__).parent / "toy_plugins"
ENTRY_POINTS = """
[kvfactory.layouts]
toy_inside_out = toy_kv:LAYOUT
[kvfactory.quants]
toy_sixteenths = toy_kv:QUANT
"""


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install a distribution with a layout and a number format, as pip would, for the session."""
    site = tmp_path_factory.mktemp("site")
    info = site / "toy_kv-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-kv\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    added = [str(site), str(TOYS)]
    sys.path[:0] = added
    _forget()
    yield
    for path in added:
        sys.path.remove(path)
    sys.modules.pop("toy_kv", None)
    _forget()


def _forget() -> None:
    """Registries read entry points once; let them look again."""
    for registry in (LAYOUTS, SCHEMES):
        vars(registry).pop("_foreign", None)
        vars(registry)["_loaded"].pop("toy_inside_out", None)
        vars(registry)["_loaded"].pop("toy_sixteenths", None)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many cells of the product passed, and why the plan refused others; all with -v."""
    accepted = 0
    cells: dict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "pool_cells" and report.when == "call":
                accepted += value[0]
                for cell, got, need in value[1]:
                    cells[need].append(f"{cell}: got {got}")
    refused = sum(map(len, cells.values()))
    if not accepted + refused:
        return
    terminalreporter.section("pools: layouts x number formats")
    terminalreporter.line(f"{accepted} cells accepted, {refused} refused by the plan, which needs")
    every = terminalreporter.config.get_verbosity() > 0
    for need, found in sorted(cells.items(), key=lambda item: -len(item[1])):
        terminalreporter.line(f"{len(found):5d}  {need}")
        for cell in found if every else found[:1]:
            terminalreporter.line(f"       {'' if every else 'such as '}{cell}")
