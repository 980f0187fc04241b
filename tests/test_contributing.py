"""CONTRIBUTING.md, executed: its blocks become an installed package that adds to three axes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import install_wheel

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.S)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment's site folder with two wheels: ours, and the page's package."""
    source = tmp_path_factory.mktemp("acme")
    for name, text in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    site = tmp_path_factory.mktemp("site")
    for project in (ROOT, source):
        install_wheel(project, site)
    return site


def _run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "kvfactory", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=site, check=False
    )


def test_third_party_plugins_plan(installed: Path) -> None:
    done = _run(
        installed,
        "model=qwen3",
        "kv=acme_sign",
        "backend.name=acme_mean",
        "action=plan",
        "output=json",
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    (group,) = plan["groups"]
    assert group["choice"]["backend"] == "acme_mean"
    assert [plane["key"] for t in group["tensors"] for plane in t["planes"]] == [
        "k", "k.scale", "v", "v.scale",
    ]  # fmt: skip
    assert {"owner": "acme_mean", "what": "workspace scratch", "num_bytes": 4096} in plan["rows"]


def test_third_party_plugins_run(installed: Path) -> None:
    small = ["model.num_layers=2", "model.groups.full.layers=0-1", "workload.tokens=64"]
    done = _run(installed, "model=qwen3_0_6b", "kv=acme_sign", "backend.name=acme_mean", *small)
    assert done.returncode == 0, done.stdout + done.stderr


def test_third_party_plugins_are_swept(installed: Path, tmp_path: Path) -> None:
    """Also beside a folder of the user's own, which every job must get as well."""
    mine = tmp_path / "mine"
    (mine / "kv").mkdir(parents=True)
    (mine / "kv" / "mine.yaml").write_text("page_tokens: 8\n", encoding="utf-8")
    words = ("-m", "action=plan", "device=cpu", f"hydra.sweep.dir={tmp_path}/runs")
    done = _run(installed, *words, "kv=acme_sign,mine", "--config-dir", str(mine))
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/*/status.json"))) == 2


def test_third_party_plugins_are_listed_with_their_origin(installed: Path) -> None:
    done = _run(installed, "action=list", "output=json")
    assert done.returncode == 0, done.stderr
    entries = {entry["use"]: entry for entry in json.loads(done.stdout)}
    for use in ("kv=acme_sign", "kv.quant.ROLE=acme_sign", "backend.name=acme_mean"):
        assert entries[use]["origin"] == "acme-kv"
        assert entries[use]["what"]
    assert "acme_sign" in _run(installed, "--help").stdout


def test_no_plugin_takes_more_than_25_lines() -> None:
    """The layout, format and backend blocks stay short enough to be copied; a layout is a line."""
    blocks = [
        text
        for name, text in BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text())
        if name.endswith("__init__.py")
    ]
    lines = [sum(bool(line.strip()) for line in text.splitlines()) for text in blocks]
    assert len(lines) == 3
    assert lines[0] <= 2, "an import and the layout"
    assert max(lines) <= 25
