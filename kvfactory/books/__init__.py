"""The truth on the host: which request owns which pages, state slots and rows."""

from kvfactory.books.accept import Accepted, PendingCounts, counts_of
from kvfactory.books.allocator import Allocator, Capacity
from kvfactory.books.books import Books
from kvfactory.books.ids import pages_of
from kvfactory.books.requests import Sequence
from kvfactory.books.segments import Segment
from kvfactory.books.shape import BooksShape, StateShape, TableShape
from kvfactory.books.step import Committed, StateStep, StepRecord, TableStep
from kvfactory.books.window import window_slots

__all__ = [
    "Accepted",
    "Allocator",
    "Books",
    "BooksShape",
    "Capacity",
    "Committed",
    "PendingCounts",
    "Segment",
    "Sequence",
    "StateShape",
    "StateStep",
    "StepRecord",
    "TableShape",
    "TableStep",
    "counts_of",
    "pages_of",
    "window_slots",
]
