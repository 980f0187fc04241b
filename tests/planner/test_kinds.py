"""Every kind in a plan: chunks, encoders, aliases, layers in none, entries of several tokens."""

from __future__ import annotations

from typing import Any

import pytest
from planner_support import CONF, read_yaml, spec_of

from kvfactory.errors import PlanError, Problem, SpecError
from kvfactory.kinds import Lifetime
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import Attention, CachePlan, Select

HEADS = {"q_heads": 4, "kv_heads": 2, "head_dim": 16}
FULL = {"kind": "full", "layers": "0-1", **HEADS}
LOCAL = {"kind": "swa", "layers": "2-3", "window_tokens": 40, **HEADS}
CHUNKED = {"kind": "chunked", "layers": "2-3", "chunk_tokens": 64, **HEADS}
CROSS = {"kind": "cross", "layers": "0-1", "encoder_tokens": 50, "causal": False, **HEADS}
INDEX = {"kind": "sparse_index", "index_heads": 4, "head_dim": 8, "topk": 16, "selects": "full"}
STATE = {"kind": "linear", "layers": [2], "recurrence": "none", "conv": [[8, 3]]}
TOKEN_BYTES = 2 * 2 * 16 * 2  # K and V, two heads of 16, bfloat16


def _model(groups: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"name": "kinds", "num_layers": 8, "groups": groups, **extra}


def _plan(groups: dict[str, Any], aliases: Any = (), **parts: Any) -> CachePlan:
    model = _model(groups, aliases=aliases)
    engine = {"prefill_chunk_tokens": 32, **parts.pop("engine", {})}
    workload = {"requests": 1, "tokens": 200, **parts.pop("workload", {})}
    return plan(spec_of(model, engine=engine, workload=workload, **parts))


def _problems(groups: dict[str, Any], **extra: Any) -> tuple[Problem, ...]:
    with pytest.raises((PlanError, SpecError)) as caught:
        plan(spec_of(_model(groups, **extra)))
    return caught.value.problems


def _data_bytes(laid: CachePlan, owner: str) -> int:
    return sum(r.num_bytes for r in laid.rows if (r.owner, r.what) == (owner, "data"))


# ---- chunked ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_tokens", "decode", "prefill"),
    [
        (16, 5, 8),  # 63 tokens of the chunk and 2 in flight; 63 and 64 in flight
        (48, 3, 4),  # chunks do not end at a page: one page more
        (64, 2, 2),
        (1, 65, 127),
    ],
)
def test_a_chunked_request_owns_its_chunk(page_tokens: int, decode: int, prefill: int) -> None:
    lifetime = Lifetime("chunk", 64)
    assert lifetime.peak_pages(10_000, 2, page_tokens) == decode
    assert lifetime.peak_pages(10_000, 64, page_tokens) == prefill
    laid = _plan({"full": FULL, "chunked": CHUNKED}, kv={"page_tokens": page_tokens})
    table = laid.table("chunked")
    assert table.lifetime == lifetime
    whole = -(-200 // page_tokens)
    assert table.num_pages == 1 + min(prefill, whole)
    assert table.row_pages == -(-202 // page_tokens)  # two steps beyond the end
    assert _data_bytes(laid, "chunked") == min(prefill, whole) * page_tokens * 2 * TOKEN_BYTES


def test_a_chunked_group_attends_by_chunk() -> None:
    (group,) = _plan({"chunked": CHUNKED}).groups
    assert isinstance(group.work, Attention)
    assert (group.work.chunk_tokens, group.work.window_tokens) == (64, None)


def test_a_request_shorter_than_its_chunk_or_window_owns_its_length() -> None:
    laid = _plan({"local": LOCAL, "chunked": CHUNKED | {"layers": "4-5"}}, workload={"tokens": 30})
    assert [table.num_pages for table in laid.tables] == [1 + 2, 1 + 2]


# ---- cross -----------------------------------------------------------------------------------


def test_encoder_tokens_are_kept_whatever_the_request() -> None:
    for requests in (1, 3):
        for tokens in (20, 2000):
            workload = {"requests": requests, "tokens": tokens}
            laid = _plan({"full": FULL, "cross": CROSS}, workload=workload)
            table = laid.table("cross")
            assert (table.num_pages, table.row_pages, table.live_pages) == (1 + 4 * requests, 4, 4)
            assert _data_bytes(laid, "cross") == 4 * requests * 16 * 2 * TOKEN_BYTES


def test_a_layer_attends_to_itself_and_to_an_encoder() -> None:
    laid = _plan({"full": FULL, "cross": CROSS})
    assert [group.name for group, _ in laid.owners[1]] == ["full", "cross"]
    works = [group.work for group in laid.groups]
    assert [work.causal for work in works if isinstance(work, Attention)] == [True, False]


def test_an_encoder_is_never_causal() -> None:
    (group,) = _plan({"cross": CROSS | {"causal": True}}).groups
    assert isinstance(group.work, Attention)
    assert not group.work.causal


def test_whisper_keeps_1500_frames_a_request() -> None:
    laid = plan(spec_of(read_yaml(CONF / "model" / "whisper_large_v3.yaml")))
    assert laid.table("cross").live_pages == -(-1500 // 16)


# ---- tables ----------------------------------------------------------------------------------


def test_groups_of_one_lifetime_share_a_table() -> None:
    other = LOCAL | {"layers": "4-5", "kv_heads": 1}
    laid = _plan({"full": FULL, "local": LOCAL, "more": other})
    assert [table.name for table in laid.tables] == ["full", "local"]
    assert [group.table for group in laid.groups] == ["full", "local", "local"]


@pytest.mark.parametrize("change", [{"window_tokens": 41}, {"kind": "chunked"}])
def test_other_windows_have_tables_of_their_own(change: dict[str, Any]) -> None:
    other = LOCAL | {"layers": "4-5"} | change
    if other["kind"] == "chunked":
        other["chunk_tokens"] = other.pop("window_tokens")
    laid = _plan({"local": LOCAL, "more": other})
    assert [table.name for table in laid.tables] == ["local", "more"]


def test_other_pages_have_tables_of_their_own() -> None:
    groups = {"full": FULL, "more": FULL | {"layers": "2-3"}}
    laid = _plan(groups, kv={"groups": {"more": {"page_tokens": 32}}})
    assert [(table.name, table.page_tokens) for table in laid.tables] == [
        ("full", 16),
        ("more", 32),
    ]


def test_a_recipe_stays_in_the_table() -> None:
    kv = {"recipes": {"edge": {"layers": [0], "quant": {"k": "fp8_e4m3"}}}}
    laid = _plan({"full": FULL}, kv=kv)
    assert [(group.name, group.layers) for group in laid.groups] == [
        ("full", (1,)),
        ("full.edge", (0,)),
    ]
    assert len(laid.tables) == 1


def test_only_windows() -> None:
    """No table grows with the request: a longer one needs no more pages."""
    short, long = (
        _plan({"local": LOCAL | {"layers": "0-7"}}, workload={"tokens": tokens})
        for tokens in (2_000, 200_000)
    )
    assert short.table("local").num_pages == long.table("local").num_pages
    rows = [laid.table("local").row_pages for laid in (short, long)]
    assert rows == [-(-2_002 // 16), -(-200_002 // 16)]


def test_mistral_has_nothing_but_windows() -> None:
    model = read_yaml(CONF / "model" / "mistral_7b_v0_1.yaml")
    parts = {"memory": {"budget": "20GiB"}, "workload": {"tokens": 100_000}}
    laid = plan(spec_of(model, **parts))
    assert {table.lifetime.name for table in laid.tables} == {"window"}
    assert laid.limits.admitted > 30


# ---- layers ----------------------------------------------------------------------------------


def test_layers_in_none_keep_nothing() -> None:
    laid = _plan({"full": FULL | {"layers": [1, 4]}})
    assert laid.groups[0].layers == (1, 4)
    assert sorted(laid.owners) == [1, 4]
    assert _data_bytes(laid, "full") == 13 * 16 * 2 * TOKEN_BYTES


def test_aliases_read_what_their_owner_keeps() -> None:
    laid = _plan({"full": FULL, "local": LOCAL}, aliases=[[5, 3], [7, 0]])
    assert laid.owners[5] == laid.owners[3]
    assert [(g.name, i) for g, i in laid.owners[7]] == [("full", 0)]
    assert 6 not in laid.owners
    without = _plan({"full": FULL, "local": LOCAL})
    assert laid.bytes == without.bytes


def test_gemma3n_reads_twenty_layers_in_thirty_five() -> None:
    laid = plan(spec_of(read_yaml(CONF / "model" / "gemma3n_e4b.yaml")))
    assert sum(len(group.layers) for group in laid.groups) == 20
    assert len(laid.owners) == 35
    assert {group.name for layer in range(20, 35) for group, _ in laid.owners[layer]} == {
        "full",
        "local",
    }


BAD_LAYERS = [
    ({"full": FULL | {"layers": []}}, {}, "model.groups.full.layers", "no layer"),
    ({"full": FULL | {"layers": "not 0-7"}}, {}, "model.groups.full.layers", "no layer"),
    ({"full": FULL | {"layers": "6-9"}}, {}, "model.groups.full.layers", "layer 9"),
    (
        {"full": FULL, "local": LOCAL | {"layers": "1-3"}},
        {},
        "model.groups.local.layers",
        "layer 1",
    ),
    ({"full": FULL}, {"aliases": [[5, 4]]}, "model.aliases", "[5, 4]"),
    ({"full": FULL}, {"aliases": [[1, 0]]}, "model.aliases", "[1, 0]"),
    ({"full": FULL}, {"aliases": [[0, 1]]}, "model.aliases", "[0, 1]"),
    ({"full": FULL}, {"aliases": [[9, 1]]}, "model.aliases", "[9, 1]"),
    ({"full": FULL, "state": STATE}, {"aliases": [[5, 2]]}, "model.aliases", "[5, 2]"),
    (
        {"full": FULL, "state": STATE},
        {"draft": {"num_layers": 1, "reads": [[0, 2]]}},
        "model.aliases",
        "[8, 2]",
    ),
    (
        {"a": CROSS, "b": CROSS | {"layers": "2-3", "encoder_tokens": 7}},
        {},
        "model.groups.b.encoder_tokens",
        "7",
    ),
    ({}, {}, "model.groups", "{}"),
]


@pytest.mark.parametrize(("groups", "extra", "path", "got"), BAD_LAYERS)
def test_bad_layers(groups: Any, extra: Any, path: str, got: str) -> None:
    assert any(p.path == path and got in p.got for p in _problems(groups, **extra))


# ---- entries ---------------------------------------------------------------------------------


def test_an_entry_per_four_tokens() -> None:
    """A page of 16 tokens has 4 slots; the table counts tokens as ever."""
    sparse = FULL | {"layers": "2-3", "tokens_per_entry": 4}
    laid = _plan({"full": FULL, "sparse": sparse})
    full, quarter = laid.groups
    assert (full.table, quarter.table) == ("full", "full")
    assert (full.page_slots, quarter.page_slots, quarter.tokens_per_entry) == (16, 4, 4)
    assert _data_bytes(laid, "full") == 4 * _data_bytes(laid, "sparse")
    assert quarter.planes[0].place.shape[:3] == (2, laid.table("full").num_pages, 4)


def test_a_page_is_a_whole_number_of_entries() -> None:
    (problem,) = _problems({"full": FULL | {"tokens_per_entry": 12}})
    assert problem.path == "kv.page_tokens"
    assert "a multiple of tokens_per_entry=12" in problem.need


def test_index_keys_on_some_of_the_layers() -> None:
    """They live in the table of what they select, on a strict subset of its layers."""
    groups = {"full": FULL | {"layers": "0-5"}, "index": INDEX | {"layers": [1, 4]}}
    laid = _plan(groups)
    full, index = laid.groups
    assert index.table == full.table == "full"
    assert index.layers == (1, 4)
    assert isinstance(index.work, Select)
    assert [group.name for group, _ in laid.owners[4]] == ["full", "index"]
    assert [group.name for group, _ in laid.owners[5]] == ["full"]


def test_index_keys_of_blocks_of_windows() -> None:
    index = INDEX | {"layers": "2-3", "selects": "local", "tokens_per_entry": 8}
    laid = _plan({"local": LOCAL, "index": index})
    assert [table.name for table in laid.tables] == ["local"]
    assert laid.groups[1].page_slots == 2


@pytest.mark.parametrize("selects", ["ful", "index"])
def test_an_index_of_nothing(selects: str) -> None:
    groups = {"full": FULL, "index": INDEX | {"layers": "0-1", "selects": selects}}
    (problem,) = _problems(groups)
    assert problem.path == "model.groups.index.selects"
    assert problem.need == "one of full"


def test_indexes_that_select_each_other() -> None:
    indexes = {
        name: INDEX | {"layers": layers, "selects": selects}
        for name, layers, selects in (("a", "0", "b"), ("b", "1", "a"))
    }
    problems = _problems({"full": FULL, **indexes})
    assert [problem.path for problem in problems] == [
        f"model.groups.{name}.selects" for name in "ab"
    ]
