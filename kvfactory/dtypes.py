"""Element types by name, so that formats can be planned without torch."""

from __future__ import annotations

from kvfactory.errors import PlanError, Problem

_ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}


def itemsize(dtype: str) -> int:
    """Bytes of one element of ``dtype`` (torch's name for the type).

    Raises:
        PlanError: a type that planes cannot have.
    """
    if dtype not in _ITEMSIZE:
        raise PlanError(Problem("dtype of a plane", repr(dtype), f"one of {', '.join(_ITEMSIZE)}"))
    return _ITEMSIZE[dtype]
