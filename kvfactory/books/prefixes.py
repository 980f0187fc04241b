"""Prefixes of a row that somebody else comes to own, each with the place of its state.

Every function checks all that it needs before it takes anything; see the methods of ``Books``.
"""

from __future__ import annotations

from dataclasses import replace

from kvfactory.books import checks
from kvfactory.books.ledger import Ledger, require
from kvfactory.books.segments import Segment


def hold(ledger: Ledger, row: int, start: int, stop: int, checkpoint: bool) -> Segment:
    """Tokens [start, stop) of a row, and a copy of its state in a slot or a checkpoint."""
    checks.hold(ledger, row, start, stop)
    states = ledger.states
    if checkpoint:
        checks.checkpoints(ledger)
    require(*((s.checkpoints if checkpoint else s.slots, 1) for s in states.values()))
    shared = ledger.share(row, start, stop)
    slots = {name: state.duplicate(row, checkpoint) for name, state in states.items()}
    return replace(shared, slots=slots)


def track(ledger: Ledger, row: int, tokens: int | None) -> dict[str, int]:
    """The slot for the state after ``tokens`` tokens, by state table; see ``Books.track``."""
    committed = int(ledger.requests.committed[row])
    tokens = committed if tokens is None else tokens
    checks.track(ledger, row, tokens)
    require(*((s.slots, s.tracking.missing(row, tokens)) for s in ledger.states.values()))
    here = tokens == committed
    return {name: state.track(row, tokens, here) for name, state in ledger.states.items()}


def donate(ledger: Ledger, row: int) -> Segment:
    """The tracked tokens of a row with the slot of their state, which is replaced."""
    checks.tracked(ledger, row)
    require(*((s.slots, 0 if s.tracking.lazy else 1) for s in ledger.states.values()))
    segment = tracked(ledger, row)
    for state in ledger.states.values():
        state.tracking.replace(row, state.slots)
    return segment


def tracked(ledger: Ledger, row: int) -> Segment:
    """The tracked tokens of a row with the slot of their state, which is not replaced."""
    checks.tracked(ledger, row)
    tokens = ledger.tracked(row)
    shared = ledger.share(row, 0, tokens)
    states = ledger.states.items()
    return replace(shared, slots={n: state.tracking.detach(row, tokens) for n, state in states})


def whole(ledger: Ledger, row: int) -> Segment:
    """All tokens of a row with its own state slot, which is the row's no more."""
    tokens = int(ledger.requests.committed[row])
    checks.hold(ledger, row, 0, tokens)
    shared = ledger.share(row, 0, tokens)
    return replace(shared, slots={n: state.detach(row) for n, state in ledger.states.items()})
