"""Traces of both formats, and every way in which a file is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from replay_support import write_csv, write_jsonl

from kvfactory.cli import main
from kvfactory.errors import SpecError
from kvfactory.replay import read_trace

AZURE = [("2023-11-16 18:15:46.6805900", 374, 44), ("2023-11-16 18:15:50.9951690", 396, 109)]
TURNS = [
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 7, "hash_ids": [0, 2]},
]


def test_csv(tmp_path: Path) -> None:
    trace = read_trace(str(write_csv(tmp_path / "a.csv", AZURE)))
    assert trace.arrival_ms.tolist() == pytest.approx([0, 4314.579], abs=1e-3)
    assert trace.prompt.tolist() == [374, 396]
    assert trace.output.tolist() == [44, 109]
    assert trace.blocks is None
    assert trace.name == "a.csv"


def test_csv_with_other_columns_zones_and_seconds(tmp_path: Path) -> None:
    header = "model, GeneratedTokens ,TIMESTAMP,ContextTokens"
    rows = [("x", 1, "2024-05-10 00:00:00.5+00:00", 10), ("x", 2, "2024-05-10 02:00:01+02:00", 20)]
    trace = read_trace(str(write_csv(tmp_path / "a.csv", rows, header)))
    assert trace.arrival_ms.tolist() == [0, 500]
    assert trace.prompt.tolist() == [10, 20]
    trace = read_trace(str(write_csv(tmp_path / "b.csv", [("1.5", 1, 0), ("2", 3, 4)])))
    assert trace.arrival_ms.tolist() == [0, 500]


def test_blank_lines_a_mark_and_carriage_returns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\r\n\r\n1,2,3\r\n")
    assert len(read_trace(str(path))) == 1


def test_digits_of_a_date_are_seconds(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n9999999,2,3\n10000101,2,3\n")
    assert read_trace(str(path)).arrival_ms.tolist() == [0, 102_000]


def test_json_lines(tmp_path: Path) -> None:
    trace = read_trace(str(write_jsonl(tmp_path / "m.jsonl", TURNS)))
    assert trace.arrival_ms.tolist() == [0, 3000]
    assert trace.prompt.tolist() == [600, 1024]
    assert trace.output.tolist() == [5, 7]
    assert trace.blocks == ((0, 1), (0, 2))
    plain = [{key: turn[key] for key in turn if key != "hash_ids"} for turn in TURNS]
    assert read_trace(str(write_jsonl(tmp_path / "p.jsonl", plain))).blocks is None


# ---- bad traces ------------------------------------------------------------------------------


class Bad(NamedTuple):
    """What is in the file, and the words of the line that answers it."""

    content: str | bytes | None
    got: str
    need: str
    fix: str = ""


def _csv(*rows: str, header: str = "TIMESTAMP,ContextTokens,GeneratedTokens") -> str:
    return "\n".join((header, *rows)) + "\n"


def _line(**changed: Any) -> str:
    return json.dumps({**TURNS[0], **changed}) + "\n"


BAD = {
    "missing file": Bad(None, "no such file", "can be read"),
    "empty file": Bad("", "which is empty", "at least one request"),
    "blank file": Bad(" \n\n", "which is empty", "at least one request"),
    "header alone": Bad(_csv(), "a header without requests", "at least one request"),
    "bytes": Bad(b"\xff\xfe\x00\x01", "no UTF-8 text", "a CSV file or JSON lines"),
    "no such column": Bad(_csv("1,2", header="TIMESTAMP,ContextTokens"), "a column Gen", "columns"),
    "misspelt column": Bad(
        _csv("1,2,3", header="TIMESTAMP,ContextToken,GeneratedTokens"),
        "line 1 without a column ContextTokens", "the columns", "ContextTokens for ContextToken",
    ),
    "no header": Bad(_csv("1,2,3", header="1,2,3"), "line 1 without a column", "the columns"),
    "short row": Bad(_csv("1,2,3", "4,5"), "line 3, 2 of 3 columns", "GeneratedTokens"),
    "long row": Bad(_csv("1,2,3,4"), "line 2, 4 of 3 columns", "GeneratedTokens"),
    "word": Bad(_csv("1,many,3"), "line 2, column ContextTokens: 'many'", "a whole number"),
    "fraction": Bad(_csv("1,2.5,3"), "line 2, column ContextTokens: '2.5'", "a whole number"),
    "nothing": Bad(_csv("1,,3"), "line 2, column ContextTokens: ''", "a whole number"),
    "not a number": Bad(_csv("1,2,nan"), "column GeneratedTokens: 'nan'", "a whole number"),
    "negative": Bad(_csv("1,2,-3"), "line 2, column GeneratedTokens: -3", "0 to"),
    "no prompt": Bad(_csv("1,0,3"), "line 2, column ContextTokens: 0", "1 to 67108864 tokens"),
    "huge": Bad(_csv(f"1,{10**30},3"), "line 2, column ContextTokens: 1000", "tokens"),
    "bad date": Bad(_csv("yesterday,2,3"), "column TIMESTAMP: 'yesterday'", "a date and time"),
    "endless time": Bad(_csv("inf,2,3"), "column TIMESTAMP: 'inf'", "a date and time"),
    "back in time": Bad(_csv("5,2,3", "4,2,3"), "line 3, 1 s earlier than line 2", "order", "sort"),
    "cut line": Bad(_line() + _line()[:30], "line 2, which is no JSON", "closed before its end"),
    "no object": Bad(_line() + "[1, 2]\n", "line 2, '[1, 2]'", "an object"),
    "no length": Bad(
        '{"timestamp": 0, "input_len": 3, "output_length": 1}\n',
        "line 1, no input_length", "in every line", "input_length for input_len",
    ),
    "text for a number": Bad(_line(output_length="5"), 'output_length: "5"', "a whole number"),
    "truth for a number": Bad(_line(output_length=True), "output_length: true", "a whole number"),
    "JSON NaN": Bad(_line(input_length=float("nan")), "input_length: NaN", "a whole number"),
    "negative JSON": Bad(_line(output_length=-1), "column output_length: -1", "0 to"),
    "time is no number": Bad(_line(timestamp="0"), 'column timestamp: "0"', "milliseconds"),
    "huge time": Bad(_line(timestamp=10**400), "column timestamp: 1000", "milliseconds"),
    "ids are no list": Bad(_line(hash_ids="01"), 'column hash_ids: "01"', "a list"),
    "ids are no numbers": Bad(_line(hash_ids=[0, "1"]), "column hash_ids: [0,", "a list"),
    "ids in one line": Bad(
        _line() + '{"timestamp": 1, "input_length": 3, "output_length": 1}\n',
        "line 2 without hash_ids", "in every line or in none",
    ),
    "ids of other blocks": Bad(_line(hash_ids=[0]), "hash_ids: 1 ids", "2, one for each 512"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_trace(name: str, tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    case, path = BAD[name], tmp_path / "trace"
    if case.content is not None:
        content = case.content
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = cli("action=replay", "device=cpu", f"workload.trace={path}")
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    line = next(line for line in err.splitlines() if case.got in line)
    assert line.startswith("workload.trace: got ")
    assert case.need in line.partition(", need ")[2]
    assert case.fix in line.partition("; try ")[2]


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command line in an empty folder: exit code, stdout, stderr; nothing is left behind."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        caught = capsys.readouterr()
        assert not list(folder.iterdir())
        return code, caught.out, caught.err

    return run


def test_all_bad_lines_at_once(tmp_path: Path) -> None:
    rows = [(at, "x", 1) for at in range(20)]
    with pytest.raises(SpecError) as caught:
        read_trace(str(write_csv(tmp_path / "a.csv", rows)))
    problems = caught.value.problems
    assert [problem.got.split(",")[0] for problem in problems[:2]] == ["line 2", "line 3"]
    assert problems[-1].got == "12 more such lines"
    assert len(problems) == 9


def test_no_trace(cli: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = cli("action=replay", "device=cpu")
    assert code == 2
    assert err.startswith("workload.trace: got nothing, need a file of requests")


def test_a_folder_is_no_trace(tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = cli("action=replay", "device=cpu", f"workload.trace={tmp_path}")
    assert code == 2
    assert "is a directory" in err


# ---- the action ------------------------------------------------------------------------------


def test_a_file_without_end_is_no_trace(
    monkeypatch: pytest.MonkeyPatch, cli: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.setattr("kvfactory.replay.traces.MOST_BYTES", 2**20)
    code, _, err = cli("action=replay", "workload.trace=/dev/zero")
    assert code == 2
    assert "workload.trace: got '/dev/zero', which is longer than 1 MiB" in err


def test_replay_in_words(tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    path = write_csv(tmp_path / "a.csv", [(at, 900 * at, 20) for at in range(1, 5)])
    code, out, err = cli(
        "action=replay", "model=mimo_v2_flash", "model.max_context=3000", f"workload.trace={path}"
    )
    assert (code, err) == (0, "")
    assert "refused: 1, prompt beyond model.max_context=3000" in out
    assert "pages released by windows: " in out
    assert "balanced at the end" in out
    heads = [line for line in out.splitlines() if line.startswith(("books us/step", "tokens pref"))]
    assert not any("tokens/s" in head for head in heads)  # the host's rate is no throughput
    assert "the books alone could serve " in out
    legend = out.partition("pages released by windows")[2]
    for word in ("books us/step", "prefixes kept", "given up", "growth"):
        assert word in "".join(heads)
        assert word in legend


def test_replay_for_machines(tmp_path: Path, cli: Callable[..., tuple[int, str, str]]) -> None:
    path = write_jsonl(tmp_path / "m.jsonl", TURNS)
    code, out, _ = cli("action=replay", "output=json", "device=h200", f"workload.trace={path}")
    found = json.loads(out)
    assert code == 0
    assert (found["arrivals"], found["finished"], found["balanced"]) == (2, 2, True)
    assert found["prefix_hit_tokens"] == 512
    assert found["plan"]["tokens"] == 1031
    assert found["times"]["median_us"] > 0
    tokens = found["prompt_tokens"] + found["generated_tokens"]
    assert found["books_tokens_per_s"] * found["books_s"] == pytest.approx(tokens)


def test_books_that_do_not_balance_fail(
    tmp_path: Path, cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvfactory.books import Books

    monkeypatch.setattr(Books, "release", lambda books, segment: None)
    path = write_jsonl(tmp_path / "m.jsonl", TURNS)
    code, out, err = cli("action=replay", "device=h200", f"workload.trace={path}")
    assert code == 1
    assert "NOT balanced" in out
    assert "tables.full: " in err
    assert "still held at the end, need 0" in err


def test_replay_needs_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    path = write_csv(tmp_path / "a.csv", AZURE)
    script = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {{"torch", "triton"}}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from kvfactory.cli import main
raise SystemExit(main(["action=replay", "device=h200", "workload.trace={path}"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "balanced at the end" in done.stdout
