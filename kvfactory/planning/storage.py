"""How one group stores its tensors: the codec of each role, and the layout of all planes.

A quant is looked up from the most specific policy to the least: recipe, group, preset, and within
one policy by role before ``every``, which applies to the roles that it fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvfactory.errors import PlanError, Problem
from kvfactory.layouts import Extents, Layout, Pattern, placement_problems, resolve_layout
from kvfactory.quant import SCHEMES, Codec, Constant, Logical, Plane, resolve_codec
from kvfactory.spec import Layouts, Plugin, Quants

DEFAULT_QUANT = Plugin(name="plain")
DEFAULT_LAYOUT = {"tokens": "nhd", "index": "paged_kv", "state": "state_split"}


@dataclass(frozen=True)
class Stored:
    """A logical tensor with the codec that stores it."""

    logical: Logical
    quant: Plugin
    codec: Codec
    planes: tuple[Plane, ...]
    constants: tuple[Constant, ...]


@dataclass(frozen=True)
class Placed:
    """The planes of a group with a pattern each, in the order in which ``plane`` runs."""

    layout: Layout
    patterns: tuple[Pattern, ...]
    planes: tuple[Extents, ...]


Policies = Sequence[tuple[str, Quants]]


def store(logical: Logical, policies: Policies) -> Stored:
    """``logical`` with the codec that the first matching of ``policies`` (path, quants) gives.

    Raises:
        KVFactoryError: an unknown quant or option, or one that cannot store this tensor.
    """
    path, quant = _choose(logical, policies)
    codec = resolve_codec(quant.name, quant.options, path)
    wrong = _unfit(logical, quant, codec, path)
    if wrong:
        raise PlanError(*wrong)
    return Stored(logical, quant, codec, codec.planes(logical), codec.constants(logical))


def _choose(logical: Logical, policies: Policies) -> tuple[str, Plugin]:
    for path, quants in policies:
        named = quants.of(logical.role)
        if named is not None:
            return f"{path}.{logical.role}", named
        if quants.every is not None:
            codec = resolve_codec(quants.every.name, quants.every.options, path)
            if not _unfit(logical, quants.every, codec, path):
                return path, quants.every
    return f"kv.quant.{logical.role}", DEFAULT_QUANT


def _unfit(logical: Logical, quant: Plugin, codec: Codec, path: str) -> tuple[Problem, ...]:
    roles = SCHEMES.get(quant.name, path).roles
    if logical.role not in roles:
        got = f"{quant.name} for role {logical.role}"
        fits = [name for name in SCHEMES.working() if logical.role in SCHEMES.get(name, path).roles]
        return (Problem(path, got, f"one of {', '.join(fits)}", f"{path}=plain"),)
    return codec.problems(logical, path)


def choose_layout(granularity: str, policies: Sequence[tuple[str, Layouts]]) -> tuple[str, Layout]:
    """The config path and layout of the first policy that names one for ``granularity``."""
    for path, layouts in policies:
        chosen = layouts.of(granularity)
        if chosen is not None:
            where = f"{path}.{granularity}"
            return where, resolve_layout(chosen.k, chosen.v, chosen.scale, where)
    where = f"kv.layout.{granularity}"
    return where, resolve_layout(DEFAULT_LAYOUT[granularity], None, None, where)


def arrange(stored: Sequence[Stored], layout: Layout, page_slots: int | None, path: str) -> Placed:
    """The planes of ``stored`` under ``layout``; pages of ``page_slots``, or None for states.

    Raises:
        PlanError: the layout cannot place these planes.
    """
    slot = () if page_slots is None else (("slot", page_slots),)
    planes, patterns = [], []
    for tensor, plane in _planes(stored):
        planes.append(Extents(plane_key(tensor.logical, plane), plane.itemsize, slot + plane.axes))
        patterns.append(layout.pattern(_family(tensor.logical, plane), path))
    wrong = placement_problems(patterns, planes, path)
    if wrong:
        raise PlanError(*wrong)
    return Placed(layout, tuple(patterns), tuple(planes))


def plane_key(logical: Logical, plane: Plane) -> str:
    """The plane's name in its group: ``k`` for data, ``k.scale`` and ``k.zero`` for the rest."""
    return logical.name if plane.part == "data" else f"{logical.name}.{plane.part}"


def _planes(stored: Sequence[Stored]) -> Iterator[tuple[Stored, Plane]]:
    for tensor in stored:
        for plane in tensor.planes:
            yield tensor, plane


def _family(logical: Logical, plane: Plane) -> str:
    if plane.part != "data":
        return "scale"
    return "v" if logical.role in ("v", "index_v") else "k"
