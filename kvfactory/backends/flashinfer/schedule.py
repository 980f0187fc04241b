"""What a step launches: kernels over all of its requests, or over some, with their page lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvfactory.backends.flashinfer import masks
from kvfactory.backends.flashinfer.calls import Lists, Module, Space
from kvfactory.backends.flashinfer.choose import FULL, KernelName, Shape
from kvfactory.backends.flashinfer.lists import ListJob, build_lists
from kvfactory.backends.flashinfer.partials import query_tile
from kvfactory.backends.flashinfer.plans import Ask, Planner
from kvfactory.backends.flashinfer.sizes import Slots
from kvfactory.backends.flashinfer.work import Counts, Work, work_of
from kvfactory.books import StepRecord
from kvfactory.books.ids import indptr
from kvfactory.errors import Problem, SpecError
from kvfactory.pools.ids import sent
from kvfactory.steps.step import Step

NO_PAGE = -1
"""A page that XQA reads as zeros."""


class Launch(NamedTuple):
    """One planned launch.

    It covers the first ``num_rows`` rows of q or, with ``rows`` int64, those; ``q_indptr`` counts
    its own. ``module`` is None for ``xqa``, which has no plan but ``tables`` int32 [batch, pages].
    """

    kernel: KernelName
    module: Module | None
    space: Space | None
    info: Any
    q_indptr: Tensor
    lists: Lists | None
    causal: bool
    window_left: int
    num_rows: int
    rows: Tensor | None = None
    tables: Tensor | None = None
    lengths: Tensor | None = None


@dataclass
class Schedule:
    """A step's launches; ``jobs`` are page lists of parts of it, to build before the first.

    ``busy`` unless there is nothing to launch: a graph's step always launches, whatever padding
    it holds. ``begun`` once the launches are planned and the lists built.

    ``new`` and ``prefix`` replace ``main`` where new tokens are attended as they came. ``slots``
    int64 [n] are the entries that the step reads, for stores that decode them first.
    """

    record: StepRecord
    constants: int
    work: Work
    busy: bool
    begun: bool = False
    main: tuple[Launch, ...] = ()
    new: tuple[Launch, ...] = ()
    prefix: tuple[Launch, ...] = ()
    prefix_mask: masks.Packed | None = None
    general: Launch | None = None
    jobs: tuple[ListJob, ...] = ()
    slots: Tensor | None = None


def lists_of(step: Step, table: str) -> Lists:
    """The lists of a whole step, which its index brings."""
    arrays = step.tables[table].lists
    return Lists(arrays.indptr, arrays.last_page, arrays.indices)


@dataclass
class Scheduler:
    """Schedules for one shape, by the buffers that a step lives in."""

    planner: Planner
    prefix_lists: list[Lists]
    xqa_tables: list[Tensor]
    slots: Slots
    lossless: bool
    copies: bool
    _made: dict[int, Schedule] = field(default_factory=dict)
    _graph: int = -1

    @property
    def shape(self) -> Shape:
        """What it schedules."""
        return self.planner.shape

    def of(self, step: Step) -> Schedule:
        """The schedule of a prepared step."""
        return self._made[step.buffer]

    def prepare(self, step: Step, constants: int) -> None:
        """Plan ``step`` for a graph; ``constants`` numbers the constants that launches bake in.

        An eager step is planned when it begins, as it may never: a graph may replay it.

        Raises:
            SpecError: constants were set after a graph was captured with the old ones.
            BooksError: lengths that are not decided yet where the kernels carry them.
        """
        held = self._made.get(step.buffer)
        if held and step.graph and held.constants != constants:
            need = "a graph captured after the last set_constants"
            raise SpecError(Problem("graph", "one with older constants", need, "capture again"))
        same = held and held.record is step.host and held.constants == constants
        if same and (step.graph is None or self._graph == step.buffer):
            return
        exact = self.planner.rules.exact_lengths
        work = work_of(step, self.shape, exact)
        busy = work.rows > 0 or step.graph is not None
        schedule = self._made[step.buffer] = Schedule(step.host, constants, work, busy)
        if step.graph:
            self._graph = step.buffer
            self._plan(step, schedule)
        elif busy and not work.settled:
            self.planner.kernel_for(work, step)

    def begin(self, step: Step) -> None:
        """Plan an eager ``step``; build its further page lists on the device, and XQA's tables."""
        schedule = self.of(step)
        if not schedule.busy or (schedule.begun and step.graph is None):
            return
        if step.graph is None:
            self._plan(step, schedule)
        schedule.begun = True
        for job in schedule.jobs:
            build_lists(job)
        for launch in schedule.main:
            if launch.tables is not None:
                self._fill_tables(launch.tables, step)
        if self.copies:
            total, page_tokens = int(schedule.work.lengths.pages.sum()), self.shape.page_tokens
            pages = lists_of(step, self.shape.table).indices[:total].long()
            within = torch.arange(page_tokens, device=pages.device)
            schedule.slots = (pages[:, None] * page_tokens + within).flatten()

    def _plan(self, step: Step, schedule: Schedule) -> None:
        if self.planner.kernels.merged and not (schedule.work.decodes and self.lossless):
            self._plan_merged(step, schedule)
        else:
            self._plan_main(step, schedule)

    def _fill_tables(self, tables: Tensor, step: Step) -> None:
        """The block tables of the step's requests, -1 (read as zeros) for pages before a window."""
        table = step.tables[self.shape.table]
        torch.index_select(table.pages, 0, step.rows, out=tables)
        if self.shape.window_left != FULL:
            column = torch.arange(tables.shape[1], dtype=torch.int32, device=tables.device)
            tables.masked_fill_(column < table.first_page[:, None], NO_PAGE)

    def main(self, step: Step) -> tuple[Launch, ...]:
        """Launches over what is stored; where steps are merged, planned when first asked for."""
        schedule = self.of(step)
        if not schedule.main:
            self._plan_main(step, schedule)
        return schedule.main

    def general(self, step: Step) -> tuple[Launch, Work]:
        """A launch that takes a custom mask, planned when first asked for."""
        schedule = self.of(step)
        if schedule.general is None:
            ask = self._ask(self.planner.kernels.general.name, schedule.work, self.slots.general)
            ask = ask._replace(window_left=FULL, causal=False)
            schedule.general = self._launch(step, ask)
        return schedule.general, schedule.work

    # ---- launches ----------------------------------------------------------------------------

    def _ask(self, name: KernelName, work: Work, slot: int) -> Ask:
        shape = self.shape
        causal = shape.causal and not work.decodes
        return Ask(name, work, slot, causal, shape.window_left)

    def _launch(self, step: Step, ask: Ask) -> Launch:
        """A launch over all requests and the step's own page lists, planned unless by ``xqa``."""
        module = None if ask.name == "xqa" else self.planner.module(ask)
        space, info = self.planner.plan(step, ask) if module else (None, None)
        return Launch(
            kernel=ask.name,
            module=module,
            space=space,
            info=info,
            q_indptr=step.q_indptr,
            lists=lists_of(step, self.shape.table),
            causal=ask.causal,
            window_left=ask.window_left,
            num_rows=step.graph.rows if step.graph else ask.work.rows,
        )

    def _plan_main(self, step: Step, schedule: Schedule) -> None:
        """One launch, or in deterministic mode one for all requests of a query tile."""
        work = schedule.work
        parts: list[Counts | None] = [None]
        if self.planner.rules.deterministic and step.graph is None:
            found = classes(work, self.shape)
            parts = [*found] if len(found) > 1 else parts
        for slot, entries in enumerate(parts):
            part = work if entries is None else work.only(entries)
            ask = self._ask(self.planner.kernel_for(part, step), part, slot)
            launch = self._launch(step, ask)
            if ask.name == "xqa":
                launch = self._with_tables(step, launch)
            if entries is not None:
                launch = self._over(step, schedule, launch, part, entries)
            schedule.main += (launch,)

    def _over(
        self, step: Step, schedule: Schedule, launch: Launch, part: Work, entries: Counts
    ) -> Launch:
        """``launch`` over some batch entries, with page lists and rows of its own."""
        device, table = step.rows.device, step.tables[self.shape.table]
        chosen = sent(torch.from_numpy(entries), device)
        lists = new_lists(len(entries), int(part.lengths.pages.sum()), device)
        job = ListJob(
            pages=table.pages,
            rows=step.rows[chosen],
            tokens=table.kv_lengths[chosen],
            first_page=table.first_page[chosen],
            page_tokens=self.shape.page_tokens,
            most_pages=int(part.lengths.pages.max(initial=0)),
            out=lists,
        )
        schedule.jobs += (job,)
        own = indptr(part.lengths.q_tokens)
        starts = step.host.q_indptr[:-1][entries].astype(np.int64)
        rows = np.repeat(starts - own[:-1], part.lengths.q_tokens) + np.arange(part.rows)
        return launch._replace(
            rows=sent(torch.from_numpy(rows), device),
            q_indptr=sent(torch.from_numpy(own), device),
            lists=lists,
        )

    def _with_tables(self, step: Step, launch: Launch) -> Launch:
        buffer = self.xqa_tables[min(step.buffer, len(self.xqa_tables) - 1)]
        lengths = step.tables[self.shape.table].kv_lengths
        return launch._replace(tables=buffer[: len(step.rows)], lengths=lengths)

    def _plan_merged(self, step: Step, schedule: Schedule) -> None:
        """The ragged launch over new tokens, and the paged one over what came before."""
        work, kernels = schedule.work, self.planner.kernels
        ask = self._ask(kernels.new.name, work.ragged(), self.slots.new)
        ask = ask._replace(ragged=True, causal=self.shape.causal)
        schedule.new = (self._launch(step, ask)._replace(lists=None),)
        if (work.lengths.prefix > 0).any():
            schedule.prefix = (self._plan_prefix(step, schedule),)

    def _plan_prefix(self, step: Step, schedule: Schedule) -> Launch:
        shape, work = self.shape, schedule.work
        before = work.before(shape.page_tokens)
        left = prefix_window(work, shape.window_left)
        if left is None:
            device = step.rows.device
            schedule.prefix_mask = masks.prefix_window(
                before.lengths, shape.page_tokens, shape.window_left, device
            )
            left = FULL
        kernels, table = self.planner.kernels, step.tables[shape.table]
        name = (kernels.prefix if work.settled else kernels.general).name
        ask = self._ask(name, before, self.slots.prefix)._replace(causal=False, window_left=left)
        lists = self._prefix_lists(step, work.batch)
        most = int(before.lengths.pages.max(initial=0))
        columns = (step.rows, step.prefix, table.first_page)
        schedule.jobs += (ListJob(table.pages, *columns, shape.page_tokens, most, lists),)
        return self._launch(step, ask)._replace(lists=lists)

    def _prefix_lists(self, step: Step, batch: int) -> Lists:
        whole = self.prefix_lists[min(step.buffer, len(self.prefix_lists) - 1)]
        return Lists(whole.indptr[: batch + 1], whole.last_page[:batch], whole.indices)


def new_lists(batch: int, pages: int, device: torch.device) -> Lists:
    """Room for the lists of some requests."""
    sizes = (batch + 1, batch, max(pages, 1))
    return Lists(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))


def classes(work: Work, shape: Shape) -> list[Counts]:
    """Batch entries with new tokens by the query tile that their own tokens ask for."""
    q_tokens = work.lengths.q_tokens
    busy = q_tokens.nonzero()[0]
    tiles = [query_tile(int(n) * shape.group, shape.v_dim) for n in q_tokens[busy]]
    return [busy[np.equal(tiles, tile)] for tile in sorted(set(tiles))]


def prefix_window(work: Work, window_left: int) -> int | None:
    """``window_left`` over a prefix alone, where one number does for all; None where it does not.

    FlashInfer aligns the last query with the last key, so a query is ``q_tokens`` further away
    from the prefix than it assumes.
    """
    if window_left == FULL:
        return FULL
    q_tokens = work.lengths.q_tokens
    busy = q_tokens[q_tokens > 0]
    left = window_left - work.longest
    return left if len(busy) and (busy == busy[0]).all() and left >= 0 else None
