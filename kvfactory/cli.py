"""The command line: overrides in, one action run, an exit code out.

Exit codes: 0 done, 1 something unexpected or a verification that failed, 2 bad input, which
includes a plan for what is not here, 3 out of memory at build, 130 interrupted. Problems go to
stderr, a line each.

A plain run composes on its own, without a Hydra application; flags such as ``-m``, ``--help``,
``--cfg`` and ``--info`` are Hydra's.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfactory.actions import Outcome
from kvfactory.composer import Composed, Request, hydra_errors, load, read, version_base
from kvfactory.config.devices import ask_driver, ask_torch
from kvfactory.config.overrides import ACTIONS
from kvfactory.errors import (
    BuildError,
    KVFactoryError,
    OutOfMemory,
    PlanError,
    Problem,
    SpecError,
    did_you_mean,
)
from kvfactory.planner import plan

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra
    from omegaconf import DictConfig

    from kvfactory.report.sweeps import Job

OK, FAILED, BAD_INPUT, OUT_OF_MEMORY, INTERRUPTED = 0, 1, 2, 3, 130
_OUTPUT_LOST = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)

OUTPUTS = ("table", "json")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv`` defaults to the process's arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it
    try:
        code = _command(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KVFactoryError as error:
        _print_problems(error)
        return exit_code(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_LOST:
            raise
        return _without_output(error)


def _without_output(error: OSError) -> int:
    """The reader of our output went away, as in ``... | head``, or there is no room for it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return OK
    print(f"stdout: got {error.strerror}, need room for the output", file=sys.stderr)
    return FAILED


def exit_code(error: KVFactoryError) -> int:
    """The exit code that an error ends the process with."""
    if isinstance(error, OutOfMemory):
        return OUT_OF_MEMORY
    return BAD_INPUT if isinstance(error, SpecError | PlanError | BuildError) else FAILED


def perform(overrides: Sequence[str]) -> int:
    """Compose and run the action that the overrides ask for.

    Raises:
        KVFactoryError: bad input, or what the action met.
    """
    return _act(_composed(overrides)).code


def _composed(overrides: Sequence[str]) -> Composed:
    composed = load(overrides, lambda action: ask_torch() if action == "run" else ask_driver())
    _check(composed)
    return composed


def _act(composed: Composed, title: str = "") -> Outcome:
    """Run the action, under a title if it prints a table; most return an exit code alone."""
    if title and composed.output == "table":
        print(title)
    if composed.spec.workload.trace is not None and composed.action != "replay":
        print("note: workload.trace is unused: action=replay reads it", file=sys.stderr)
    module = importlib.import_module(f"kvfactory.actions.{composed.action}")
    result = module.run(composed.spec, composed.output)
    return result if isinstance(result, Outcome) else Outcome(int(result))


def _check(composed: Composed) -> None:
    problems = []
    for key, got, known in (
        ("action", composed.action, ACTIONS),
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
    if "--version" in arguments:
        print(f"kvfactory {version('kvfactory')}")
        return OK
    if not any(text.startswith("-") for text in arguments):
        return perform(arguments)
    parser = _parser()
    args = parser.parse_intermixed_args(arguments)
    overrides = [] if args.shell_completion else list(args.overrides)
    if args.config_dir:
        overrides.append(f"hydra.searchpath=[{args.config_dir}]")
    if args.config_name or args.config_path:
        got = "another primary config"
        raise SpecError(Problem("--config-name", got, "the shipped one", "--config-dir DIR"))
    if args.experimental_rerun:
        got = "a pickled job, which could be any code"
        raise SpecError(Problem("--experimental-rerun", got, "overrides"))
    flags = (args.help, args.hydra_help, args.cfg, args.info, args.multirun, args.shell_completion)
    if not any(flags):
        return perform(overrides)
    return _hydra(parser, args, read(overrides))


def _parser() -> argparse.ArgumentParser:
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.prog = "kvfactory"
    return parser


def _hydra(parser: argparse.ArgumentParser, args: argparse.Namespace, request: Request) -> int:
    """What ``hydra.main`` does for its flags, without its printing and exiting on errors.

    A sweep ends with 1 if a job failed, with 2 if it could not start.
    """
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from kvfactory.config.guard import GuardedLoader
    from kvfactory.config.helptext import help_text

    primary, overrides = str(request.dirs[0].path), request.for_hydra()
    with (
        hydra_errors(request),
        initialize_config_dir(primary, job_name="kvfactory", **version_base()),
    ):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        hydra.config_loader = GuardedLoader(hydra.config_loader.get_search_path())
        if args.help:
            print(help_text(hydra, overrides, request.options))
        elif args.hydra_help:
            hydra.hydra_help("config", parser, args)
        elif args.cfg:
            return _show(hydra, overrides, args)
        elif args.info:
            hydra.show_info(args.info, "config", overrides)
        elif args.shell_completion:
            _complete(hydra, args.overrides)
        else:
            return _sweep(hydra, overrides)
    return OK


def _complete(hydra: Hydra, words: list[str]) -> None:
    try:
        hydra.shell_completion("config", words)
    except KeyError as error:  # a variable that the shell sets
        got, need = f"no variable {error} from the shell", "install=SHELL, uninstall=SHELL"
        raise SpecError(Problem("--shell-completion", got, need)) from None


def _show(hydra: Hydra, overrides: list[str], args: argparse.Namespace) -> int:
    try:
        hydra.show_cfg("config", overrides, args.cfg, args.package, args.resolve)
    except SystemExit:  # Hydra has said that there is no such package
        return BAD_INPUT
    return OK


def _sweep(hydra: Hydra, overrides: list[str]) -> int:
    done: list[Job] = []
    try:
        jobs = hydra.multirun(
            "config", lambda config: _job(config, done), [*overrides, "hydra.mode=MULTIRUN"]
        )
        if not any(jobs):
            raise SpecError(Problem("-m", "no job", "values to sweep over: a glob that finds some"))
    except _JobFailedError:
        return FAILED
    except OSError as error:
        if error.filename is None:
            raise
        got, fix = f"{error.filename}: {error.strerror}", "hydra.sweep.dir=FOLDER"
        need = "a folder that can be written to"
        raise SpecError(Problem("hydra.sweep.dir", got, need, fix)) from None
    finally:
        if done:
            from kvfactory.report.sweeps import sweep_text

            print(sweep_text(done))
    return OK


class _JobFailedError(Exception):
    """Tells Hydra's launcher that a job failed; its problems are printed already."""


def _as_written(override: str) -> str:
    """An override of a job as the user wrote it: the sweeper gives a deletion the value null."""
    if override.startswith("~"):
        return override.removesuffix("=null")
    return override.removeprefix("++")


def _job(config: DictConfig, done: list[Job]) -> None:
    """One job of a sweep: the others go on whatever happens, ``status.json`` says what did.

    A job whose plan was printed as a table is added to ``done``, to be compared. ``config`` is
    composed again from the job's overrides, as every configuration is.
    """
    from hydra.core.hydra_config import HydraConfig

    from kvfactory.report.sweeps import Job, backends

    runtime = HydraConfig.get()
    overrides = [*runtime.overrides.task]
    searchpath = [text for text in runtime.overrides.hydra if text.startswith("hydra.searchpath=")]
    status: dict[str, Any] = {"job": runtime.job.num, "overrides": overrides, "problems": []}
    try:
        written = [_as_written(text) for text in overrides]
        composed = _composed([*written, *searchpath])
        outcome = _act(composed, f"# job {runtime.job.num}: {' '.join(written)}")
        code, status["found"] = outcome.code, dict(outcome.found)
        if composed.action in ("run", "plan", "explain"):
            laid = plan(composed.spec)
            status["plan"] = {
                "admitted": laid.limits.admitted,
                "tokens": laid.limits.tokens,
                "bytes": laid.bytes,
                "binding": laid.binding,
                "backends": backends(laid),
            }
            if composed.output == "table":
                done.append(Job(runtime.job.num, laid, outcome.found, tuple(written)))
    except KVFactoryError as error:
        code = exit_code(error)
        status["problems"] = [vars(problem) for problem in error.problems]
        _print_problems(error, f"job {runtime.job.num}: ")
    except BrokenPipeError:  # nobody reads what the jobs print
        raise
    except Exception:  # a fault of ours must not end the sweep either
        code = FAILED
        status["traceback"] = traceback.format_exc()
        traceback.print_exc()
    path = Path(runtime.runtime.output_dir) / "status.json"
    path.write_text(json.dumps({**status, "exit": code}, indent=2) + "\n", encoding="utf-8")
    if code:
        raise _JobFailedError(code)
