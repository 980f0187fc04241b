"""Random histories of whole caches: hybrids with rings, with trees, and in several layouts."""

from __future__ import annotations

from typing import ClassVar

from cache_leaving import LeavingMachine
from cache_machine import DRAFTS
from hypothesis import HealthCheck, settings


class VerifyRingMachine(LeavingMachine):
    """Drafts stay in a ring with cursors until it is full; a second tracked slot on demand."""

    engine: ClassVar = {
        "draft_tokens": DRAFTS,
        "state_replay": "verify_ring",
        "replay_tokens": 8,
        "state_tracking": "lazy",
    }
    layout: ClassVar = {"tokens": "page_major", "state": "slot_major"}


class DecodeRingMachine(LeavingMachine):
    """Nothing is drafted; decodes stay in a ring until it is full."""

    engine: ClassVar = {
        "state_replay": "decode_ring",
        "replay_tokens": 4,
        "state_tracking": "two",
    }
    layout: ClassVar = {"tokens": "token_major", "state": "slot_major"}


class FoldMachine(LeavingMachine):
    """Drafts are folded at every commit; one tracked slot."""

    engine: ClassVar = {
        "draft_tokens": DRAFTS,
        "state_replay": "verify_fold",
        "state_tracking": "one",
    }
    layout: ClassVar = {"tokens": "record"}


class TreeMachine(LeavingMachine):
    """Draft trees, whose accepted paths move to the front."""

    engine: ClassVar = {"draft_tokens": DRAFTS, "draft_tree": True, "state_tracking": "two"}
    layout: ClassVar = {"tokens": "hnd", "index": "paged_kv", "state": "slot_major"}
    trees = True


LIMITS = settings(
    max_examples=10,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
for machine in (LeavingMachine, DecodeRingMachine, VerifyRingMachine, FoldMachine, TreeMachine):
    machine.TestCase.settings = LIMITS

TestSnapshots = LeavingMachine.TestCase
TestDecodeRings = DecodeRingMachine.TestCase
TestVerifyRings = VerifyRingMachine.TestCase
TestFolds = FoldMachine.TestCase
TestTrees = TreeMachine.TestCase
