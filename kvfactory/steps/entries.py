"""Entries: groups that keep one entry per several tokens, in the table of the tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvfactory.books import StepRecord
from kvfactory.books.ids import Int64
from kvfactory.planning.cacheplan import GroupPlan
from kvfactory.pools.ids import sent
from kvfactory.steps.step import Step


def completing(record: StepRecord, tokens_per_entry: int) -> Int64:
    """Indices of the step's new tokens that complete an entry, int64 [entries], ascending.

    Tokens are counted in the order in which they are stored.
    """
    counts = np.diff(record.q_indptr)
    first = record.prefix - record.q_indptr[:-1]
    stored = np.repeat(first, counts) + np.arange(int(record.q_indptr[-1]))
    found: Int64 = np.flatnonzero((stored + 1) % tokens_per_entry == 0)
    return found


def entry_slots(group: GroupPlan, step: Step) -> Tensor:
    """Slots int64 [entries] that this step writes in ``group``.

    With one entry per token these are the step's own slots; otherwise one for each new token that
    completes an entry, in the order of the tokens. Which those are the host knows, so nothing
    waits for the device.
    """
    slots = step.tables[group.table].slots
    ratio = group.tokens_per_entry
    if ratio == 1:
        return slots
    return slots[sent(torch.from_numpy(completing(step.host, ratio)), slots.device)] // ratio
