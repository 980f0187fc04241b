"""What the command line can do: a module an action, each with ``run(spec, output)``.

It returns an exit code, or an ``Outcome`` where jobs of a sweep have more to compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outcome:
    """How an action ended: its exit code, and what it ``found`` that jobs of a sweep compare."""

    code: int
    found: Mapping[str, str] = field(default_factory=dict)
