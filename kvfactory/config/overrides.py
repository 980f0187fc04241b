"""Overrides as text: what can be refused, or put right, before Hydra sees them.

``kv.page_tokens=64`` becomes ``++kv.page_tokens=64``: Hydra would refuse keys that a preset does
not name; this way every key reaches the schema, which knows what was meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from kvfactory.errors import Problem, did_you_mean
from kvfactory.spec import Spec

_SECTIONS = tuple(Spec.model_fields)
ACTIONS = ("run", "plan", "list", "explain", "replay")
_SETTINGS = ("action", "output", "engine", "hydra")
_CHOICE = re.compile(r"[\w-]+(,[\w-]+)*")
_OPTIONAL = "experiment"
_PARAMS = "hydra.sweeper.params"
_MOST_SHOWN = 16


@dataclass(frozen=True)
class Override:
    """``prefix`` is one of ``'' + ++ ~``; ``value`` is None where there is no ``=``."""

    prefix: str
    key: str
    value: str | None

    @classmethod
    def parse(cls, text: str) -> Override:
        """Split at the first ``=``; nothing is interpreted."""
        prefix = re.match(r"[+~]*", text)
        assert prefix is not None
        key, equals, value = text[prefix.end() :].partition("=")
        return cls(prefix[0], key.strip(), value if equals else None)

    def __str__(self) -> str:
        return f"{self.prefix}{self.key}" + ("" if self.value is None else f"={self.value}")

    @property
    def section(self) -> str:
        """The part of the spec that a dotted key belongs to, else an empty string."""
        root, dot, _ = self.key.partition(".")
        return root if dot and root in _SECTIONS else ""

    def for_hydra(self) -> tuple[str, ...]:
        """The override as Hydra must get it.

        Hydra merges mappings: a plugin with options is set to null first, lest it inherit the
        options of the one it replaces.
        """
        if self.section and self.prefix in ("", "++") and self.value is not None:
            override = f"++{self.key}={self.value}"
            return (f"++{self.key}=null", override) if _is_plugin(self.value) else (override,)
        if self.key == _OPTIONAL and self.value == "null":  # as it is without the override
            return ()
        if self.key == "memory" and self.value:
            quoted = ",".join("'null'" if v == "null" else v for v in self.value.split(","))
            return (f"{self.prefix}memory={quoted}",)
        return (str(self),)


def _is_plugin(value: str) -> bool:
    """Whether a value is a mapping with a name, in what YAML and Hydra's grammar share."""
    if not value.startswith("{"):
        return False
    import yaml

    try:
        mapping = yaml.safe_load(value)
    except yaml.YAMLError:
        return False
    return isinstance(mapping, dict) and "name" in mapping


def refusals(
    overrides: Sequence[Override], options: Mapping[str, Sequence[str]]
) -> tuple[Problem, ...]:
    """What is wrong on sight; ``options`` are the choices of each config group."""
    found = [problem for each in overrides for problem in _one(each, options)]
    return (*found, *_parents(overrides))


def _one(override: Override, options: Mapping[str, Sequence[str]]) -> Iterator[Problem]:
    root, dot, _ = override.key.partition(".")
    group = root.partition("@")[0]
    known = sorted({*_SECTIONS, *_SETTINGS, *options})
    if override.value is None and override.prefix != "~":
        yield Problem(str(override), "no value", "key=value", _keyed(override.key, known, options))
    elif any(part.startswith("_") for part in override.key.split(".")):
        yield _private(override.key)
    elif root == "hydra" and (found := re.search(r"[{,\s](_\w+_)\s*:", override.value or "")):
        yield _private(f"{override.key}...{found[1]}")
    elif "/" not in group and group not in known:
        close = did_you_mean(group, known)
        fix = str(override).replace(group, close, 1) if close else ""
        yield Problem(override.key, "an unknown key", f"one of {', '.join(known)}", fix)
    elif override.key.startswith(_PARAMS):
        got, fix = str(override), "-m kv=fp8_hnd,bf16_hnd"
        yield Problem(override.key, got, "what is swept over as an override of its own", fix)
    elif not dot and override.key in options and override.prefix.startswith("+"):
        plain = f"{override.key}={override.value}"
        yield Problem(override.key, str(override), "a choice without +: the group has one", plain)
    elif not dot and override.key in options and override.value is not None:
        yield from _choices(override, options[override.key])


def _keyed(word: str, known: Sequence[str], options: Mapping[str, Sequence[str]]) -> str:
    """The override that a word alone may have been meant for."""
    if word in ACTIONS:
        return f"action={word}"
    group = next((group for group, names in options.items() if word in names), "")
    close = did_you_mean(word, known)
    return f"{group}={word}" if group else f"{close}=..." if close else ""


def _choices(override: Override, known: Sequence[str]) -> Iterator[Problem]:
    value = override.value or ""
    may_be_null = override.key == _OPTIONAL or "null" in known
    if override.key == "model" and (value.endswith(".json") or value.startswith(("/", ".", "~"))):
        fix = f"model=hf {quoted(f'model.path={value}')}"
        yield Problem("model", repr(value), "the name of a choice: hf reads files", fix)
        return
    if not _CHOICE.fullmatch(value):
        if value.startswith(("{", "[")) or not value:
            need = f"the name of a choice: one of {', '.join(known)}"
            yield Problem(override.key, value or "nothing", need, f"{override.key}={known[0]}")
        return
    if override.key == _OPTIONAL and "," in value and "null" in value.split(","):
        need = "names of files: a sweep over none and some is two commands"
        yield Problem(override.key, value, need)
    for name in value.split(","):
        if name not in known and not (name == "null" and may_be_null):
            close = did_you_mean(name, known)
            fix = f"{override.key}={close}" if close else ""
            yield Problem(override.key, repr(name), f"one of {_some(known, name)}", fix)


def _some(known: Sequence[str], name: str) -> str:
    """All choices where they are few, else those closest to ``name``."""
    if len(known) <= _MOST_SHOWN:
        return ", ".join(known)
    close = get_close_matches(name, known, n=_MOST_SHOWN, cutoff=0.4) or known[:_MOST_SHOWN]
    return f"{len(known)} choices, such as {', '.join(close)} (--help lists them all)"


def quoted(override: str) -> str:
    """``override`` for a shell, with its value in the quotes that Hydra's grammar needs."""
    key, _, value = override.partition("=")
    odd = re.search(r"[^\w./:+-]", value)
    return f"'{key}=\"{value}\"'" if odd else override


def _private(path: str) -> Problem:
    got = "a key that begins with an underscore"
    return Problem(path, got, "keys of the schema: plugins go by name, a config runs no code")


def private_keys(value: object, path: str = "") -> Iterator[Problem]:
    """A problem for each key of a composed config that begins with an underscore."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            here = f"{path}.{key}" if path else str(key)
            if str(key).startswith("_"):
                yield _private(here)
            else:
                yield from private_keys(inner, here)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from private_keys(inner, f"{path}.{index}")


def _parents(overrides: Sequence[Override]) -> Iterator[Problem]:
    """``kv.quant=x kv.quant.k=y``: what the child means depends on an order nobody wrote down."""
    dotted = [override for override in overrides if override.section]
    for child in dotted:
        for parent in dotted:
            if child.key.startswith(f"{parent.key}."):
                got = f"{parent} and {child} together"
                need = "a key or its children, not both"
                yield Problem(child.key, got, need, f"leaving out {parent}")
