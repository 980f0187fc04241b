"""Traces: when requests arrived, how long their prompts were and how much was generated.

Two public formats, told apart by their first character:

- CSV with the columns TIMESTAMP, ContextTokens and GeneratedTokens (Azure LLM inference traces);
  timestamps are ISO 8601 or seconds.
- JSON lines with ``timestamp`` in milliseconds, ``input_length``, ``output_length`` and, where
  prompts share beginnings, ``hash_ids`` in every line: one id for each 512 tokens, equal where
  these and all before them are equal (Mooncake traces).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvfactory.errors import Problem, SpecError, did_you_mean

PATH = "workload.trace"
BLOCK_TOKENS = 512
MOST_TOKENS = 2**26
MOST_MS = 2.0**53
MOST_BYTES = 2**29
SHOWN_PROBLEMS = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival.

    ``arrival_ms`` float64 [requests] counts from the first; ``prompt`` and ``output`` int64
    [requests] are tokens. ``blocks`` are the ids of each prompt's blocks of ``BLOCK_TOKENS``,
    the last of them perhaps partial; None in a format that has none.
    """

    name: str
    arrival_ms: NDArray[np.float64]
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    blocks: tuple[tuple[int, ...], ...] | None

    def __len__(self) -> int:
        return len(self.prompt)


class _Line(NamedTuple):
    """One request as it was read; ``number`` counts the file's lines from 1."""

    number: int
    time_ms: float
    prompt: int
    output: int
    blocks: tuple[int, ...] | None


class _BadLineError(Exception):
    """What is wrong with a line; becomes a problem with the line's number."""

    def __init__(self, got: str, need: str, fix: str = "") -> None:
        self.got, self.need, self.fix = got, need, fix


def read_trace(path: str | None) -> Trace:
    """The trace in the file ``path``.

    Raises:
        SpecError: no such file, or every line that cannot be a request, by number and column.
    """
    if path is None:
        fix = f"{PATH}=trace.csv"
        raise SpecError(Problem(PATH, "nothing", "a file of requests to replay", fix))
    text = _text(path)
    lines = list(_jsonl(text) if text.lstrip()[:1] == "{" else _csv(text))
    _check_order(lines)
    _check_blocks(lines)
    first = lines[0].time_ms
    blocks = [line.blocks for line in lines]
    return Trace(
        name=Path(path).name,
        arrival_ms=np.array([line.time_ms - first for line in lines]),
        prompt=np.array([line.prompt for line in lines], np.int64),
        output=np.array([line.output for line in lines], np.int64),
        blocks=None if None in blocks else tuple(ids for ids in blocks if ids is not None),
    )


def _text(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            read = file.read(MOST_BYTES + 1)
        if len(read) > MOST_BYTES:
            got = f"{path!r}, which is longer than {MOST_BYTES >> 20} MiB"
            raise SpecError(Problem(PATH, got, "a shorter part of the trace"))
        text = read.decode("utf-8-sig")
    except OSError as error:
        got = f"{path!r}: {(error.strerror or str(error)).lower()}"
        raise SpecError(Problem(PATH, got, "a file of requests that can be read")) from None
    except ValueError:
        got = f"{path!r}, which is no UTF-8 text"
        raise SpecError(Problem(PATH, got, "a CSV file or JSON lines")) from None
    if not text.strip():
        raise SpecError(Problem(PATH, f"{path!r}, which is empty", "at least one request"))
    return text


def _check_order(lines: Sequence[_Line]) -> None:
    """Requests arrive in the order of the file."""
    for before, line in pairwise(lines):
        if line.time_ms < before.time_ms:
            early = (before.time_ms - line.time_ms) / 1e3
            got = f"line {line.number}, {early:g} s earlier than line {before.number}"
            need = "lines in the order of their timestamps"
            raise SpecError(Problem(PATH, got, need, "a trace sorted by timestamp"))


def _check_blocks(lines: Sequence[_Line]) -> None:
    """Either every request says what its prompt shares with others, or none does."""
    without = [line.number for line in lines if line.blocks is None]
    if 0 < len(without) < len(lines):
        got = f"line {without[0]} without hash_ids, which other lines have"
        raise SpecError(Problem(PATH, got, "hash_ids in every line or in none"))


def _parsed(
    rows: Iterator[T], read: Callable[[T], _Line], number: Callable[[], int]
) -> list[_Line]:
    """Every row read; all that are wrong are told at once, the first few in words."""
    lines: list[_Line] = []
    wrong: list[Problem] = []
    more = 0
    for row in rows:
        try:
            lines.append(read(row))
        except _BadLineError as bad:
            more += len(wrong) >= SHOWN_PROBLEMS
            if len(wrong) < SHOWN_PROBLEMS:
                wrong.append(Problem(PATH, f"line {number()}, {bad.got}", bad.need, bad.fix))
    if more:
        wrong.append(Problem(PATH, f"{more} more such lines", "lines that are requests"))
    if not lines and not wrong:
        wrong.append(Problem(PATH, "a header without requests", "at least one request"))
    if wrong:
        raise SpecError(*wrong)
    return lines


# ---- CSV -------------------------------------------------------------------------------------

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _csv(text: str) -> list[_Line]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(text.splitlines())
    header = [name.strip() for name in next(reader)]
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        raise SpecError(*(_missing(name, header) for name in missing))
    places = [header.index(name) for name in _COLUMNS]

    def read(row: list[str]) -> _Line:
        if len(row) != len(header):
            got = f"{len(row)} of {len(header)} columns"
            raise _BadLineError(got, f"{', '.join(header)}")
        when, prompt, output = (row[place].strip() for place in places)
        return _Line(
            reader.line_num,
            _time_ms(when),
            _tokens(_COLUMNS[1], _number(_COLUMNS[1], prompt), least=1),
            _tokens(_COLUMNS[2], _number(_COLUMNS[2], output), least=0),
            None,
        )

    return _parsed((row for row in reader if row), read, lambda: reader.line_num)


def _missing(name: str, header: Sequence[str]) -> Problem:
    close = did_you_mean(name, header)
    got = f"line 1 without a column {name}: {', '.join(header)[:80]}"
    fix = f"{name} for {close}" if close else ""
    return Problem(PATH, got, f"the columns {', '.join(_COLUMNS)}, or JSON lines", fix)


def _number(column: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _BadLineError(f"column {column}: {text!r}", "a whole number") from None


def _time_ms(text: str) -> float:
    """Milliseconds; a number is seconds, even one whose digits could be those of a date."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if abs(seconds * 1e3) <= MOST_MS:
        return seconds * 1e3
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        need = "a date and time such as 2023-11-16 18:15:46.68, or seconds"
        raise _BadLineError(f"column TIMESTAMP: {text!r}", need) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp() * 1e3


# ---- JSON lines ------------------------------------------------------------------------------


def _jsonl(text: str) -> list[_Line]:
    numbered = enumerate(text.splitlines(), 1)
    at = 0

    def rows() -> Iterator[str]:
        nonlocal at
        for number, line in numbered:
            at = number
            if line.strip():
                yield line

    return _parsed(rows(), lambda line: _request(at, line), lambda: at)


def _request(number: int, line: str) -> _Line:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        got = f"which is no JSON: {error}"
        raise _BadLineError(got, "an object on one line, closed before its end") from None
    if not isinstance(data, dict):
        raise _BadLineError(f"{line[:60]!r}", "an object with timestamp and lengths")
    prompt = _tokens("input_length", _whole(data, "input_length"), least=1)
    return _Line(
        number,
        _milliseconds(data),
        prompt,
        _tokens("output_length", _whole(data, "output_length"), least=0),
        _blocks(data["hash_ids"], prompt) if "hash_ids" in data else None,
    )


def _whole(data: Mapping[str, Any], key: str) -> int:
    value = _given(data, key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _BadLineError(f"column {key}: {json.dumps(value)[:60]}", "a whole number")
    return value


def _given(data: Mapping[str, Any], key: str) -> Any:
    if key not in data:
        close = did_you_mean(key, data)
        raise _BadLineError(f"no {key}", f"{key} in every line", f"{key} for {close}" * bool(close))
    return data[key]


def _milliseconds(data: Mapping[str, Any]) -> float:
    value = _given(data, "timestamp")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not abs(value) <= MOST_MS:
        need = "milliseconds since the beginning"
        raise _BadLineError(f"column timestamp: {json.dumps(value)[:60]}", need)
    return float(value)


def _blocks(value: object, prompt: int) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(type(number) is int for number in value)
    if not isinstance(value, list) or not whole:
        raise _BadLineError(f"column hash_ids: {json.dumps(value)[:60]}", "a list of whole numbers")
    wanted = -(-prompt // BLOCK_TOKENS)
    if len(value) != wanted:
        need = f"{wanted}, one for each {BLOCK_TOKENS} tokens of input_length={prompt}"
        raise _BadLineError(f"column hash_ids: {len(value)} ids", need)
    return tuple(value)


# ---- both ------------------------------------------------------------------------------------


def _tokens(column: str, value: int, least: int) -> int:
    if not least <= value <= MOST_TOKENS:
        raise _BadLineError(f"column {column}: {value}", f"{least} to {MOST_TOKENS} tokens")
    return value
