"""The command line: overrides in, one action run, an exit code out.

Exit codes: 0 done, 1 something unexpected or a verification that failed, 2 bad input, 3 out of
memory at build. Problems go to stderr, a line each.

A plain run composes on its own, without a Hydra application; flags such as ``-m``, ``--help``,
``--cfg`` and ``--info`` are Hydra's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfactory.composer import Composed, Request, hydra_errors, load, read, version_base
from kvfactory.devices import ask_driver, ask_torch
from kvfactory.errors import BuildError, KVFactoryError, PlanError, Problem, SpecError, did_you_mean

if TYPE_CHECKING:
    from omegaconf import DictConfig

OK, FAILED, BAD_INPUT, OUT_OF_MEMORY = 0, 1, 2, 3

ACTIONS = {
    "run": "build, decode and verify",
    "plan": "every byte, before anything is allocated",
    "list": "models, presets and plugins, with their origin",
    "explain": "why each backend, layout and format was taken or refused",
    "replay": "a trace of requests against the plan",
}
OUTPUTS = ("table", "json")
_FULL_ERRORS = "HYDRA_FULL_ERROR"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv`` defaults to the process's arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(arguments)
    except KVFactoryError as error:
        _print_problems(error)
        return exit_code(error)
    except BrokenPipeError:  # the reader of our output went away, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def exit_code(error: KVFactoryError) -> int:
    """The exit code that an error ends the process with."""
    if isinstance(error, BuildError):
        return OUT_OF_MEMORY
    return BAD_INPUT if isinstance(error, SpecError | PlanError) else FAILED


def perform(overrides: Sequence[str]) -> int:
    """Compose and run the action that the overrides ask for.

    Raises:
        KVFactoryError: bad input, or what the action met.
    """
    composed = load(overrides, lambda action: ask_torch() if action == "run" else ask_driver())
    _check(composed)
    module = importlib.import_module(f"kvfactory.actions.{composed.action}")
    result = module.run(composed.spec, composed.output)
    assert isinstance(result, int)
    return result


def _check(composed: Composed) -> None:
    problems = []
    for key, got, known in (
        ("action", composed.action, tuple(ACTIONS)),
        ("output", composed.output, OUTPUTS),
    ):
        if got not in known:
            close = did_you_mean(got, known)
            fix = f"{key}={close}" if close else ""
            problems.append(Problem(key, repr(got), f"one of {', '.join(known)}", fix))
    if problems:
        raise SpecError(*problems)


def _print_problems(error: KVFactoryError, prefix: str = "") -> None:
    for problem in error.problems:
        print(prefix + " ".join(str(problem).split()), file=sys.stderr)


# ---- Hydra's own flags ---------------------------------------------------------------------


def _command(arguments: list[str]) -> int:
    if not any(text.startswith(("-", "hydra.mode=")) for text in arguments):
        return perform(arguments)
    if arguments == ["--version"]:
        print(f"kvfactory {version('kvfactory')}")
        return OK
    args = _flags(arguments)
    overrides = list(args.overrides)
    if args.config_dir:
        overrides.append(f"hydra.searchpath=[{args.config_dir}]")
    if args.config_name or args.config_path:
        got = "another primary config"
        raise SpecError(Problem("--config-name", got, "the shipped one", "--config-dir DIR"))
    if not _needs_hydra(args, overrides):
        return perform(overrides)
    flags = [text for text in arguments if text not in args.overrides]
    return _hydra(flags, read(overrides))


def _flags(arguments: list[str]) -> argparse.Namespace:
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.prog = "kvfactory"
    return parser.parse_intermixed_args(arguments)


def _needs_hydra(args: argparse.Namespace, overrides: Sequence[str]) -> bool:
    asked = (args.multirun, args.help, args.hydra_help, args.cfg, args.info)
    rarely = (args.shell_completion, args.resolve, args.package, args.experimental_rerun)
    return any((*asked, *rarely)) or "hydra.mode=MULTIRUN" in overrides


def _hydra(flags: list[str], request: Request) -> int:
    """Hand over to Hydra; a sweep ends with 1 if a job failed, with 2 if it could not start."""
    import hydra

    primary = str(request.dirs[0].path)
    application = hydra.main(config_path=primary, config_name="config", **version_base())(_job)
    try:
        with _as_process([*flags, *request.for_hydra()]), hydra_errors(request):
            application()
    except _JobFailedError:
        return FAILED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else OK
    return OK


class _JobFailedError(Exception):
    """Tells Hydra's launcher that a job failed; its problems are printed already."""


def _job(config: DictConfig) -> None:
    """One job of a sweep: the others go on whatever happens, ``status.json`` says what did.

    ``config`` is composed again from the job's overrides, as every configuration is.
    """
    from hydra.core.hydra_config import HydraConfig

    runtime = HydraConfig.get()
    overrides = [*runtime.overrides.task]
    searchpath = [text for text in runtime.overrides.hydra if text.startswith("hydra.searchpath=")]
    status: dict[str, Any] = {"job": runtime.job.num, "overrides": overrides, "problems": []}
    try:
        code = perform([*_without_prefix(overrides), *searchpath])
    except KVFactoryError as error:
        code = exit_code(error)
        status["problems"] = [vars(problem) for problem in error.problems]
        _print_problems(error, f"job {runtime.job.num}: ")
    except Exception:  # a fault of ours must not end the sweep either
        code = FAILED
        status["traceback"] = traceback.format_exc()
        traceback.print_exc()
    path = Path(runtime.runtime.output_dir) / "status.json"
    path.write_text(json.dumps({**status, "exit": code}, indent=2) + "\n", encoding="utf-8")
    if code:
        raise _JobFailedError(code)


def _without_prefix(overrides: Sequence[str]) -> list[str]:
    """Overrides as the user wrote them: ``++`` is put before them again."""
    return [text.removeprefix("++") for text in overrides]


@contextmanager
def _as_process(arguments: list[str]) -> Iterator[None]:
    """Hydra reads its arguments from ``sys.argv`` and, asked so, lets errors reach us whole."""
    argv, full = sys.argv, os.environ.get(_FULL_ERRORS)
    sys.argv = [argv[0] if argv else "kvfactory", *arguments]
    os.environ[_FULL_ERRORS] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if full is None:
            del os.environ[_FULL_ERRORS]
        else:
            os.environ[_FULL_ERRORS] = full
