"""The keys of a config, typed: every complaint is collected, so that all are told at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvfactory.errors import Problem
from kvfactory.huggingface.source import PATH

MAX_LAYERS = 100_000
MAX_DIM = 2**20
MAX_TOKENS = 2**40

T = TypeVar("T")


@dataclass
class Ledger:
    """What reading a config brought up: problems that stop it, and notes for its user."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Fields:
    """One object of a config: a text part, or a part of it such as ``attn_config``.

    A reader asks for keys by type and gets a usable value in any case: what is missing or
    malformed becomes a problem in the ``ledger`` and a placeholder of 1, so that reading goes on.
    A key that is null counts as absent. ``outer`` is the config around a nested text part, the
    config itself at the top.
    """

    def __init__(
        self, values: Mapping[str, Any], prefix: str = "", outer: Fields | None = None
    ) -> None:
        self.values = values
        self.prefix = prefix
        self.outer: Fields = outer or self
        self.ledger: Ledger = outer.ledger if outer else Ledger()

    # ---- complaints ------------------------------------------------------------------------

    def path(self, key: str) -> str:
        """How problems name ``key``: ``model.path: text_config.head_dim``."""
        return f"{PATH}: {self.prefix}{key}"

    def wrong(self, key: str, need: str, got: str = "", fix: str = "") -> None:
        """Record that ``key`` cannot be used; ``got`` defaults to what stands there."""
        problem = Problem(self.path(key), got or self._show(key), need, fix)
        if problem not in self.ledger.problems:
            self.ledger.problems.append(problem)

    def clash(self, keys: Sequence[str], need: str) -> None:
        """Record that ``keys`` contradict each other, unless one of them is wrong by itself."""
        blamed = {problem.path for problem in self.ledger.problems}
        if not any(self.path(key) in blamed for key in keys):
            shown = (f"{key}={self._show(key)}" if self.has(key) else f"no {key}" for key in keys)
            self.wrong(keys[0], need, ", ".join(shown))

    def note(self, text: str) -> None:
        """Record a fact that the mapping cannot carry but its user must know."""
        if text not in self.ledger.notes:
            self.ledger.notes.append(text)

    def _show(self, key: str) -> str:
        if key not in self.values:
            return "nothing"
        text = json.dumps(self.values[key], default=repr)
        return text if len(text) <= 80 else text[:77] + "..."

    # ---- access ----------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Whether ``key`` is there and not null."""
        return self.values.get(key) is not None

    def given(self, keys: Sequence[str]) -> str:
        """The first of ``keys``, names of one thing, that is there; the first of all if none is."""
        return next((key for key in keys if self.has(key)), keys[0])

    def _only(self, keys: Sequence[str]) -> str | None:
        """The key that is there; a second one must agree with it."""
        there = [key for key in keys if self.has(key)]
        for other in there[1:]:
            if self.values[other] != self.values[there[0]]:
                self.clash([there[0], other], "two names of one number to agree")
        return there[0] if there else None

    def integer(
        self, *keys: str, default: int | None = None, least: int = 1, most: int = MAX_DIM
    ) -> int:
        """The integer under the first of ``keys`` that is given; mandatory without a default."""
        found = self.optional(*keys, least=least, most=most)
        if found is None and default is None:
            self.wrong(keys[0], f"{_span(least, most)}: the key is mandatory")
            found = max(least, 1)
        return found if found is not None else default or 0

    def optional(self, *keys: str, least: int = 1, most: int = MAX_DIM) -> int | None:
        """The integer under the first of ``keys`` that is given, or None."""
        key = self._only(keys)
        if key is None:
            return None
        value = self.values[key]
        if type(value) is not int or not least <= value <= most:
            self.wrong(key, _span(least, most))
            return max(least, 1)
        return value

    def tokens(self, *keys: str) -> int | None:
        """A length in tokens, or None."""
        return self.optional(*keys, most=MAX_TOKENS)

    def number(self, key: str, default: float | None = None) -> float:
        """The positive number under ``key``; mandatory without a default."""
        if not self.has(key):
            if default is None:
                self.wrong(key, "a positive number: the key is mandatory")
            return 1.0 if default is None else default
        value = self.values[key]
        if type(value) not in (int, float) or not 0 < value < 1e30:
            self.wrong(key, "a positive number")
            return 1.0
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """The boolean under ``key``."""
        return bool(self._typed(key, bool, "true or false", default))

    def text(self, key: str, default: str = "") -> str:
        """The string under ``key``."""
        return str(self._typed(key, str, "a string", default))

    def part(self, key: str) -> Fields:
        """The object under ``key``, empty when there is none."""
        values = self._typed(key, dict, "an object", {})
        return Fields(values, f"{self.prefix}{key}.", self.outer)

    def merged(self, values: Mapping[str, Any]) -> Fields:
        """The same object with ``values`` over its own, for layers that differ."""
        return Fields({**self.values, **values}, self.prefix, self.outer)

    def strings(self, key: str) -> tuple[str, ...] | None:
        """The list of strings under ``key``, or None."""
        return self._list(key, lambda item: isinstance(item, str), "a list of strings")

    def integers(self, key: str) -> tuple[int, ...] | None:
        """The list of integers >= 0 under ``key``, or None."""
        return self._list(key, lambda item: type(item) is int and item >= 0, "a list of integers")

    def objects(self, key: str) -> tuple[Fields, ...] | None:
        """The list of objects under ``key``, or None."""
        found = self._list(key, lambda item: isinstance(item, dict), "a list of objects")
        if found is None:
            return None
        here = f"{self.prefix}{key}"
        return tuple(Fields(item, f"{here}[{n}].", self.outer) for n, item in enumerate(found))

    def _typed(self, key: str, kind: type[T], need: str, default: T) -> T:
        if not self.has(key):
            return default
        value = self.values[key]
        if type(value) is not kind:
            self.wrong(key, need)
            return default
        return value

    def _list(self, key: str, fits: Callable[[Any], bool], need: str) -> tuple[Any, ...] | None:
        if not self.has(key):
            return None
        value = self.values[key]
        if not isinstance(value, list) or len(value) > MAX_LAYERS or not all(map(fits, value)):
            self.wrong(key, need)
            return None
        return tuple(value)


def _span(least: int, most: int) -> str:
    return f"an integer from {least} to {most}"
