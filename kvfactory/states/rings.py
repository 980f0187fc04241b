"""Replay rings: what drove the last tokens of a state, kept to be folded into it later.

A record is the key, value, gate (log decay) and, under the delta rule of drafts, beta of a token.
Folding replays records through the recurrence (``reference.recurrence``), token by token: what it
gives is what computing the tokens one by one would have given. Nothing here waits for the device
but ``append``, which only the reference flow calls.

The cursor of a slot counts its ``pending`` records, names the place of the oldest (``base``), and
flags whether its last commit folded them. Every layer has one, so that layers do not wait for one
another. ``Mirror`` follows the pending records on the host, for refusals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfactory.planning.annexes import CURSOR
from kvfactory.planning.geometry import Heads
from kvfactory.pools import Pool
from kvfactory.reference.recurrence import Drive, scan
from kvfactory.states.planes import fetch, store

PENDING, BASE, FLUSH = range(len(CURSOR))
RECORDS = ("value", "key", "gate", "beta")

Slots = NDArray[np.integer]


@dataclass(frozen=True)
class Ring:
    """The ring of one group beside the pool of its states.

    ``tokens`` records fit; a step verifies up to ``drafts`` (0 for a ring of decodes).
    """

    pool: Pool
    states: Pool
    heads: Heads
    tokens: int
    drafts: int

    @property
    def has_cursor(self) -> bool:
        """Whether records outlive a commit."""
        return self.pool.group.has("cursor")

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of a recurrent state in stored order."""
        return tuple(name for name, _ in self.states.group.tensor("recurrent").logical.axes)

    def cursor(self, layer_index: int, slots: Tensor) -> Tensor:
        """Cursors [n, 3] int64; those of a ring without them are 0."""
        if not self.has_cursor:
            return slots.new_zeros(len(slots), len(CURSOR))
        return fetch(self.pool, layer_index, slots, "cursor").long()

    def set_cursor(self, layer_index: int, slots: Tensor, cursor: Tensor) -> None:
        """Write cursors [n, 3], if the ring has them."""
        if self.has_cursor:
            store(self.pool, layer_index, slots, "cursor", cursor)

    def current(self, layer_index: int, slots: Tensor, most: int | None = None) -> Tensor:
        """States [n, *axes] with all pending records folded in; the pool is left alone.

        No slot has more than ``most`` of them (None: the ring may be full).
        """
        cursor = self.cursor(layer_index, slots)
        most = self.tokens if most is None else most
        if not self.has_cursor or not most:
            return fetch(self.states, layer_index, slots, "recurrent")
        return self.folded(layer_index, slots, cursor[:, BASE], cursor[:, PENDING], most)

    def folded(
        self, layer_index: int, slots: Tensor, base: Tensor, counts: Tensor, most: int
    ) -> Tensor:
        """States [n, *axes] after ``counts`` int64 [n] records from place ``base`` int64 [n] on.

        No count is above ``most``.
        """
        state = fetch(self.states, layer_index, slots, "recurrent")
        order = torch.arange(most, device=slots.device)
        places = (base[:, None] + order) % self.tokens
        kept = order < counts[:, None]
        records = {
            name: fetch(self.pool, layer_index, slots, name).gather(1, _like(places, rows))
            for name, rows in self._shapes(len(slots))
        }
        drive = self._drive(records, kept)
        return scan(state, self.axes, drive)[1].to(state.dtype)

    def _shapes(self, count: int) -> list[tuple[str, tuple[int, ...]]]:
        return [
            (t.name, (count, *(extent for _, extent in t.logical.axes)))
            for t in self.pool.group.tensors
            if t.name in RECORDS
        ]

    def _drive(self, records: dict[str, Tensor], kept: Tensor) -> Drive:
        """The drive of ``records``; those not ``kept`` bool [n, tokens] leave a state as it is."""
        masked = {name: x.float() * _like(kept, x.shape) for name, x in records.items()}
        key = masked["key"].repeat_interleave(self.heads.heads // self.heads.key_heads, -2)
        gate = masked["gate"]
        gate = gate if gate.dim() == key.dim() else gate.unsqueeze(-1)
        return Drive(torch.zeros_like(key), key, masked["value"], gate, masked.get("beta"))

    def append(
        self, layer_index: int, slot: Tensor, place: Tensor, record: dict[str, Tensor]
    ) -> None:
        """Write a ``record`` (name -> its axes but token) of ``slot`` int64 [1] at ``place``."""
        for name, _ in self._shapes(1):
            rows = fetch(self.pool, layer_index, slot, name)
            rows[0, int(place)] = record[name].to(rows.dtype)
            store(self.pool, layer_index, slot, name, rows)

    def flush(self, layer_index: int, slots: Tensor) -> None:
        """Fold all pending records of ``slots`` int64 [n] into their states and forget them."""
        store(self.states, layer_index, slots, "recurrent", self.current(layer_index, slots))
        self.empty(layer_index, slots)

    def empty(self, layer_index: int, slots: Tensor) -> None:
        """Forget all records of ``slots``."""
        self.set_cursor(layer_index, slots, slots.new_zeros(len(slots), len(CURSOR)))

    def commit(self, layer_index: int, slots: Tensor, accepted: Tensor, folds: Tensor) -> None:
        """The first ``accepted`` int64 [n] drafts of ``slots`` stay.

        Without a cursor they are folded at once, else when another step would find no room;
        ``folds`` int64 [m] are the entries of which that may be so, as far as the host knows.
        """
        cursor = self.cursor(layer_index, slots)
        pending, base = cursor[:, PENDING] + accepted, cursor[:, BASE]
        full = pending > self.tokens - self.drafts if self.has_cursor else pending >= 0
        counts = pending.where(full, 0)
        if len(folds):
            some = slots[folds]
            folded = self.folded(layer_index, some, base[folds], counts[folds], self.tokens)
            store(self.states, layer_index, some, "recurrent", folded)
        new = (pending - counts, (base + counts) % self.tokens, full.long())
        self.set_cursor(layer_index, slots, torch.stack(new, -1))


class Mirror:
    """Pending records of each slot as far as the host knows, int64 [slots].

    ``pending`` are upper bounds where counts stayed on the device, until the ring is empty again;
    ``exact`` bool [slots] elsewhere.
    """

    def __init__(self, num_slots: int, tokens: int, drafts: int, has_cursor: bool) -> None:
        self.pending = np.zeros(num_slots, np.int64)
        self.exact = np.ones(num_slots, np.bool_)
        self._tokens, self._drafts, self._cursor = tokens, drafts, has_cursor

    def at(self, place: int) -> int:
        """Records of the state at ``place``; none in a checkpoint, and the sink has no state."""
        return int(self.pending[place]) if 0 < place < len(self.pending) else 0

    def learn(self, slots: Slots, pending: NDArray[np.integer] | int = 0) -> None:
        """``slots`` have ``pending`` records now."""
        self.pending[slots], self.exact[slots] = pending, True

    def copy(self, target: Slots, source: Slots) -> None:
        """The records of ``source`` are those of ``target`` too."""
        pending, exact = self.pending[source], self.exact[source]
        self.pending[target], self.exact[target] = pending, exact

    def begin(self, slots: Slots, counts: NDArray[np.integer], settled: NDArray[np.bool_]) -> None:
        """A step of ``counts`` new tokens starts: prompts empty a ring, a decode adds to one.

        Where it is not ``settled``, what an earlier step drafted comes into the ring before it is
        emptied, but is known later: then only a bound is known.
        """
        before = self.pending[slots]
        if self._drafts:
            prompts = counts > self._drafts
            after, emptied = before, prompts & settled
            self.exact[slots] &= ~prompts
        else:
            emptied = counts > 1
            after = np.where(counts > 0, before % self._tokens + counts, before)
        self.pending[slots] = np.where(emptied, 0, after)
        self.exact[slots] |= emptied

    def commit(
        self,
        slots: Slots,
        counts: NDArray[np.integer],
        accepted: NDArray[np.integer] | None,
    ) -> NDArray[np.int64]:
        """Of a step of ``counts`` tokens ``accepted`` stay; None while only the device knows.

        Returned are the entries int64 [n] whose records may be folded now.
        """
        drafted = (counts > 0) & (counts <= self._drafts)
        most = counts if accepted is None else accepted
        if not self._cursor:
            return np.flatnonzero(drafted & (most > 0))
        before, exact = self.pending[slots], self.exact[slots] & (accepted is not None)
        room = self._tokens - self._drafts
        full = before + most > room
        # What may be full is folded or not: then up to ``room`` records are left.
        after = np.where(full, np.where(exact, 0, room), before + most)
        self.pending[slots] = np.where(drafted, after, before)
        self.exact[slots] = np.where(drafted, exact, self.exact[slots])
        return np.flatnonzero(drafted & full)


def _like(index: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """``index`` [n, m], the same for all axes of ``shape`` behind the second."""
    return index.view(*index.shape, *(1 for _ in shape[2:])).expand(*index.shape, *shape[2:])
