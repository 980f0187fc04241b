"""The device's side of recurrent states: what a step, a commit, a fork or a hold does to them.

Copies read every source before any destination is written. Nothing waits for the device, except
``adopt``, which reads back the cursors of rings that came from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfactory.books import (
    Accepted,
    Books,
    Committed,
    PendingCounts,
    Segment,
    StepRecord,
    counts_of,
)
from kvfactory.books import Sequence as SequenceId
from kvfactory.errors import BooksError, Problem
from kvfactory.planning.cacheplan import Annex, CachePlan, GroupPlan, Recurrence
from kvfactory.planning.geometry import heads_of
from kvfactory.pools import Pool
from kvfactory.spec import LinearGroup
from kvfactory.states.landing import DeviceCounts
from kvfactory.states.planes import device_ids, fetch, store
from kvfactory.states.rings import PENDING, Mirror, Ring
from kvfactory.states.views import StateViews, snapshot_views
from kvfactory.steps.step import Step

Ids = NDArray[np.integer]


class StateStore:
    """The states of all recurrent groups of ``plan``, with their annexes, over ``books``.

    A prefix cache calls ``track``, ``checkpoint``, ``donate`` and ``retire`` here, not on
    ``books``: where a state has a ring, more than the books has to agree.
    """

    def __init__(self, plan: CachePlan, pools: Mapping[str, Pool], books: Books) -> None:
        self._plan, self._pools, self._books = plan, pools, books
        self._stored = () if plan.counted_bytes else plan.groups
        self._groups = [g for g in self._stored if isinstance(g.work, Recurrence)]
        self._annexes = {
            (group.work.of, group.work.use): pools[group.name]
            for group in (*plan.groups, *plan.annexes)
            if isinstance(group.work, Annex)
        }
        self._num_slots = {state.name: state.num_slots for state in plan.states}
        self._nodes = 1 + plan.limits.draft_tokens if plan.limits.draft_tokens else 0
        self._snapshots = {
            g.name: snapshot_views(self._annexes[g.name, "snapshots"], g)
            for g in self._groups
            if (g.name, "snapshots") in self._annexes
        }
        self._rings = {g.name: ring for g in self._groups if (ring := self._ring(g))}
        self._mirrors = {name: self._mirror(ring) for name, ring in self._rings.items()}

    def _ring(self, group: GroupPlan) -> Ring | None:
        pool = self._annexes.get((group.name, "ring"))
        spec = self._plan.spec.model.groups[group.group]
        if pool is None or not isinstance(spec, LinearGroup):
            return None
        heads = heads_of(spec)
        assert heads is not None
        assert isinstance(pool.group.work, Annex)
        return Ring(pool, self._pools[group.name], heads, pool.group.work.tokens, self._nodes)

    def _mirror(self, ring: Ring) -> Mirror:
        return Mirror(ring.pool.num_pages, ring.tokens, ring.drafts, ring.has_cursor)

    # ---- what layers see ---------------------------------------------------------------------

    def views(self, group: GroupPlan, layer_index: int, step: Step) -> StateViews:
        """The states of one layer for the kernels of ``step``."""
        pool, arrays = self._pools[group.name], step.states[group.table]
        snapshots, ring = self._snapshots.get(group.name, {}), self._rings.get(group.name)
        return StateViews(
            group=group,
            index=layer_index,
            tensors=pool.views(layer_index),
            slots=arrays.slots,
            fresh=arrays.fresh,
            rows=step.rows,
            nodes=self._nodes,
            snapshots={name: view[layer_index] for name, view in snapshots.items()},
            records=ring.pool.views(layer_index) if ring else {},
            pool=pool,
            ring=ring,
        )

    # ---- steps -------------------------------------------------------------------------------

    def begin(self, record: StepRecord) -> None:
        """Make the copies that are due and clear fresh states, before a step's layers run."""
        if not record.states:
            return
        counts = np.diff(record.q_indptr)
        for table, state in record.states.items():
            self._copy(table, state.copies)
            fresh = state.slots[state.fresh]
            for group in self._stored if len(fresh) else ():
                if group.table == table:
                    self._pools[group.name].zero(fresh.tolist())
            for name, mirror in self._mirrors.items():
                if self._plan.by_name[name].table == table:
                    mirror.learn(fresh)
                    mirror.begin(state.slots, counts, record.settled)

    def copy_due(self) -> None:
        """Make the copies that are due now, for readers of held states before the next step."""
        for table, pairs in self._books.copies().items():
            self._copy(table, pairs)

    def _copy(self, table: str, pairs: NDArray[np.int64]) -> None:
        """Copy between places (source, destination) int64 [n, 2]: state slots and checkpoints."""
        if not len(pairs):
            return
        limit = self._num_slots[table]
        saved = pairs >= limit
        within, (outside,) = ~saved.any(1), (pairs[saved.any(1)],)
        for group in self._groups:
            if group.table == table:
                restored = [self._restored(group, pair, limit) for pair in outside]
                for pair, values in zip(outside, restored, strict=True):
                    if pair[1] >= limit:
                        self._place(group, pair[1], limit, values)
                self._pools[group.name].copy_pages(pairs[within])
                for pair, values in zip(outside, restored, strict=True):
                    if pair[1] < limit:
                        self._place(group, pair[1], limit, values)
        self._empty_rings(table, pairs[pairs[:, 1] < limit, 1])

    def _restored(
        self, group: GroupPlan, pair: NDArray[np.int64], limit: int
    ) -> list[dict[str, Tensor]]:
        """The tensors of every layer at a copy's source, in their own types."""
        pool, slot = self._at(group, int(pair[0]), limit)
        layers = range(len(group.layers))
        return [{t.name: fetch(pool, i, slot, t.name) for t in group.tensors} for i in layers]

    def _place(
        self, group: GroupPlan, place: int, limit: int, values: Sequence[Mapping[str, Tensor]]
    ) -> None:
        pool, slot = self._at(group, int(place), limit)
        for index, tensors in enumerate(values):
            for name, value in tensors.items():
                store(pool, index, slot, name, value)

    def _at(self, group: GroupPlan, place: int, limit: int) -> tuple[Pool, Tensor]:
        pool = self._pools[group.name]
        if place >= limit:
            pool, place = self._annexes[group.name, "checkpoints"], place - limit
        return pool, device_ids(pool, [place])

    def _empty_rings(self, table: str, slots: NDArray[np.int64]) -> None:
        for name, ring in self._rings.items():
            if self._plan.by_name[name].table == table and len(slots):
                self._mirrors[name].learn(slots)
                for index in range(len(ring.pool.group.layers)):
                    ring.empty(index, device_ids(ring.pool, slots))

    def move(self, table: str, target: Ids, source: Ids) -> None:
        """Copy whole states int [n] of ``table`` to other slots, rings and cursors with them.

        As if every source were read before any destination is written; the books know nothing.
        """
        for group in self._stored:
            if group.table == table:
                self._pools[group.name].move_pages(target, source)
        for name, mirror in self._mirrors.items():
            if self._plan.by_name[name].table == table:
                mirror.copy(target, source)

    # ---- commits -----------------------------------------------------------------------------

    def check(self, record: StepRecord, accepted: Accepted) -> None:
        """Refuse to reject tokens that recurrent states cannot forget.

        Raises:
            BooksError: fewer than all of more tokens than a step may draft; or no counts or paths.
        """
        if not self._groups or accepted is None or isinstance(accepted, PendingCounts):
            return
        counts = np.diff(record.q_indptr)
        taken = counts_of(accepted).tolist()
        need = f"all, or a step of at most {self._nodes} tokens"
        fix = f"engine.draft_tokens={max(1, int(counts.max(initial=1)) - 1)}"
        wrong = [
            Problem(f"accepted[{entry}]", f"{stay} of {new} tokens of a state", need, fix)
            for entry, (new, stay) in enumerate(zip(counts.tolist(), taken, strict=False))
            if new > self._nodes and stay < new
        ]
        if wrong:
            raise BooksError(*wrong)

    def commit(self, step: Step, done: Committed, accepted: Accepted) -> None:
        """Bring the states of drafts to what was accepted, wherever the counts are."""
        if not self._groups:
            return
        host, counts = step.host, np.diff(step.host.q_indptr)
        drafted = (counts > 0) & (counts <= self._nodes)
        if not drafted.any():
            return
        if isinstance(accepted, DeviceCounts):
            taken = accepted.counts.long()
            nodes = taken - 1
        else:
            assert done.accepted is not None
            assert done.last_nodes is not None
            taken, nodes = torch.from_numpy(done.accepted), torch.from_numpy(done.last_nodes)
        for group in self._groups:
            slots = host.states[group.table].slots
            pool = self._pools[group.name]
            kept = device_ids(pool, nodes).where(device_ids(pool, drafted).bool(), -1)
            target = device_ids(pool, slots).where(kept >= 0, 0)
            self._restore(group, target, device_ids(pool, host.rows), kept.clamp(min=0))
            ring = self._rings.get(group.name)
            if ring and ring.drafts:
                folds = self._mirrors[group.name].commit(slots, counts, done.accepted)
                stay = device_ids(pool, taken).where(kept >= 0, 0)
                for index in range(len(group.layers)):
                    ring.commit(index, target, stay, device_ids(pool, folds))

    def _restore(self, group: GroupPlan, slots: Tensor, rows: Tensor, nodes: Tensor) -> None:
        """Snapshots of ``nodes`` int64 [batch] to ``slots``; where none counts, to the sink."""
        for name, view in self._snapshots.get(group.name, {}).items():
            for index in range(len(group.layers)):
                store(self._pools[group.name], index, slots, name, view[index, rows, nodes])

    # ---- rings -------------------------------------------------------------------------------

    def ring(self, group: GroupPlan) -> Ring | None:
        """The replay ring of ``group``, where it has one."""
        return self._rings.get(group.name)

    def flush(self, sequences: Sequence[SequenceId]) -> None:
        """Fold what replay rings of ``sequences`` hold into their states.

        Forks, holds, tracked states and transfers need that; moves and offloads do not.

        Raises:
            BooksError: a stale handle, or a step in flight.
        """
        self.copy_due()
        for sequence in sequences:
            for table, slot in self._books.view(sequence).slots.items():
                self._flush(table, np.array([slot] if slot else [], np.int64))

    def _flush(self, table: str, slots: NDArray[np.int64]) -> None:
        for name, ring in self._rings.items():
            if self._plan.by_name[name].table == table:
                full = slots[self._mirrors[name].pending[slots] > 0]
                self._mirrors[name].learn(full)
                for index in range(len(ring.pool.group.layers) if len(full) else 0):
                    ring.flush(index, device_ids(ring.pool, full))

    def check_flushed(self, sequence: SequenceId) -> None:
        """Refuse to copy a state whose ring holds records.

        Raises:
            BooksError: the ring is not known to be empty; or a stale handle.
        """
        for table, place in self._books.state_places(sequence).items():
            for name, mirror in self._mirrors.items():
                if self._plan.by_name[name].table == table and mirror.at(place):
                    got = f"up to {mirror.at(place)} tokens in its replay ring"
                    fix = "cache.states.flush([sequence])"
                    raise BooksError(Problem(f"states.{name}", got, "a flushed state", fix))

    def receive(self, sequence: SequenceId) -> None:
        """The states of ``sequence`` come from elsewhere, without rings: those are empty."""
        for table, slot in self._books.state_slots(sequence).items():
            self._empty_rings(table, np.array([slot]))

    def adopt(self, table: str, slots: Ids) -> None:
        """Slots were filled from outside (load, move, transfer): learn how full their rings are."""
        for name, ring in self._rings.items():
            if self._plan.by_name[name].table == table:
                cursor = ring.cursor(0, device_ids(ring.pool, slots))
                self._mirrors[name].learn(slots, cursor[:, PENDING].cpu().numpy())

    # ---- for a prefix cache ------------------------------------------------------------------

    def track(self, sequence: SequenceId, tokens: int | None = None) -> dict[str, int]:
        """``Books.track`` of a flushed state, or of one that a layer of an open step writes.

        The layer may write at once: copies that are due out of the slots are made before.

        Raises:
            OutOfPages, BooksError: as ``Books.track``; or a ring that is not empty.
        """
        if tokens is None or tokens == self._books.committed([sequence])[0]:
            self.check_flushed(sequence)
        slots = self._books.track(sequence, tokens)
        if tokens is not None:
            self.copy_due()
        for table, slot in slots.items() if tokens is not None else ():
            self._empty_rings(table, np.array([slot]))
        return slots

    def checkpoint(self, sequence: SequenceId, tokens: int) -> Segment:
        """A held prefix whose state is a checkpoint, in eight-bit integers; see ``Books.hold``.

        Raises:
            OutOfPages, BooksError: as ``Books.hold``; or a ring that is not empty.
        """
        self.check_flushed(sequence)
        return self._books.hold(sequence, tokens, checkpoint=True)

    def donate(self, sequence: SequenceId) -> Segment:
        """``Books.donate``: the tracked prefix with its state slot.

        Raises:
            OutOfPages, BooksError: as ``Books.donate``.
        """
        return self._books.donate(sequence)

    def retire(self, sequence: SequenceId, tracked: bool = False) -> Segment:
        """``Books.retire``: the sequence ends, its prefix and state slot stay.

        Raises:
            BooksError: as ``Books.retire``; or a ring that is not empty.
        """
        if not tracked:
            self.check_flushed(sequence)
        return self._books.retire(sequence, tracked)
