"""Wheels for tests: built without network and installed apart from the checkout."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def install_wheel(project: Path, site: Path) -> Path:
    """Build the wheel of ``project`` and unpack it, metadata included, into ``site``."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out]
        subprocess.run([*command, str(project)], check=True, capture_output=True)
        (wheel,) = Path(out).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return site
