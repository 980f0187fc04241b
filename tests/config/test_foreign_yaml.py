"""YAML of third parties: found, never in front of ours, read as data and nothing else."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvfactory.composer import compose
from kvfactory.errors import SpecError

Cli = Callable[..., Any]
Acme = Callable[[dict[str, str]], Path]

TINY = """
name: tiny
num_layers: 2
groups:
  full: {kind: full, layers: "0-1", q_heads: 2, kv_heads: 1, head_dim: 8}
"""


def _distribution(tmp_path: Path, name: str, value: str) -> None:
    info = tmp_path / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvfactory.conf]\n{name} = {value}\n")


def test_an_installed_package_brings_choices(
    acme: Acme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    acme({"conf/model/acme_tiny.yaml": TINY, "conf/kv/fp8_hnd.yaml": "page_tokens: 3\n"})
    (tmp_path / "acme" / "__init__.py").write_text("raise SystemExit('imported')\n")
    _distribution(tmp_path, "acme-kv", "acme:conf")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert compose("model=acme_tiny", "device=cpu").model.name == "tiny"
    assert compose("kv=fp8_hnd", "device=cpu").kv.page_tokens == 16  # ours stays in front
    listed = cli("action=list").out
    line = next(line for line in listed.splitlines() if line.startswith("model=acme_tiny"))
    assert line.endswith("acme-kv")
    assert "acme" not in sys.modules


def test_a_folder_on_the_command_line(acme: Acme, cli: Cli) -> None:
    root = acme({"model/tiny.yaml": TINY})
    for arguments in (
        [f"hydra.searchpath=[{root}]"],
        [f"hydra.searchpath=[file://{root}]"],
        ["--config-dir", str(root)],
        ["-m", f"hydra.searchpath=[{root}]"],
    ):
        done = cli("action=plan", "model=tiny", "device=cpu", *arguments)
        assert (done.code, done.err) == (0, "")
        assert "tiny on cpu" in done.out


def test_a_package_below_another_is_not_imported_either(
    acme: Acme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acme({"sub/conf/model/acme_tiny.yaml": TINY})
    (tmp_path / "acme" / "__init__.py").write_text("raise SystemExit('imported')\n")
    _distribution(tmp_path, "acme-kv", "acme.sub:conf")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert compose("model=acme_tiny", "device=cpu").model.name == "tiny"
    assert "acme" not in sys.modules


@pytest.mark.parametrize("value", ["acme", "acme:", ":conf", "a b"])
def test_an_entry_point_that_names_no_folder(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _distribution(tmp_path, "acme-kv", value)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SpecError, match=r"acme-kv, need PACKAGE:FOLDER"):
        compose("device=cpu")


def test_folders_and_files_that_are_not_there(
    acme: Acme, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = acme({"kv/a.yaml": "page_tokens: 16"})
    odd = root / "kv" / "odd.yaml"
    for make in (lambda: odd.symlink_to(root / "nothing"), lambda: os.mkfifo(odd)):
        make()
        with pytest.raises(SpecError, match=r"odd\.yaml: got something that is no file"):
            compose(f"hydra.searchpath=[{root}]", "device=cpu")
        odd.unlink()
    with pytest.raises(SpecError, match=r"hydra\.searchpath: got '~nouser/x'"):
        compose("hydra.searchpath=[~nouser/x]", "device=cpu")
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    (tmp_path / "away").rmdir()
    with pytest.raises(SpecError, match="working directory: got one that was removed"):
        compose("hydra.searchpath=[x]", "device=cpu")


def test_a_package_whose_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _distribution(tmp_path, "ghost-kv", "ghost:conf")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SpecError, match="ghost-kv"):
        compose("device=cpu")


def test_two_files_of_one_name(acme: Acme, tmp_path: Path) -> None:
    first = acme({"kv/acme.yaml": "page_tokens: 8\n"})
    second = tmp_path / "other"
    (second / "kv").mkdir(parents=True)
    (second / "kv" / "acme.yaml").write_text("page_tokens: 9\n")
    with pytest.raises(SpecError, match="kv/acme: got two files") as refusal:
        compose("kv=acme", "device=cpu", f"hydra.searchpath=[{first},{second}]")
    assert refusal.value.problems[0].fix == f"renaming {second / 'kv' / 'acme.yaml'}"
    again = f"hydra.searchpath=[{first},file://{first}/]"
    assert compose("kv=acme", "device=cpu", again).kv.page_tokens == 8


BOMB = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{below}, *{below}, *{below}]\n"
    for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)

UNSAFE = {
    "alias": ("page_tokens: &x 16\nalign_bytes: *x\n", "the reference 'x' at line 1"),
    "bomb": (BOMB, "the reference"),
    "merge": ("base: &b {page_tokens: 8}\nkv: {<<: *b}\n", "the reference 'b'"),
    "target": ("quant:\n  k: {_target_: os.system}\n", "the key '_target_' at line 2"),
    "quoted target": ('quant: {"_target_": os.system}\n', "the key '_target_'"),
    "explicit target": ("? _target_\n: os.system\n", "the key '_target_'"),
    "tag": ("page_tokens: !!python/name:os.system ''\n", "the tag"),
    "off": ("align_bytes: off\n", "'off' without quotes"),
    "Yes": ("align_bytes: Yes\n", "'Yes' without quotes"),
    "octal": ("page_tokens: 010\n", "'010' without quotes"),
    "minutes": ("page_tokens: 1:30\n", "'1:30' without quotes"),
    "null key": ("kv: {null: 1}\n", "a key without a name at line 1"),
    "empty key": ("?\n: 1\n", "a key without a name at line 2"),
    "broken": ("page_tokens: [16\nx: '", "while scanning"),
    "binary": ("a: \x00\n", "special characters"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_files_never_reach_a_loader(name: str, acme: Acme) -> None:
    text, said = UNSAFE[name]
    root = acme({"kv/acme.yaml": text})
    start = time.perf_counter()
    with pytest.raises(SpecError) as caught:
        compose(f"hydra.searchpath=[{root}]", "device=cpu")
    assert time.perf_counter() - start < 1
    (problem,) = caught.value.problems
    assert problem.path.endswith("kv/acme.yaml")
    assert said in problem.got


LATE = {  # text of an experiment -> path and word of the refusal
    "kv: {quant: nvfp4}": ("kv.quant", "'nvfp4' in a file"),
    "kv: {layout: hnd}": ("kv.layout", "'hnd' in a file"),
    "kv: {groups: {full: {quant: plain}}}": ("kv.groups.full.quant", "'plain' in a file"),
    "kv: {recipes: {a: {layers: 0-1, quant: plain}}}": ("kv.recipes.a.quant", "'plain' in a file"),
    "kv: {page_tokens: 16.0}": ("kv.page_tokens", "16.0"),
    "kv: {page_token: 16}": ("kv.page_token", "an unknown key"),
    "surprise: 1": ("surprise", "an unknown key"),
    "kv: {page_tokens: 1, page_tokens: 2}": ("config", "duplicate"),
    "kv: [": ("config", "parsing"),
    "defaults: [override /kv: nope]": ("kv/nope", "no such file"),
    "model: {name: 2024-01-01}": ("", ""),
}


@pytest.mark.parametrize("text", LATE)
def test_experiments_that_cannot_be(text: str, acme: Acme) -> None:
    path, word = LATE[text]
    root = acme({"experiment/acme.yaml": f"# @package _global_\n{text}\n"})
    arguments = (f"hydra.searchpath=[{root}]", "experiment=acme", "device=cpu")
    if not path:
        assert compose(*arguments).model.name == "2024-01-01"
        return
    with pytest.raises(SpecError) as caught:
        compose(*arguments)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert word in problem.got
    if word.endswith("in a file"):  # an override cannot hide what the file says
        with pytest.raises(SpecError, match="in a file"):
            compose(*arguments, f"{path}.k=plain")


def test_another_primary_folder(acme: Acme) -> None:
    primary = "defaults: [_self_, {model: tiny}]\ndevice: {type: cpu}\n"
    root = acme({"config.yaml": primary, "model/tiny.yaml": TINY})
    assert compose(conf=root).model.name == "tiny"
    assert compose("workload.tokens=5", conf=root).workload.tokens == 5


def test_huggingface_configs_take_overrides_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    group = {"kind": "full", "layers": "0-1", "q_heads": 4, "kv_heads": 2, "head_dim": 8}
    module = types.ModuleType("kvfactory.huggingface")
    vars(module)["model_from_config"] = lambda path: {
        "name": path,
        "num_layers": 2,
        "groups": {"full": group},
    }
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = compose("model=hf", "model.path=x.json", "model.groups.full.kv_heads=4", "device=cpu")
    assert spec.model.name == "x.json"
    assert vars(spec.model.groups["full"])["kv_heads"] == 4
    with pytest.raises(SpecError, match=r"model\.path: got an unknown key"):
        compose("model=qwen3", "model.path=x.json", "device=cpu")


def test_a_folder_without_end_is_no_folder_of_choices(
    acme: Callable[[dict[str, str]], Path], cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfactory.config.confdirs._MOST_FILES", 3)
    root = acme({f"kv/{name}.yaml": "page_tokens: 16" for name in "abc"})
    assert cli("action=list", f"hydra.searchpath=[{root}]").code == 0
    (root / "kv" / "d.yaml").write_text("page_tokens: 16")
    done = cli("action=list", f"hydra.searchpath=[{root}]")
    assert done.code == 2
    assert f"hydra.searchpath: got {root} with more than 3" in done.err


def test_a_linked_folder_is_read_like_any_other(
    acme: Callable[[dict[str, str]], Path], cli: Any
) -> None:
    root = acme({"kv/a.yaml": "page_tokens: 16", "away/b.yaml": "x: !!python/name:os.system"})
    (root / "kv" / "link").symlink_to(root / "away")
    done = cli("action=plan", f"hydra.searchpath=[{root}]", "device=cpu")
    assert done.code == 2
    assert "kv/link/b.yaml: got the tag" in done.err
