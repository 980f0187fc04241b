"""A layout is a string of named axes, outermost to innermost, with one ragged axis ``plane``.

``"layer page slot plane head dim"`` reads: layers hold pages, pages hold slots, and in a slot the
planes stand side by side, each dense in its own head and dim. ``dim/16`` and ``dim%16`` split an
axis into blocks and offsets; ``x`` as a divisor is 16 bytes of that plane; ``...`` stands for the
plane's own axes that are not named.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvfactory.errors import Problem, SpecError

_AXIS = re.compile(r"([a-z]+)(?:([/%])([1-9]\d*|x))?")
REST = "..."


@dataclass(frozen=True)
class Axis:
    """One word of a pattern: ``part`` is empty, ``/`` (which block) or ``%`` (where in it)."""

    name: str
    part: str = ""
    divisor: str = ""

    def __str__(self) -> str:
        return f"{self.name}{self.part}{self.divisor}"


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern: axes left of ``plane`` are shared by all planes, the rest is per plane."""

    shared: tuple[Axis, ...]
    inner: tuple[Axis, ...]

    def __str__(self) -> str:
        return " ".join([*map(str, self.shared), "plane", *map(str, self.inner)])

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes but ``plane``."""
        return self.shared + self.inner


@dataclass(frozen=True)
class Layout:
    """A named layout: a pattern per plane family, equal left of ``plane``."""

    name: str
    k: str
    v: str | None = None
    scale: str | None = None

    def text(self, family: str) -> str:
        """The pattern of ``family``: k, v or scale."""
        return {"v": self.v, "scale": self.scale}.get(family) or self.k

    def pattern(self, family: str, path: str) -> Pattern:
        """The parsed pattern of ``family``; errors begin with ``path``."""
        return parse(self.text(family), path)

    def problems(self, path: str) -> tuple[Problem, ...]:
        """What is wrong with the patterns themselves, whatever the planes."""
        try:
            heads = {fam: self.pattern(fam, path).shared for fam in ("k", "v", "scale")}
        except SpecError as error:
            return error.problems
        return tuple(
            Problem(
                path, f"'{self.text(fam)}' for {fam}", f"the axes of k left of plane: '{self.k}'"
            )
            for fam in ("v", "scale")
            if heads[fam] != heads["k"]
        )


def parse(text: str, path: str) -> Pattern:
    """The pattern that ``text`` spells.

    Raises:
        SpecError: a word that is no axis, a doubled or missing axis, half of a split.
    """
    words = text.split()
    wrong = [Problem(path, f"{word!r} in {text!r}", _FORM) for word in words if not _is_axis(word)]
    wrong += [
        Problem(path, f"{text!r} without {word}", f"each of layer, page and plane once: {_EXAMPLE}")
        for word in ("layer", "page", "plane")
        if words.count(word) != 1
    ]
    wrong += [
        Problem(path, f"{word!r} {words.count(word)} times in {text!r}", "each axis once")
        for word in dict.fromkeys(words)
        if words.count(word) > 1 and word not in ("layer", "page", "plane")
    ]
    if not wrong:
        wrong = _split_problems([_axis(word) for word in words if word != "plane"], text, path)
    if wrong:
        raise SpecError(*wrong)
    cut = words.index("plane")
    return Pattern(tuple(map(_axis, words[:cut])), tuple(map(_axis, words[cut + 1 :])))


_EXAMPLE = "'plane layer page slot head dim'"
_FORM = f"axis names, name/16, name%16 or ..., as in {_EXAMPLE}"


def _is_axis(word: str) -> bool:
    return word == REST or bool(_AXIS.fullmatch(word))


def _axis(word: str) -> Axis:
    if word == REST:
        return Axis(REST)
    found = _AXIS.fullmatch(word)
    assert found, word
    return Axis(found[1], found[2] or "", found[3] or "")


def _split_problems(axes: list[Axis], text: str, path: str) -> list[Problem]:
    wrong = []
    for name in dict.fromkeys(axis.name for axis in axes):
        parts = [axis for axis in axes if axis.name == name]
        whole = [axis for axis in parts if not axis.part]
        if whole and len(parts) == 1:
            continue
        if name in ("layer", "page"):
            wrong.append(Problem(path, f"{name} split in {text!r}", f"{name} whole"))
        elif {axis.part for axis in parts} != {"/", "%"} or len({a.divisor for a in parts}) != 1:
            shown = " ".join(map(str, parts))
            wrong.append(
                Problem(path, f"'{shown}' in {text!r}", f"{name} whole, or {name}/n and {name}%n")
            )
    return wrong
