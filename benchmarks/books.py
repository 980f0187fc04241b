"""Host time of the books: decode steps of 256 requests in three tables.

Run ``python -m benchmarks.books``. Every step extends all sequences by one token and commits.
Sequences have different lengths, so that in every step some of them open a page and some release
one. Bar: a median of 60 us, whatever the number of free pages.
"""

from __future__ import annotations

import time

import numpy as np

from kvfactory.books import Books, BooksShape, TableShape
from kvfactory.kinds import Lifetime

REQUESTS, PAGE_TOKENS, CONTEXT, STEPS = 256, 16, 4096, 1000
LIFETIMES = {
    "full": Lifetime("whole"),
    "local": Lifetime("window", 1024),
    "chunked": Lifetime("chunk", 2048),
}


def books_with(num_pages: int) -> Books:
    row_pages = (CONTEXT + 2 * STEPS) // PAGE_TOKENS + 1
    tables = tuple(
        TableShape(name, lifetime, PAGE_TOKENS, num_pages, row_pages)
        for name, lifetime in LIFETIMES.items()
    )
    return Books(BooksShape(tables, (), max_requests=REQUESTS, steps_in_flight=2))


def step_times(books: Books, overlapped: bool) -> np.ndarray:
    """Seconds of each step, float64 [STEPS]."""
    sequences = books.open(REQUESTS)
    lengths = np.random.default_rng(0).integers(CONTEXT // 2, CONTEXT, REQUESTS)
    books.commit(books.extend(sequences, lengths.tolist()))
    ones, times = [1] * REQUESTS, []
    before = books.extend(sequences, ones)
    for _ in range(STEPS):
        start = time.perf_counter()
        if overlapped:
            after = books.extend(sequences, ones)
            books.commit(before)
        else:
            books.commit(before)
            after = books.extend(sequences, ones)
        times.append(time.perf_counter() - start)
        before = after
    return np.array(times)


def main() -> None:
    print(f"{REQUESTS} requests, pages of {PAGE_TOKENS}, tables {', '.join(LIFETIMES)}")
    for num_pages in (2**17, 2**20, 2**23):
        for overlapped in (False, True):
            times = step_times(books_with(num_pages), overlapped) * 1e6
            print(
                f"{num_pages:>9,} pages, {1 + overlapped} in flight:"
                f" median {np.median(times):5.1f} us, p99 {np.percentile(times, 99):6.1f} us"
            )


if __name__ == "__main__":
    main()
