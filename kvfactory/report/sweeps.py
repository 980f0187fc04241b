"""The table that a sweep ends with: a line a job, in columns that tell the jobs apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvfactory.planning.cacheplan import CachePlan
from kvfactory.report.tables import columns


@dataclass(frozen=True)
class Job:
    """One job that has a plan: its ``overrides`` as they were written, and what it ``found``."""

    number: int
    plan: CachePlan
    found: Mapping[str, str]
    overrides: tuple[str, ...]


def backends(plan: CachePlan) -> dict[str, str]:
    """Group -> the backend that attends over it or selects from it."""
    return {group.name: group.choice.backend for group in plan.groups if group.choice}


def sweep_text(jobs: Sequence[Job]) -> str:
    """Jobs side by side, each with the overrides that not all of them have."""
    found = tuple(dict.fromkeys(key for job in jobs for key in job.found))
    same = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    head = ("job", "requests", "tokens", "bytes", "backends", *found, "overrides")
    return columns(head, [_cells(job, found, same) for job in jobs])


def _cells(job: Job, found: Sequence[str], same: set[str]) -> tuple[str, ...]:
    limits = job.plan.limits
    numbers = (f"{number:,}" for number in (limits.admitted, limits.tokens, job.plan.bytes))
    told = (job.found.get(key, "-") for key in found)
    varying = " ".join(text for text in job.overrides if text not in same)
    return (str(job.number), *numbers, _served(job.plan), *told, varying)


def _served(plan: CachePlan) -> str:
    """The backend, or where there are several, that of each group."""
    served = backends(plan)
    if len({*served.values()}) < 2:
        return next(iter(served.values()), "-")
    return ", ".join(f"{group} by {name}" for group, name in served.items())
