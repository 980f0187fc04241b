"""What an operation on the books presupposes; each check names everything that is wrong."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator

import numpy as np

from kvfactory.books.batch import Batch
from kvfactory.books.ids import Positions, Tokens, int64
from kvfactory.books.ledger import Ledger
from kvfactory.books.segments import Segment
from kvfactory.errors import BooksError, Problem


def encoder_tokens(
    ledger: Ledger, count: int, chain: tuple[Segment, ...], given: abc.Sequence[int]
) -> Tokens:
    """The encoder tokens that ``count`` new sequences have to reserve, int64 [count].

    Raises:
        BooksError: not one number for each sequence, more than a row holds, or another number
            than the prefix depends on.
    """
    tokens = int64(given, "cross_tokens")
    problems = []
    if len(tokens) not in (0, count):
        problems.append(Problem("cross_tokens", f"{len(tokens)} numbers", f"0 or {count}"))
    inherited = chain[-1].cross_tokens if chain else 0
    if inherited and (tokens != inherited).any():
        need = f"none, or the prefix's own {inherited}"
        problems.append(Problem("cross_tokens", str(tokens.tolist()), need))
    if ((tokens < 0) | (tokens > ledger.encoder_tokens)).any():
        need = f"0..{ledger.encoder_tokens} encoder tokens"
        problems.append(Problem("cross_tokens", str(tokens.tolist()), need))
    if problems:
        raise BooksError(*problems)
    if len(tokens) and not inherited:
        return tokens
    # More sequences than there are rows are refused by who admits them, without such an array.
    return np.zeros(min(count, ledger.requests.num_rows), np.int64)


def lengths(ledger: Ledger, tokens: Tokens) -> None:
    """Refuse sequences of more ``tokens`` int64 [batch] than a row holds.

    Raises:
        BooksError: one problem for each such sequence.
    """
    limit = ledger.row_tokens
    over = tokens > limit
    if np.count_nonzero(over):
        raise BooksError(
            *(
                Problem(
                    f"new_tokens[{index}]",
                    f"a sequence of {tokens[index]} tokens",
                    f"at most {limit}",
                    f"workload.tokens={tokens[index]}",
                )
                for index in over.nonzero()[0].tolist()
            )
        )


def forks(batch: Batch, depths: Positions, most_nodes: int) -> None:
    """Refuse trees that fork where not every node's state is kept; ``depths`` int64 [tokens].

    A state lies only in the paths from the root, of which one is accepted, so all are needed.

    Raises:
        BooksError: no trees at all are planned for (``most_nodes`` 0), or only smaller ones.
    """
    if batch.owners is None or batch.nodes is None:
        return
    forked = np.unique(batch.owners[depths != batch.nodes])
    most = int(batch.counts[forked].max(initial=0))
    if most > most_nodes:
        got = f"a draft tree of {most} nodes that forks, over recurrent states"
        need = f"at most {most_nodes} nodes" if most_nodes else "chains"
        fix = f"engine.draft_tree=true engine.draft_tokens={most - 1}"
        raise BooksError(Problem("parents", got, f"{need}, as planned", fix))


def fork(ledger: Ledger, row: int, awaited: bool) -> None:
    """Refuse to fork a row whose tokens are not all known and written.

    Raises:
        BooksError: why not.
    """
    problems = list(_unwritten(ledger, row))
    if awaited:
        got = "a sequence whose accepted counts are on the device"
        problems.append(Problem("sequence", got, "counts that have landed"))
    if ledger.requests.committed[row] < ledger.requests.reserved[row]:
        problems += [
            Problem(f"states.{name}", "a state that an open step writes", "no open step", "commit")
            for name in ledger.states
        ]
    if problems:
        raise BooksError(*problems)


def hold(ledger: Ledger, row: int, start: int, stop: int) -> None:
    """Refuse to hold tokens [start, stop) of a row from which nobody could go on.

    Raises:
        BooksError: why not.
    """
    committed, reserved = ledger.requests.committed[row], ledger.requests.reserved[row]
    problems = list(_unwritten(ledger, row))
    if not 0 <= start < stop <= committed:
        need = f"0 <= start < stop <= {committed}, the committed tokens"
        problems.append(Problem("tokens", f"[{start}, {stop})", need))
    problems += _released(ledger, row, start, stop)
    if not stop == committed == reserved:
        problems += [
            Problem(f"states.{name}", f"a state after {committed} tokens", f"{stop}, none open")
            for name in ledger.states
        ]
    if problems:
        raise BooksError(*problems)


def track(ledger: Ledger, row: int, tokens: int) -> None:
    """Refuse to track a state that no open step makes, nor is there now.

    Raises:
        BooksError: why not.
    """
    committed, reserved = ledger.requests.committed[row], ledger.requests.reserved[row]
    problems = []
    if not any(state.shape.tracking for state in ledger.states.values()):
        fix = "engine.state_tracking=two"
        problems.append(Problem("track", "no tracking slots", "some", fix))
    here = tokens == committed == reserved and tokens > 0
    if not (here or committed < tokens <= reserved):
        need = f"{committed + 1}..{reserved}, the tokens of open steps"
        problems.append(
            Problem("tokens", str(tokens), need if reserved > committed else str(committed))
        )
    if problems:
        raise BooksError(*problems)


def no_tree(in_flight: bool) -> None:
    """Refuse to track a state of a draft tree.

    Raises:
        BooksError: a tree of the sequence is in flight.
    """
    if in_flight:
        raise BooksError(Problem("sequence", "an open draft tree", "chains, or no open step"))


def tracked(ledger: Ledger, row: int) -> None:
    """Refuse to give away a tracked prefix from which nobody could go on.

    Raises:
        BooksError: why not.
    """
    problems, tokens = list(_unwritten(ledger, row)), ledger.tracked(row)
    if not tokens:
        problems.append(Problem("sequence", "no state tracked", "a committed one", "track"))
    problems += _released(ledger, row, 0, tokens)
    if problems:
        raise BooksError(*problems)


def settled(ledger: Ledger, row: int, in_flight: bool) -> None:
    """Refuse to describe a row while a step of it is in flight.

    Raises:
        BooksError: why not.
    """
    problems = list(_unwritten(ledger, row))
    if in_flight:
        got = "a sequence with a step whose outcome is open"
        problems.append(Problem("sequence", got, "a committed sequence", "commit"))
    if problems:
        raise BooksError(*problems)


def reserve(ledger: Ledger, tokens: int, cross_tokens: int) -> None:
    """Refuse a segment that no sequence could begin with.

    Raises:
        BooksError: why not.
    """
    problems = []
    for path, number, least, most in (
        ("tokens", tokens, 1, int(ledger.row_tokens)),
        ("cross_tokens", cross_tokens, 0, ledger.encoder_tokens),
    ):
        if not least <= number <= most:
            problems.append(Problem(path, str(number), f"{least}..{most}"))
    if problems:
        raise BooksError(*problems)


def adopt(ledger: Ledger, segment: Segment) -> None:
    """Refuse a segment whose states lie in checkpoints: those are copied, never taken over.

    Raises:
        BooksError: why not.
    """
    problems = [
        Problem(f"states.{name}", "a state in a checkpoint", "a state slot, or open(prefix=)")
        for name, state in ledger.states.items()
        if segment.slots[name] >= state.shape.num_slots
    ]
    if problems:
        raise BooksError(*problems)


def checkpoints(ledger: Ledger) -> None:
    """Refuse to save states where the plan has no room for saved ones.

    Raises:
        BooksError: a state table without checkpoints.
    """
    problems = [
        Problem(f"checkpoints.{name}", "none planned", "some planned", "memory.checkpoints=16")
        for name, state in ledger.states.items()
        if not state.shape.checkpoints
    ]
    if problems:
        raise BooksError(*problems)


def _released(ledger: Ledger, row: int, start: int, stop: int) -> Iterator[Problem]:
    for table in ledger.tables.values():
        needed = max(start, table.shape.lifetime.first_visible(stop))
        owned = table.owned_from(row)
        if owned > needed:
            got = f"a sequence whose pages before token {owned} are released"
            yield Problem(table.path, got, f"token {needed} for a query at {stop}")


def _unwritten(ledger: Ledger, row: int) -> Iterator[Problem]:
    for encoder in ledger.encoders.values():
        if not encoder.is_written(row):
            need = "a committed step that wrote them"
            yield Problem(encoder.table.path, "encoder tokens not yet written", need)
