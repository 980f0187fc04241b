"""Neither YAML of others nor an override names code that a sweep of Hydra's would run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvfactory.composer import compose
from kvfactory.config import foreign
from kvfactory.errors import SpecError

Cli = Callable[..., Any]
Acme = Callable[[dict[str, str]], Path]

GLOBAL = "# @package _global_\n"
HANDLER = (
    "{version: 1, root: {handlers: [h]}, handlers: {h: {class: logging.FileHandler, filename: F}}}"
)
TARGET = "{_target_: logging.FileHandler, filename: F}"
DECODED = "${oc.decode:'{_target_: logging.FileHandler, filename: F}'}"

FILES = {  # file, its text, what is refused
    "logging": ("experiment/x", f"{GLOBAL}hydra: {{job_logging: {HANDLER}}}", "hydra.job_logging"),
    "quoted": ("experiment/x", f'{GLOBAL}"\\x68ydra": {{hydra_logging: {HANDLER}}}', "hydra_log"),
    "environment": ("experiment/x", f"{GLOBAL}hydra: {{job: {{env_set: {{A: b}}}}}}", "hydra.job"),
    "launcher": ("experiment/x", f"{GLOBAL}hydra: {{launcher: {{a: b}}}}", "hydra.launcher"),
    "whole": ("experiment/x", f"{GLOBAL}hydra: x", "hydra"),
    "swept callback": (
        "experiment/x",
        f'{GLOBAL}hydra: {{sweeper: {{params: {{"+hydra.callbacks.a": "{TARGET}"}}}}}}',
        "hydra.sweeper.params.+hydra.callbacks.a",
    ),
    "swept reference": (
        "experiment/x",
        f'{GLOBAL}hydra: {{sweeper: {{params: {{kv: "{DECODED}"}}}}}}',
        "hydra.sweeper.params.kv",
    ),
    "package": ("experiment/x", f"# @package hydra.job_logging\n{HANDLER}", "the package hydra"),
    "late package": (
        "experiment/x",
        f"\n#  @package   hydra\njob_logging: {HANDLER}",
        "the package",
    ),
    "named package": (
        "experiment/hydra",
        f"# @package _name_\njob_logging: {HANDLER}",
        "named hydra",
    ),
    "choice": ("hydra/job_logging/x", HANDLER, "named hydra"),
    "default": ("experiment/x", f"{GLOBAL}defaults: [override /hydra/launcher: a]", "in defaults"),
    "moved": ("experiment/x", f"{GLOBAL}defaults: [/kv@hydra.job_logging: a]", "in defaults"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_others_set_nothing_that_hydra_runs(name: str, acme: Acme, cli: Cli) -> None:
    path, text, said = FILES[name]
    root = acme({f"{path}.yaml": text})
    done = cli("-m", f"hydra.searchpath=[{root}]", "action=plan", "device=cpu")
    assert done.code == 2
    assert f"{path}.yaml: got" in done.err
    assert said in done.err
    assert done.files == ()


def test_files_of_others_say_what_to_sweep_over(acme: Acme, cli: Cli) -> None:
    params = "hydra: {sweeper: {params: {kv: 'fp8_hnd,bf16_hnd', kv.page_tokens: 16}}}"
    root = acme({"experiment/x.yaml": f"{GLOBAL}{params}\naction: plan\n"})
    done = cli("-m", "--config-dir", str(root), "experiment=x", "device=cpu")
    assert (done.code, done.err) == (0, "")
    assert "# job 1: " in done.out


OVERRIDES = (
    f"+hydra.callbacks.a={TARGET}",
    f"+hydra.callbacks.a={DECODED}",
    '+hydra.callbacks.a="${action}"',
    "+hydra.callbacks.a={x: 1},{x: 2}",
    "hydra.job_logging={version: 1, handlers: {h: {class: logging.FileHandler, filename: F}}}",
    "+hydra.hydra_logging.handlers.h.class=logging.FileHandler",
    f"+hydra.launcher.a={TARGET}",
    "+hydra.launcher.a=${oc.decode:'{a: b}'}",
    "hydra.sweeper.params={'+hydra.callbacks.a': {x: 1}}",
    "+hydra.sweeper.params.kv=${oc.decode:'{a: b}'}",
    "+kv@hydra.job_logging=fp8_hnd,bf16_hnd",
)


@pytest.mark.parametrize("override", OVERRIDES)
def test_overrides_name_no_code(override: str, cli: Cli) -> None:
    done = cli("-m", override, "action=plan", "device=cpu")
    assert done.code == 2
    assert done.err.startswith("hydra.") or "hydra" in done.err
    assert "F" not in done.files


def test_a_file_that_slips_through_is_caught_in_the_composition(
    acme: Acme, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "_about_hydra", lambda text: "")
    root = acme({"experiment/x.yaml": f"{GLOBAL}hydra: {{job_logging: {HANDLER}}}"})
    for chosen in ("experiment=x", "experiment=careful_ends,x"):
        done = cli("-m", "--config-dir", str(root), chosen, "action=plan", "device=cpu")
        assert done.code == 2
        assert "hydra.job_logging: got values of another origin" in done.err
        assert not any(file.endswith("F") for file in done.files)


def test_hydras_own_choices_stay(cli: Cli) -> None:
    done = cli("-m", "hydra/job_logging=disabled", "hydra.sweep.dir=S", "action=plan", "device=cpu")
    assert (done.code, done.err) == (0, "")
    assert "S/0/status.json" in done.files


def test_nested_keys_with_an_underscore_are_refused_on_sight() -> None:
    with pytest.raises(SpecError, match="a config runs no code"):
        compose("device=cpu", f"+hydra.callbacks.a={TARGET}")
