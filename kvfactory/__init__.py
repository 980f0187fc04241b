"""kvfactory: one declarative factory that composes a language model's whole cache.

``compose`` reads YAML and overrides into a ``Spec``, ``plan`` accounts for every byte without
torch, ``build`` makes the cache. Names are loaded on first use, so that planning stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvfactory.builder import build
    from kvfactory.cache import Cache
    from kvfactory.calibration import calibrate
    from kvfactory.composer import compose
    from kvfactory.errors import (
        BooksError,
        BuildError,
        CapabilityError,
        KVFactoryError,
        OutOfPages,
        PlanError,
        Problem,
        SpecError,
    )
    from kvfactory.planner import plan
    from kvfactory.planning.cacheplan import CachePlan
    from kvfactory.spec import Spec

__all__ = [
    "BooksError",
    "BuildError",
    "Cache",
    "CachePlan",
    "CapabilityError",
    "KVFactoryError",
    "OutOfPages",
    "PlanError",
    "Problem",
    "Spec",
    "SpecError",
    "build",
    "calibrate",
    "compose",
    "plan",
]

_HOMES = {
    "Cache": "cache",
    "CachePlan": "planning.cacheplan",
    "Spec": "spec",
    "build": "builder",
    "calibrate": "calibration",
    "compose": "composer",
    "plan": "planner",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kvfactory' has no attribute {name!r}")
    module = importlib.import_module(f"kvfactory.{_HOMES.get(name, 'errors')}")
    return vars(module)[name]
