"""Backends: which kernels attend over a pool, and how one is chosen."""

from kvfactory.backends.contract import (
    BACKENDS,
    AttendExtra,
    AttentionRunner,
    Backend,
    Needs,
    Resources,
    SelectRunner,
    refusals,
)

__all__ = [
    "BACKENDS",
    "AttendExtra",
    "AttentionRunner",
    "Backend",
    "Needs",
    "Resources",
    "SelectRunner",
    "refusals",
]
