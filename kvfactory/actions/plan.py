"""``action=plan``: every byte of the cache, before any of it exists."""

from __future__ import annotations

from kvfactory.planner import plan
from kvfactory.spec import Spec


def run(spec: Spec, output: str) -> int:
    """Print the plan as a table or as JSON; 0 when it exists.

    Raises:
        SpecError, PlanError, CapabilityError: it does not.
    """
    laid = plan(spec)
    if output == "json":
        print(laid.to_json(indent=2))
    else:
        from kvfactory.report.tables import plan_text

        print(plan_text(laid))
    return 0
