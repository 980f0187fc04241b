"""A model device: memory that remembers which token each slot holds, driven by step records only.

It knows what a real one knows: its own tables, kept up to date by ``updates``, and exact lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvfactory.books import Committed, Sequence, StepRecord, TableShape

POISON = -1


@dataclass(eq=False)
class Timeline:
    """A sequence as the device sees it: the accepted tokens of every step that ran.

    ``writer`` is the step that writes the encoder tokens ``cross``, once there is one.
    """

    handle: Sequence
    tokens: list[int]
    cross: list[int] = field(default_factory=list)
    committed: int = 0
    writer: Launch | None = None


@dataclass(eq=False)
class Launch:
    """A step with what it will write: ``drafts[b]`` new tokens, ``paths[b]`` accepted nodes."""

    record: StepRecord
    sequences: list[Timeline]
    drafts: list[list[int]]
    paths: list[list[int]]
    launched: bool = False

    @property
    def is_tree(self) -> bool:
        return self.record.parents is not None


class Device:
    def __init__(self, shapes: tuple[TableShape, ...], states: tuple[str, ...], rows: int) -> None:
        self.shapes = {shape.name: shape for shape in shapes}
        self.rows = {s.name: np.zeros((rows, s.row_pages), np.int64) for s in shapes}
        self.memory = {s.name: np.full(s.num_pages * s.page_tokens, POISON) for s in shapes}
        self.states: dict[str, dict[int, tuple[int, ...]]] = {name: {} for name in states}

    def slots(self, table: str, row: int, positions: np.ndarray, rows: np.ndarray) -> np.ndarray:
        page_tokens = self.shapes[table].page_tokens
        return rows[row, positions // page_tokens] * page_tokens + positions % page_tokens

    def begin(self, record: StepRecord) -> None:
        """What happens at extend: table entries, page copies, state copies, cleared states."""
        for name, step in record.tables.items():
            rows, columns, pages = step.updates.T
            self.rows[name][rows, columns] = pages
            np.testing.assert_array_equal(self.rows[name][rows, columns], pages)
            paged = self.memory[name].reshape(-1, self.shapes[name].page_tokens)
            paged[step.copies[:, 1]] = paged[step.copies[:, 0]]
        for name, state in record.states.items():
            self.copy_states(name, state.copies)
            for slot in state.slots[state.fresh].tolist():
                self.states[name][slot] = ()

    def copy_states(self, name: str, copies: np.ndarray) -> None:
        memory = self.states[name]
        read = [memory[source] for source in copies[:, 0].tolist()]
        memory.update(zip(copies[:, 1].tolist(), read, strict=True))

    def launch(self, launch: Launch) -> None:
        """Write the step's tokens where exact lengths say, and read what its queries see."""
        record = launch.record
        for b, sequence in enumerate(launch.sequences):
            row, draft = int(record.rows[b]), launch.drafts[b]
            before = len(sequence.tokens)
            if record.settled[b]:
                assert record.prefix[b] == before
            assert record.prefix[b] >= before
            positions = before + np.arange(len(draft))
            span = slice(record.q_indptr[b], record.q_indptr[b + 1])
            for name, step in record.tables.items():
                shape = self.shapes[name]
                if shape.lifetime.name == "encoder":
                    continue
                slots = self.slots(name, row, positions, self.rows[name])
                assert (slots >= shape.page_tokens).all(), "a write to the sink"
                if record.settled[b]:
                    np.testing.assert_array_equal(slots, step.slots[span])
                self.memory[name][slots] = draft
                seen = np.arange(shape.lifetime.first_visible(before), before)
                assert not len(seen) or step.first_page[b] * shape.page_tokens <= seen[0]
                read = self.memory[name][self.slots(name, row, seen, self.rows[name])]
                np.testing.assert_array_equal(read, np.array(sequence.tokens)[seen])
            accepted = [draft[node] for node in launch.paths[b]]
            for name, state in record.states.items():
                slot = int(state.slots[b])
                assert self.states[name][slot] == tuple(sequence.tokens), "a wrong state"
                self.states[name][slot] += tuple(accepted)
            sequence.tokens += accepted
        self._write_encoders(launch)
        launch.launched = True

    def _write_encoders(self, launch: Launch) -> None:
        for name, step in launch.record.tables.items():
            if self.shapes[name].lifetime.name != "encoder":
                continue
            assert step.kv_lengths.tolist() == [len(s.cross) for s in launch.sequences]
            pending = [t for s in launch.sequences if s.writer is launch for t in s.cross]
            assert len(pending) == len(step.slots)
            self.memory[name][step.slots] = pending

    def finish(self, done: Committed) -> None:
        """What happens at commit: the accepted path of each tree moves to the front."""
        for name, moves in done.moves.items():
            self.memory[name][moves[:, 1]] = self.memory[name][moves[:, 0]]
