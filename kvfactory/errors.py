"""The one error tree: every error is a tuple of problems, each with its place and its mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, in the words of whoever wrote the config.

    ``path`` is the dotted config key or the argument, ``got`` what stood there, ``need`` what
    would be accepted, ``fix`` the override or call that mends it (empty where none is known).
    """

    path: str
    got: str
    need: str
    fix: str = ""

    def __str__(self) -> str:
        mend = f"; try {self.fix}" if self.fix else ""
        return f"{self.path}: got {self.got}, need {self.need}{mend}"


class KVFactoryError(Exception):
    """Base of all errors that kvfactory raises on purpose; ``problems`` lists every one found."""

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))

    def __reduce__(self) -> tuple[type, tuple[Problem, ...]]:
        return type(self), self.problems


class SpecError(KVFactoryError):
    """A configuration or an argument is malformed: unknown keys, wrong types, unknown plugins."""


class PlanError(KVFactoryError):
    """A well-formed spec that no plan can satisfy: geometry, layout, quant or budget."""


class CapabilityError(PlanError):
    """No backend can attend over a group; the problems are each backend's reasons."""


class BuildError(KVFactoryError):
    """What a plan needs is not here: its device, memory, a library, or bytes behind it."""


class OutOfMemory(BuildError):  # noqa: N818
    """The device has too little free memory for the arena."""


class OutOfPages(KVFactoryError):  # noqa: N818
    """A table has too few free pages or slots; nothing was taken. The path names the table."""


class BooksError(KVFactoryError):
    """A misuse of the books: double free, foreign or stale ids, commits out of order."""


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """The closest of ``known`` to ``got``; empty if none is close.

    Names that begin with all of ``got`` come first; ties go by common beginning.
    """

    def closeness(name: str) -> tuple[bool, float, int]:
        alike = difflib.SequenceMatcher(None, name, got).ratio()
        return len(got) > 2 and name.startswith(got), alike, _common(name, got)

    best = max(known, key=closeness, default="")
    begins, alike, _ = closeness(best)
    return best if begins or alike >= 0.5 else ""


def _common(a: str, b: str) -> int:
    """How many letters two names begin with alike."""
    return next(
        (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
