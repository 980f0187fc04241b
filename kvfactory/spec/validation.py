"""Pydantic's findings in our words: path, got, need, fix; unknown keys with a did-you-mean."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union

from pydantic import BaseModel, Tag, ValidationError

from kvfactory.errors import Problem, did_you_mean


def from_validation(
    error: ValidationError, model: type[BaseModel], prefix: str = ""
) -> tuple[Problem, ...]:
    """One ``Problem`` per pydantic error; ``prefix`` is the config path of ``model`` itself."""
    return tuple(_problem(found, model, prefix) for found in error.errors(include_url=False))


def _problem(found: Any, model: type[BaseModel], prefix: str) -> Problem:
    named, known = _walk(model, found["loc"])
    path = ".".join([prefix] * bool(prefix) + named)
    if found["type"] == "extra_forbidden":
        close = did_you_mean(named[-1], known)
        parent = ".".join([*path.split(".")[:-1], close])
        return Problem(
            path, "an unknown key", f"one of {', '.join(sorted(known))}", parent if close else ""
        )
    if found["type"] == "missing":
        fix = f"{path}=..."
        if named[-1] == "name" and "options" in found["input"]:  # options over a name alone
            fix += f", or {path.rpartition('.')[0]}='{{name: ..., options: {{...}}}}'"
        return Problem(path, "nothing", "a value: the key is mandatory", fix)
    fix = _in_units(found["input"], found["type"])
    return Problem(
        path or "spec", _show(found["input"]), _need(found["msg"]), f"{path}={fix}" if fix else ""
    )


def _in_units(value: object, kind: str) -> str:
    """``80GB`` as a number of bytes is written, ``32k`` as a count; empty for anything else."""
    found = re.fullmatch(r"([0-9]{1,6})(\.[0-9]+)? ?([kKmMgGtT])(i?[bB])?", str(value))
    if not found:
        return ""
    number, fraction, unit, is_bytes = found.groups()
    if kind == "value_error":  # of bytes: integers are parsed by pydantic
        return f"{number}{fraction or ''}{unit.upper()}iB"
    if kind != "int_type" or fraction or is_bytes:
        return ""
    return str(int(number) * 1024 ** (" kmgt".index(unit.lower())))


def _need(said: str) -> str:
    """What pydantic wants, without its own words for inputs: ``at least 1 item``."""
    said = said.removeprefix("Value error, ").removeprefix("Input should be ")
    said = re.sub(r"^(String|Tuple|List|Dictionary) should (be |have )?", "", said)
    said = re.sub(r" after validation, not \d+$", "", said)
    return said.replace("match pattern", "a name that matches")


def _show(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    text = f"'{text}'" if isinstance(value, str) else text
    return text if len(text) <= 120 else text[:117] + "..."


def _walk(model: Any, location: Sequence[str | int]) -> tuple[list[str], list[str]]:
    """The location without union tags, and the keys known where its last part stands."""
    named: list[str] = []
    known: list[str] = []
    candidates = [model]
    for part in location:
        step = [found for cand in candidates for found in _descend(cand, part)]
        if step and all(is_tag for is_tag, _ in step):
            candidates = [target for _, target in step]
            continue
        known = [key for cand in candidates for key in _keys(cand)]
        named.append(str(part))
        candidates = [target for is_tag, target in step if not is_tag]
    return named, known


def _members(annotation: Any) -> Iterator[tuple[str, Any]]:
    """Union members as (tag, type); the tag is pydantic's name for the member in a location."""
    tags = [""]
    while typing.get_origin(annotation) is Annotated:
        annotation, *extra = typing.get_args(annotation)
        tags += [item.tag for item in extra if isinstance(item, Tag)]
    if typing.get_origin(annotation) in (Union, UnionType):
        for arm in typing.get_args(annotation):
            yield from _members(arm)
    elif annotation is not NoneType:
        name = getattr(annotation, "__name__", str(annotation))
        yield tags[-1] or name, annotation


def _keys(annotation: Any) -> list[str]:
    found: list[str] = []
    for _, member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            found += list(member.model_fields)
    return found


def _descend(annotation: Any, part: str | int) -> Iterator[tuple[bool, Any]]:
    members = list(_members(annotation))
    for tag, member in members:
        origin, args = typing.get_origin(member), typing.get_args(member)
        if isinstance(member, type) and issubclass(member, BaseModel):
            if part in member.model_fields:
                field = member.model_fields[str(part)]
                yield (
                    False,
                    Annotated[field.annotation, *field.metadata]
                    if field.metadata
                    else field.annotation,
                )
        elif origin is dict:
            yield False, args[1]
        elif origin in (tuple, list) and isinstance(part, int):
            yield False, args[0]
        if part == tag and len(members) > 1:
            yield True, member
