"""Families: what the configs of related architectures mean, as pure functions found by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvfactory.errors import Problem, SpecError
from kvfactory.huggingface.fields import Fields
from kvfactory.huggingface.groups import Group
from kvfactory.huggingface.source import PATH
from kvfactory.registry import Registry


@dataclass(frozen=True)
class Geometry:
    """What a family reads from a config: the spec's ``groups`` and ``aliases``.

    ``max_context`` is the longest sequence in tokens, None where the config sets no end.
    """

    num_layers: int
    groups: Mapping[str, Group]
    max_context: int | None = None
    aliases: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Family:
    """Architectures that share a reading.

    ``model_types`` are the ``model_type`` strings of their configs. ``read`` is a pure function;
    it records what it cannot use in the fields and returns a usable geometry in any case.
    ``defaults`` maps a model type to keys that published configs leave out, with the values that
    transformers gives them.
    """

    name: str
    model_types: tuple[str, ...]
    read: Callable[[Fields], Geometry]
    defaults: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


FAMILIES: Registry[Family] = Registry(
    "family", "kvfactory.huggingface.families", "kvfactory.families", Family
)


def find_family(model_type: str) -> Family | None:
    """The family that knows ``model_type``; third parties are asked when no built-in does.

    Raises:
        SpecError: two families claim the type, or a third party's family fails to load.
    """
    names = FAMILIES.names()
    builtin = [name for name in names if FAMILIES.origin(name) == "built-in"]
    foreign = [name for name in names if name not in builtin]
    for candidates in (builtin, foreign):
        found = [FAMILIES.get(name, PATH) for name in candidates]
        claims = [family for family in found if model_type in family.model_types]
        if len(claims) > 1:
            got = " and ".join(family.name for family in claims)
            raise SpecError(
                Problem(f"{PATH}: model_type", f"{model_type!r} in {got}", "one family")
            )
        if claims:
            return claims[0]
    return None
