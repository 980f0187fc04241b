"""What ``build`` makes of a plan, in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from kvfactory.backends import AttentionRunner, SelectRunner
from kvfactory.books import Books
from kvfactory.errors import BuildError, Problem
from kvfactory.planning.cacheplan import CachePlan, GroupPlan
from kvfactory.pools import Pool, Write
from kvfactory.steps.buffers import StepBuffers

if TYPE_CHECKING:
    from kvfactory.kernels import ErrorWords


def one_by_one(writes: Sequence[Write]) -> None:
    """Make each of ``writes``."""
    for write in writes:
        write.run()


@dataclass(frozen=True)
class Parts:
    """A plan's memory, pools, books and backends; pools, runners and selectors by group name.

    ``errors`` is where kernels report ids outside their pool, None where torch moves the bytes.
    ``write`` makes the writes of one layer in all its groups.
    """

    plan: CachePlan
    arena: Tensor
    books: Books
    pools: Mapping[str, Pool]
    runners: Mapping[str, AttentionRunner]
    buffers: StepBuffers
    selectors: Mapping[str, SelectRunner] = field(default_factory=dict)
    errors: ErrorWords | None = None
    write: Callable[[Sequence[Write]], None] = one_by_one

    def stored(self) -> Iterator[tuple[GroupPlan, Pool]]:
        """Groups with their pools, none where the memory stores nothing."""
        if not self.plan.counted_bytes:
            yield from ((group, self.pools[group.name]) for group in self.plan.groups)


def check_storage(parts: Parts) -> None:
    """Refuse steps where not even their own arrays are stored.

    Raises:
        BuildError: the arena is on ``meta``.
    """
    if parts.arena.is_meta:
        got, need = "meta, which stores no steps either", "memory that has room for steps"
        fix = "memory=null, which counts what steps take and stores no more than them"
        raise BuildError(Problem("memory.name", got, need, fix))
