"""Plain data: what YAML and JSON can hold, and so what a specification is read from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvfactory.errors import Problem, SpecError

_NEED = "plain data: mappings with text keys, lists, text, numbers, true, false or null"
_DEPTH = 32
_DIGITS_BITS = 256


def plain(value: object) -> Any:
    """``value`` with every mapping as a dict and every tuple as a list, ready for JSON.

    Raises:
        SpecError: everything in it that JSON cannot hold, each with its path.
    """
    problems: list[Problem] = []
    copied = _copy(value, "", _DEPTH, problems)
    if problems:
        raise SpecError(*problems)
    return copied


def _copy(value: object, path: str, depth: int, problems: list[Problem]) -> Any:
    wrong = _wrong(value, depth)
    if wrong:
        problems.append(Problem(path or "spec", wrong, _NEED))
    elif isinstance(value, Mapping):
        return {key: _copy(value[key], _under(path, key), depth - 1, problems) for key in value}
    elif isinstance(value, list | tuple):
        return [
            _copy(item, _under(path, number), depth - 1, problems)
            for number, item in enumerate(value)
        ]
    return value


def _wrong(value: object, depth: int) -> str:
    """What JSON cannot hold about ``value`` itself; empty if nothing."""
    if depth == 0:
        return f"values nested more than {_DEPTH} deep"
    if isinstance(value, Mapping):
        return next(_wrong_keys(value), "")
    if isinstance(value, str):
        return "" if _is_text(value) else f"{value!a}, which is no UTF-8 text"
    if isinstance(value, int) and not isinstance(value, bool):
        return "a number of too many digits" if value.bit_length() > _DIGITS_BITS else ""
    if value is None or isinstance(value, bool | float | list | tuple):
        return ""
    return f"a value of type {type(value).__name__}"


def _wrong_keys(value: Mapping[Any, object]) -> Iterator[str]:
    for key in value:
        if not isinstance(key, str):
            yield f"the key {key!r} of type {type(key).__name__}"
        elif not _is_text(key):
            yield f"the key {key!a}, which is no UTF-8 text"


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _under(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
