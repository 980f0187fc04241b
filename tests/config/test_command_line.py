"""Exit codes, what is left behind, Hydra's flags, sweeps: in one process where possible."""

from __future__ import annotations

import errno
import io
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvfactory.cli import main
from kvfactory.errors import (
    BooksError,
    BuildError,
    CapabilityError,
    KVFactoryError,
    OutOfMemory,
    OutOfPages,
    PlanError,
    Problem,
    SpecError,
)
from kvfactory.spec import Spec

Cli = Callable[..., Any]


@pytest.fixture
def action(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Spec, str], int]], None]:
    """Put a function in the place of ``action=explain``."""

    def install(run: Callable[[Spec, str], int]) -> None:
        module = types.ModuleType("kvfactory.actions.explain")
        vars(module)["run"] = run
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


def _raise(error: BaseException) -> Callable[[Spec, str], int]:
    def run(spec: Spec, output: str) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (SpecError, 2),
        (PlanError, 2),
        (CapabilityError, 2),
        (BuildError, 2),
        (OutOfMemory, 3),
        (OutOfPages, 1),
        (BooksError, 1),
    ],
)
def test_exit_code_of_each_error(
    cli: Cli, action: Any, kind: type[KVFactoryError], code: int
) -> None:
    action(_raise(kind(Problem("a.b", "1", "2", "a.b=2"), Problem("c", "x\ny", "z"))))
    done = cli("action=explain", "device=cpu")
    assert done.code == code
    assert done.err == "a.b: got 1, need 2; try a.b=2\nc: got x y, need z\n"


def test_an_action_returns_the_exit_code(cli: Cli, action: Any) -> None:
    action(lambda spec, output: 1)
    assert cli("action=explain", "device=cpu").code == 1
    action(lambda spec, output: 0)
    assert cli("action=explain", "device=cpu").code == 0


def test_an_unexpected_error_is_not_hidden(cli: Cli, action: Any) -> None:
    action(_raise(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        cli("action=explain", "device=cpu")


def test_an_interrupt_is_no_traceback(cli: Cli, action: Any) -> None:
    action(_raise(KeyboardInterrupt()))
    for flags in ((), ("-m",)):
        done = cli(*flags, "action=explain", "device=cpu")
        assert (done.code, done.err) == (130, "interrupted\n")


def test_output_without_room_is_told_in_words(cli: Cli, action: Any) -> None:
    """As ``> /dev/full``; an error about any other file is not taken for one about the output."""
    action(_raise(OSError(errno.ENOSPC, "No space left on device", "other")))
    with pytest.raises(OSError, match="other"):
        cli("action=explain", "device=cpu")
    command = f"{sys.executable} -m kvfactory action=list > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "stdout: got No space left on device, need room for the output\n"


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    script = "mkdir gone && cd gone && rmdir ../gone && " + " ".join(
        (sys.executable, "-c", "'import sys; sys.path.insert(0, sys.argv.pop(1));")
    )
    script += "from kvfactory.cli import main; sys.exit(main())' " + str(Path.cwd())
    done = subprocess.run(
        ["bash", "-c", f"{script} action=plan device=cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("working directory: got one that was removed, need a folder")


def test_plan_as_table_and_as_json(cli: Cli) -> None:
    done = cli("action=plan", "model=gemma3_27b", "kv=fp8_hnd", "device=h200")
    assert (done.code, done.err, done.files) == (0, "", ())
    assert "Gemma-3-27B on h200" in done.out
    done = cli("action=plan", "output=json", "device=h200")
    assert json.loads(done.out)["bytes"] > 0
    assert (done.err, done.files) == ("", ())


def test_a_trace_that_is_not_read_is_told(cli: Cli) -> None:
    done = cli("action=plan", "device=cpu", "workload.trace=/nope.csv")
    assert (done.code, done.err) == (
        0, "note: workload.trace is unused: action=replay reads it\n",
    )  # fmt: skip


def test_list_names_choices_and_plugins(cli: Cli) -> None:
    done = cli("action=list", "output=json")
    entries = {entry["use"]: entry for entry in json.loads(done.out)}
    for use in ("model=qwen3_8b", "kv=fp8_hnd", "device=h200", "kv.layout.tokens=nhd"):
        assert entries[use]["origin"] == "built-in"
    for use in ("kv.layout.state=slot_major", "kv.quant.k=nvfp4", "kv.quant.state=state_int8"):
        assert "plugin: " in entries[use]["what"]
    for use, entry in entries.items():
        assert re.fullmatch(r"[a-z_.]+=\w+", use)
        assert entry["what"]
    assert cli("action=list").out.splitlines()[0].split() == ["use", "what", "origin"]


# ---- flags ---------------------------------------------------------------------------------


def test_help_lists_every_group(cli: Cli) -> None:
    done = cli("--help")
    assert done.code == 0
    for word in ("fp8_hnd", "qwen3_8b", "h200", "prefill_chunk_tokens", "-m experiment=grid"):
        assert word in done.out
    assert done.files == ()


def test_help_lists_choices_of_a_folder_and_words_of_keys(cli: Cli, acme: Any) -> None:
    root = acme({"kv/acme_small.yaml": "page_tokens: 8\n"})
    done = cli("--help", "kv=acme_small", "--config-dir", str(root))
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    (kv,) = (line for line in lines if line.startswith("kv: "))
    assert {"acme_small", "fp8_hnd"} <= set(kv.removeprefix("kv: ").split(", "))
    assert "  page_tokens: 8" in lines
    assert "engine.state_tracking: none, one, two, lazy" in lines
    assert "backend.accuracy: exact, fast" in lines
    assert "$" not in done.out.replace("${", "")


def test_cfg_shows_the_composed_configuration(cli: Cli) -> None:
    done = cli("--cfg", "job", "-p", "kv", "kv=fp8_hnd", "kv.recipes.edge.layers=0-3")
    assert done.code == 0
    assert "tokens: hnd" in done.out
    assert "edge:" in done.out


def test_version(cli: Cli) -> None:
    assert cli("--version").out.startswith("kvfactory ")


def test_version_beside_other_words(cli: Cli) -> None:
    assert cli("--version", "action=plan").out.startswith("kvfactory ")


def test_a_pickled_job_is_not_run(cli: Cli) -> None:
    done = cli("--experimental-rerun", "job.pickle")
    assert done.code == 2
    assert done.err.startswith("--experimental-rerun: got a pickled job")


def test_a_package_that_is_not_there(cli: Cli) -> None:
    done = cli("--cfg", "job", "--package", "nope")
    assert (done.code, done.err) == (2, "package 'nope' not found in config\n")


def test_unknown_flag(cli: Cli) -> None:
    with pytest.raises(SystemExit) as stop:
        cli("--plan")
    assert stop.value.code == 2


# ---- sweeps --------------------------------------------------------------------------------


def _statuses(files: tuple[str, ...]) -> dict[int, dict[str, Any]]:
    found = [json.loads(Path(name).read_text()) for name in files if name.endswith("status.json")]
    return {status["job"]: status for status in found}


def test_a_sweep_goes_on_after_a_bad_job(cli: Cli) -> None:
    done = cli("-m", "action=plan", "kv.page_tokens=16,abc,64", "device=cpu")
    assert done.code == 1
    assert "Traceback" not in done.err
    assert "job 1: kv.page_tokens: got 'abc'" in done.err
    found = _statuses(done.files)
    assert {job: status["exit"] for job, status in found.items()} == {0: 0, 1: 2, 2: 0}
    assert found[1]["problems"][0]["path"] == "kv.page_tokens"
    assert found[2]["overrides"] == ["action=plan", "++kv.page_tokens=64", "device=cpu"]
    assert done.out.count("requests of") == 2
    assert done.out.startswith("# job 0: action=plan kv.page_tokens=16 device=cpu\n")


def test_a_sweep_goes_on_after_a_fault_of_ours(cli: Cli, action: Any) -> None:
    def run(spec: Spec, output: str) -> int:
        if spec.kv.page_tokens == 16:
            raise ValueError("ours")
        return 0

    action(run)
    done = cli("-m", "action=explain", "kv.page_tokens=16,32", "device=cpu")
    assert done.code == 1
    found = _statuses(done.files)
    assert [found[0]["exit"], found[1]["exit"]] == [1, 0]
    assert "ValueError: ours" in found[0]["traceback"]


def test_a_sweep_over_nothing(cli: Cli) -> None:
    done = cli("-m", "action=list", "model=glob(nope*)")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("-m: got no job, need values to sweep over")


def test_a_sweep_without_a_folder_to_write_to(cli: Cli) -> None:
    done = cli("-m", "action=list", "kv=fp8_hnd,bf16_hnd", "hydra.sweep.dir=/proc/nope")
    assert done.code == 2
    assert "hydra.sweep.dir: got /proc/nope: " in done.err
    assert "Traceback" not in done.err


def test_a_sweep_from_an_experiment(cli: Cli) -> None:
    done = cli("-m", "experiment=grid", "device=cpu")
    assert done.code == 0
    assert [status["exit"] for status in _statuses(done.files).values()] == [0] * 4
    assert done.err == ""
    table = done.out.splitlines()[-5:]
    assert table[0].split() == ["job", "requests", "tokens", "bytes", "backends", "overrides"]
    assert table[1].split()[:3] == ["0", "8", "128"]
    assert table[1].split()[4:] == ["torch", "kv=bf16_nhd", "kv.page_tokens=16"]
    plan = _statuses(done.files)[0]["plan"]
    assert (plan["admitted"], plan["backends"]) == (8, {"full": "torch"})


def test_a_sweep_tells_which_backend_serves_each_group(cli: Cli) -> None:
    """More requests by the slow oracle are no better than fewer by kernels: both must be seen."""
    local = "kv.groups.local.quant.k=plain,fp8_e4m3"
    done = cli("-m", "action=plan", "model=gpt_oss_120b", "kv=fp8_hnd", "device=h200", local)
    first, second = done.out.splitlines()[-2:]
    assert "full by flashinfer, local by torch" in first
    assert second.split()[4:] == ["flashinfer", "kv.groups.local.quant.k=fp8_e4m3"]


def test_a_sweep_of_runs_compares_what_they_found(cli: Cli) -> None:
    small = ("model.num_layers=1", "model.groups.full.layers=0-0", "workload.tokens=24")
    done = cli("-m", "model=qwen3_0_6b", "device=cpu", "kv=bf16_nhd,fp8_nhd", *small)
    assert done.code == 0, done.err
    head, *rows = (line.split() for line in done.out.splitlines()[-3:])
    assert head[4:] == ["backends", "error", "verdict", "overrides"]
    assert [row[6:] for row in rows] == [["passed", "kv=bf16_nhd"], ["passed", "kv=fp8_nhd"]]
    assert float(rows[0][5]) < float(rows[1][5])
    assert _statuses(done.files)[1]["found"] == {"error": rows[1][5], "verdict": "passed"}


def test_sweeping_a_plugin_and_a_null(cli: Cli) -> None:
    done = cli("-m", "action=list", "memory=null,cpu", "kv.quant.k={name: int4_g32},plain")
    assert done.code == 0
    assert len(_statuses(done.files)) == 4


# ---- as a process --------------------------------------------------------------------------


def _process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvfactory", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


def test_processes_exit_and_leave_nothing(tmp_path: Path) -> None:
    assert _process("action=plan", "device=h200", cwd=tmp_path).returncode == 0
    bad = _process("kv=fp8_hdn", cwd=tmp_path)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.startswith("kv: got 'fp8_hdn'")
    info = _process("--info", "searchpath", cwd=tmp_path)
    assert "main" in info.stdout
    assert list(tmp_path.iterdir()) == []


def test_planning_in_a_process_imports_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from kvfactory.cli import main;"
        "code = main(['action=plan', 'device=auto', 'kv.page_tokens=64']);"
        "heavy = {'torch', 'triton', 'flashinfer', 'transformers'} & set(sys.modules);"
        "sys.exit(code or len(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m kvfactory action=list | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_that_lacks_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["action=plan", "device=cpu", 'model.name="é"']) == 0
    terminal.seek(0)
    assert terminal.read().startswith("\\xe9 on cpu")


SETTINGS = {
    "hydra.sweeper.params={kv.page_tokens: 16}": "hydra.sweeper.params: got ",
    "+hydra.sweeper.params.a=5": "hydra.sweeper.params.a: got ",
    "hydra.sweeper.max_batch_size=0": "hydra.sweeper.max_batch_size: got 0, need null, or 1",
    "hydra.verbose=5": "hydra.verbose: got 5, need true, false",
    "hydra.job.env_copy=[NOPE]": "hydra.job.env_copy: got [NOPE]: no variable 'NOPE'",
    "hydra.launcher=5": "hydra.launcher: got 5, need a choice",
    "hydra.sweeper=5": "hydra.sweeper: got 5, need a choice",
    "experiment=null,careful_ends": "experiment: got null,careful_ends, need ",
}


@pytest.mark.parametrize("override", SETTINGS)
def test_settings_of_hydras_that_cannot_be(override: str, cli: Cli) -> None:
    done = cli("-m", override, "action=plan", "device=cpu")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(SETTINGS[override])


def test_completion_is_asked_for_by_a_shell(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMP_LINE", raising=False)
    done = cli("--shell-completion", "query=bash")
    assert done.code == 2
    assert "--shell-completion: got no variable 'COMP_LINE'" in done.err


@pytest.mark.parametrize("override", ["experiment=null", "~kv"])
@pytest.mark.parametrize("flags", [(), ("-m",)])
def test_what_is_left_out_is_left_out_in_sweeps_too(
    override: str, flags: tuple[str, ...], cli: Cli
) -> None:
    done = cli(*flags, override, "action=plan", "device=cpu")
    assert (done.code, done.err) == (0, "")
