"""The wheel: built without network, unpacked apart from the checkout, run from an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import install_wheel

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel."""
    return install_wheel(ROOT, tmp_path_factory.mktemp("site"))


def _python(site: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_wheel_plans_from_an_empty_folder(site: Path, tmp_path: Path) -> None:
    done = _python(site, tmp_path, "-m", "kvfactory", "kv=fp8_hnd", "action=plan", "output=json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_wheel_is_what_ran(site: Path, tmp_path: Path) -> None:
    done = _python(site, tmp_path, "-c", "import kvfactory; print(kvfactory.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(site)


def test_wheel_carries_data_and_nothing_foreign(site: Path) -> None:
    assert (site / "kvfactory" / "py.typed").exists()
    assert (site / "kvfactory" / "layouts" / "catalog.yaml").exists()
    shipped = {
        path.relative_to(site / "kvfactory" / "conf") for path in site.rglob("conf/**/*.yaml")
    }
    assert shipped == {path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("*.yaml")}
    tops = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"kvfactory"}
