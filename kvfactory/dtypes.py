"""Element types by name, so that formats can be planned without torch."""

from __future__ import annotations

_ITEMSIZE = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}


def itemsize(dtype: str) -> int:
    """Bytes of one element of ``dtype`` (torch's name for the type)."""
    return _ITEMSIZE[dtype]
