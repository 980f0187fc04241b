"""What the books keep account of: pure numbers, no memory behind them."""

from __future__ import annotations

from dataclasses import dataclass

from kvfactory.kinds import Lifetime
from kvfactory.planning.cacheplan import CachePlan


@dataclass(frozen=True)
class TableShape:
    """A page table: the pages of all groups with one lifetime and one page size.

    ``num_pages`` counts page 0, the sink. ``row_pages`` is the width of a device row: the most
    tokens of one request over ``page_tokens``, rounded up, rejected drafts in flight included.
    """

    name: str
    lifetime: Lifetime
    page_tokens: int
    num_pages: int
    row_pages: int

    @property
    def row_tokens(self) -> int:
        """The most tokens that a row can address."""
        return self.row_pages * self.page_tokens


@dataclass(frozen=True)
class StateShape:
    """A table of recurrent states, one slot a request and up to ``tracking`` more.

    ``num_slots`` counts slot 0, the sink, and so does ``checkpoints``, the places for saved states
    (0: there are none). Of ``lazy`` tracking slots a request has one until it needs the others.
    ``tree_nodes`` is the largest draft tree of which every node's state is kept, 0 for chains only.
    """

    name: str
    num_slots: int
    tracking: int = 0
    lazy: bool = False
    checkpoints: int = 0
    tree_nodes: int = 0


@dataclass(frozen=True)
class BooksShape:
    """All tables of a cache. ``max_requests`` are the rows beside row 0, the sink.

    A step has at most ``step_tokens`` new tokens.
    """

    tables: tuple[TableShape, ...]
    states: tuple[StateShape, ...]
    max_requests: int
    steps_in_flight: int
    step_tokens: int = 2**31 - 1


def books_shape(plan: CachePlan) -> BooksShape:
    """What the books of ``plan`` keep account of."""
    engine, saved = plan.spec.engine, plan.spec.memory.checkpoints
    tracking, lazy = engine.tracking_slots, engine.state_tracking == "lazy"
    checkpoints = 1 + saved if saved else 0
    nodes = 1 + engine.draft_tokens if engine.draft_tree else 0
    return BooksShape(
        tables=tuple(
            TableShape(t.name, t.lifetime, t.page_tokens, t.num_pages, t.row_pages)
            for t in plan.tables
        ),
        states=tuple(
            StateShape(s.name, s.num_slots, tracking, lazy, checkpoints, nodes) for s in plan.states
        ),
        max_requests=plan.limits.max_requests,
        steps_in_flight=plan.limits.steps_in_flight,
        step_tokens=plan.limits.step_tokens,
    )
