"""Random histories over every kind of table, over states, and over tables that are always short."""

from __future__ import annotations

from books_leaving import LeavingMachine
from books_machine import ROW_TOKENS
from books_support import CROSS, FULL, LOCAL, STATE
from hypothesis import HealthCheck, settings

from kvfactory.books import TableShape


class StatefulBooksMachine(LeavingMachine):
    """The same with recurrent states, which can only be shared where they are."""

    shapes = (FULL, LOCAL, STATE)


class SmallTableMachine(LeavingMachine):
    """Tables so small that shortages are the rule."""

    shapes = (
        TableShape("full", FULL.lifetime, page_tokens=1, num_pages=24, row_pages=ROW_TOKENS),
        TableShape("local", LOCAL.lifetime, page_tokens=4, num_pages=8, row_pages=10),
        CROSS,
    )


LIMITS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
for machine in (LeavingMachine, StatefulBooksMachine, SmallTableMachine):
    machine.TestCase.settings = LIMITS

TestBooks = LeavingMachine.TestCase
TestStatefulBooks = StatefulBooksMachine.TestCase
TestSmallTables = SmallTableMachine.TestCase
