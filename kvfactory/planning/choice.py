"""Which backend serves each group: chosen before sizing, confirmed at full size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvfactory.backends.contract import BACKENDS, Backend, ranked, refusals
from kvfactory.errors import CapabilityError, PlanError, Problem, SpecError
from kvfactory.kinds import ceil_div
from kvfactory.planning.cacheplan import Attention, CachePlan, Choice, GroupPlan, Select
from kvfactory.spec import BackendChoice, Spec

_MOST_PAGES = 2**31 - 1


def check_options(spec: Spec) -> None:
    """Refuse options under ``backend.name=auto`` that no backend knows.

    Raises:
        SpecError: with what the backends say.
    """
    if spec.backend.name != "auto":
        return
    for key, value in spec.backend.options.items():
        refused = [_option_problems(name, {key: value}, spec) for name in BACKENDS.working()]
        if refused and all(refused):
            told = [each for problems in refused for each in problems]
            known = [each for each in told if each.got != "an unknown key"]
            raise SpecError(*(known or told)[:1])


def _option_problems(name: str, options: dict[str, Any], spec: Spec) -> tuple[Problem, ...]:
    asked = spec.model_copy(update={"backend": BackendChoice(name=name, options=options)})
    try:
        BACKENDS.get(name, "backend.name").needs(asked)
    except SpecError as error:
        return error.problems
    return ()


def choose(groups: Sequence[GroupPlan], spec: Spec) -> dict[str, Choice]:
    """The backend of every group that attends or selects, the highest rank first under ``auto``.

    Raises:
        SpecError: a backend that is unknown, or options that it does not have.
        CapabilityError: groups that none serves.
    """
    asked = spec.backend.name
    backends = ranked(BACKENDS.working() if asked == "auto" else (asked,))
    broken = tuple(BACKENDS.faults("backend.name").items()) if asked == "auto" else ()
    wrong: list[Problem] = []
    chosen: dict[str, Choice] = {}
    for group in groups:
        if isinstance(group.work, Attention | Select):
            choice = _first_fit(group, backends, spec)
            if choice.backend:
                chosen[group.name] = replace(choice, passed_over=(*choice.passed_over, *broken))
            else:
                found = (p for _, problems in (*choice.passed_over, *broken) for p in problems)
                wrong += _with_others(found, group, spec)
    if wrong:
        raise CapabilityError(*dict.fromkeys(wrong))
    return chosen


def _with_others(found: Iterable[Problem], group: GroupPlan, spec: Spec) -> Iterator[Problem]:
    """Problems of the backend that was asked for; those without a mend name one that would do."""
    others = ranked(name for name in BACKENDS.working() if name != spec.backend.name)
    auto = spec.model_copy(update={"backend": BackendChoice()})
    fits = _first_fit(group, others, auto).backend if spec.backend.name != "auto" else ""
    for problem in found:
        fix = problem.fix or (f"backend={fits}" if fits else "")
        yield replace(problem, fix=fix)


def _first_fit(group: GroupPlan, backends: Sequence[Backend], spec: Spec) -> Choice:
    passed: list[tuple[str, tuple[Problem, ...]]] = []
    for backend in backends:
        found = refusals(backend.name, backend.needs(spec), group, spec)
        if not found:
            return Choice(backend.name, tuple(passed))
        passed.append((backend.name, found))
    return Choice("", tuple(passed))


def slow(laid: CachePlan) -> Iterator[str]:
    """Groups that the oracle serves where kernels could."""
    for group in laid.groups if laid.spec.device.type == "cuda" else ():
        if group.choice and group.choice.backend == "torch":
            yield f"group {group.name} is served by torch, the oracle: slow"


def confirm(laid: CachePlan) -> None:
    """Strides and ids grow with the pages: what was chosen must still serve at full size.

    Raises:
        PlanError: more pages than ids can number.
        CapabilityError: strides that the chosen backend does not take.
    """
    beyond = [
        Problem(
            "kv.page_tokens",
            f"{table.num_pages:,} pages of {table.page_tokens} tokens in table {table.name}",
            f"at most {_MOST_PAGES:,}: page ids are int32",
            f"kv.page_tokens={table.page_tokens * ceil_div(table.num_pages, _MOST_PAGES)}",
        )
        for table in laid.tables
        if table.num_pages > _MOST_PAGES
    ]
    if beyond:
        raise PlanError(*beyond)
    wrong: list[Problem] = []
    for group in laid.groups:
        if group.choice:
            backend = BACKENDS.get(group.choice.backend, "backend.name")
            needs = backend.needs(laid.spec)
            wrong += refusals(backend.name, needs, group, laid.spec)
    if wrong:
        raise CapabilityError(*wrong)
