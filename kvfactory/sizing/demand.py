"""Demand: the pages that requests need in a table. The one count behind sizing and admission.

A request of T tokens owns at most D pages while it decodes. Its prefill may own more in a table
that forgets, since a chunk's pages return only when the step is decided. How far that goes in the
count is decided here:

- Up to ``FULL_SPEED_REQUESTS`` requests get the pages for any mix of steps that the limits allow.
- More of them get D each, and one more D per hundred: prefill then uses what the others have not
  grown into yet, and narrows its chunks when all are at their longest. It never stops: with
  nothing of its own in flight a request owns so little that one more token fits into D.

So where many are served, prefill costs at most one request in a hundred.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvfactory.kinds import Lifetime, ceil_div
from kvfactory.planning.assembly import Sizes, TableDraft
from kvfactory.planning.cacheplan import Limits, TablePlan
from kvfactory.planning.grouping import Draft, TableKey
from kvfactory.spec import MOST_REQUESTS, Engine, Spec

FULL_SPEED_REQUESTS = 8


def draft_tables(drafts: Sequence[Draft], spec: Spec) -> tuple[TableDraft, ...]:
    """The tables that the groups need, named after the first group of each."""
    groups: dict[TableKey, dict[str, None]] = {}
    for draft in drafts:
        groups.setdefault(draft.key, {})[draft.group] = None
    return tuple(_table(tuple(names), key, spec) for key, names in groups.items())


def _table(groups: tuple[str, ...], key: TableKey, spec: Spec) -> TableDraft:
    lifetime, page_tokens = key
    if lifetime.name == "state":
        return TableDraft(groups[0], groups, key, spec.engine.state_slots, row_pages=0)
    # Whether there are pages for a request beyond its end is the pool's business; columns there
    # are, so that steps can be open until the engine has seen that it is done.
    tokens = spec.workload.tokens + _decode_in_flight(spec.engine)
    if lifetime.name == "encoder":
        tokens = lifetime.tokens
    in_flight = max(_prefill_in_flight(spec.engine), _decode_in_flight(spec.engine))
    live = lifetime.peak_pages(tokens, in_flight, page_tokens)
    return TableDraft(groups[0], groups, key, live, ceil_div(tokens, page_tokens))


# ---- one request -----------------------------------------------------------------------------


def table_tokens(lifetime: Lifetime, tokens: int, engine: Engine) -> int:
    """Most tokens that a request of ``tokens`` has in a table, rejected drafts included."""
    return lifetime.tokens if lifetime.name == "encoder" else tokens + engine.draft_tokens


def request_pages(lifetime: Lifetime, page_tokens: int, tokens: int, engine: Engine) -> int:
    """Pages that one decoding request of ``tokens`` owns at its longest; slots for states."""
    if lifetime.name == "state":
        return engine.state_slots
    longest = table_tokens(lifetime, tokens, engine)
    return lifetime.peak_pages(longest, _decode_in_flight(engine), page_tokens)


def _decode_in_flight(engine: Engine) -> int:
    return engine.steps_in_flight * (1 + engine.draft_tokens)


def _prefill_in_flight(engine: Engine) -> int:
    return engine.steps_in_flight * engine.prefill_chunk_tokens


# ---- several requests ------------------------------------------------------------------------


def full_speed_pages(key: TableKey, requests: int, tokens: int, engine: Engine) -> int:
    """Pages with which ``requests`` can do whatever the limits of a step allow.

    All prompt tokens in flight may be one request's, and each of the others be off by a page.
    """
    one = request_pages(*key, tokens, engine)
    if key.lifetime.name == "state":
        return requests * one
    longest = table_tokens(key.lifetime, tokens, engine)
    in_flight = _prefill_in_flight(engine) + (requests - 1) * _decode_in_flight(engine)
    peak = key.lifetime.peak_pages(requests * longest, in_flight, key.page_tokens)
    mixed = (requests - 1) * (one + 1) + max(one, peak)
    return min(requests * ceil_div(longest, key.page_tokens), mixed)


def pages_for(key: TableKey, requests: int, spec: Spec) -> int:
    """Pages of a table for ``requests`` of the workload, its sink included.

    Sizing counts requests of the mean length; one of the longest always fits as well.
    """
    workload, engine = spec.workload, spec.engine
    mean = workload.mean_tokens or workload.tokens
    few = min(requests, FULL_SPEED_REQUESTS)
    steady = requests * request_pages(*key, mean, engine)
    spare = min(_surplus(key, few, mean, engine), steady // requests * (requests // 100))
    floor = full_speed_pages(key, 1, workload.tokens, engine)
    return 1 + max(steady + spare, full_speed_pages(key, few, mean, engine), floor)


def comfortable_pages(key: TableKey, requests: int, spec: Spec) -> int:
    """As ``pages_for``, with pages for prefill at full speed whatever the others hold."""
    workload, engine = spec.workload, spec.engine
    mean = workload.mean_tokens or workload.tokens
    surplus = _surplus(key, min(requests, FULL_SPEED_REQUESTS), mean, engine)
    wanted = 1 + requests * request_pages(*key, mean, engine) + surplus
    return max(wanted, pages_for(key, requests, spec))


def prefill_pages(key: TableKey, spec: Spec) -> int:
    """Pages that chunks of prefill need beyond decode, for one request of the workload."""
    return _surplus(key, 1, spec.workload.tokens, spec.engine)


def _surplus(key: TableKey, requests: int, tokens: int, engine: Engine) -> int:
    full_speed = full_speed_pages(key, requests, tokens, engine)
    return full_speed - requests * request_pages(*key, tokens, engine)


def most_requests(spec: Spec) -> int:
    """Rows that device tables may have, and so the most requests that are admitted."""
    return spec.engine.max_requests or MOST_REQUESTS


def limits(requests: int, spec: Spec) -> Limits:
    """The loop's limits when ``requests`` are admitted."""
    engine = spec.engine
    rows = engine.max_requests or requests
    return Limits(
        admitted=requests,
        tokens=spec.workload.tokens,
        max_requests=rows,
        step_tokens=engine.prefill_chunk_tokens + rows * (1 + engine.draft_tokens),
        steps_in_flight=engine.steps_in_flight,
        draft_tokens=engine.draft_tokens,
    )


def sizes_for(requests: int, keys: Iterable[TableKey], spec: Spec) -> Sizes:
    """Exactly the pages that ``requests`` need in each table."""
    return Sizes({key: pages_for(key, requests, spec) for key in keys}, limits(requests, spec))


# ---- what a plan promises --------------------------------------------------------------------


def crowded_chunks(tables: Iterable[TablePlan], spec: Spec, admitted: int) -> Mapping[str, int]:
    """Prompt tokens a step, by table, for which there are pages when all others are at their
    longest; only tables where these are fewer than ``engine.prefill_chunk_tokens``, and that do
    not have the pages for any mix of steps.
    """
    found = {}
    engine, workload = spec.engine, spec.workload
    mean = workload.mean_tokens or workload.tokens
    for table in tables:
        lifetime, page_tokens = table.lifetime, table.page_tokens
        if table.num_pages > full_speed_pages(
            TableKey(lifetime, page_tokens), admitted, mean, engine
        ):
            continue
        others = (admitted - 1) * request_pages(lifetime, page_tokens, mean, engine)
        room = (table.num_pages - 1 - others) * page_tokens - lifetime.tokens
        if lifetime.name in ("window", "chunk"):
            chunk = (room - page_tokens + 2) // engine.steps_in_flight
            if chunk < min(engine.prefill_chunk_tokens, mean):
                found[table.name] = max(1, chunk)
    return found


def chunk_tokens(tables: Iterable[TablePlan], spec: Spec, requests: int) -> int:
    """Prompt tokens a step with which ``requests`` never run out of pages."""
    chunks = [spec.engine.prefill_chunk_tokens]
    if requests > FULL_SPEED_REQUESTS:  # of more, pages speak of one request's chunk
        chunks.append(spec.workload.mean_tokens or spec.workload.tokens)
    return min([*chunks, *crowded_chunks(tables, spec, requests).values()])
