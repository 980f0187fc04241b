"""The command line in this process, and folders of foreign YAML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvfactory.cli import main


@dataclass(frozen=True)
class Done:
    """What a command left behind: its exit code, its output, and the files in its folder."""

    code: int
    out: str
    err: str
    files: tuple[str, ...]


Run = Callable[..., Done]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in an empty folder."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> Done:
        capsys.readouterr()
        code = main(arguments)
        caught = capsys.readouterr()
        files = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*")))
        return Done(code, caught.out, caught.err, files)

    return run


@pytest.fixture
def acme(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Write a folder of foreign YAML: relative path -> text."""

    def write(files: dict[str, str]) -> Path:
        root = tmp_path / "acme"
        for name, text in files.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return root

    return write
