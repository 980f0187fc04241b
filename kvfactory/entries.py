"""Entries: groups that keep one entry per several tokens, in the table of the tokens."""

from __future__ import annotations

from torch import Tensor

from kvfactory.cacheplan import GroupPlan
from kvfactory.steps import Step


def entry_slots(group: GroupPlan, step: Step) -> Tensor:
    """Slots int64 [entries] that this step writes in ``group``.

    With one entry per token these are the step's own slots; otherwise one for each new token that
    completes an entry, in the order of the tokens.
    """
    slots = step.tables[group.table].slots
    ratio = group.tokens_per_entry
    if ratio == 1:
        return slots
    completes = (step.positions + 1) % ratio == 0
    return slots[completes] // ratio
