"""What a layer may do in a step: select, write several groups at once, wait, or keep nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from cache_support import (
    FULL,
    INDEX,
    K_ONLY,
    MLA,
    MODELS,
    STATE,
    WINDOW,
    Driver,
    Feed,
    cache_of,
    close_to,
    same,
    scratch,
    snapshot,
    some_tokens,
    spec_of,
)

from kvfactory.backends import AttendExtra
from kvfactory.builder import build
from kvfactory.cache import Cache
from kvfactory.errors import BuildError, PlanError, SpecError
from kvfactory.planner import plan
from kvfactory.pools import Write
from kvfactory.steps.entries import completing
from kvfactory.steps.step import Step


def _step(model: Any, tokens: int = 12, **parts: Any) -> tuple[Cache, Step]:
    cache = cache_of(model, **parts)
    return cache, cache.extend(cache.open(), tokens)


# ---- selection -------------------------------------------------------------------------------


def test_a_selection_is_the_dense_top_k() -> None:
    cache, step = _step("dsa")
    q, k, weights = torch.randn(12, 2, 16), torch.randn(12, 16), torch.rand(12, 2)
    got = cache.select(0, q, k, step, weights=weights)
    assert got.dtype == torch.int32
    assert got.shape == (12, 6)
    scores = (torch.einsum("thd,ed->the", q, k).relu() * weights[..., None]).sum(1)
    for token in range(12):
        want = scores[token, : token + 1].topk(min(6, token + 1)).indices.sort().values
        assert got[token].tolist() == want.tolist() + [-1] * (6 - len(want))


def test_sparse_attention_is_attention_over_the_selection() -> None:
    cache, step = _step("minimax")
    q, k, v = torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    select = cache.select(1, torch.randn(12, 2, 16), torch.randn(12, 16), step)
    out = cache.attend(1, q, k, v, step, select=select)
    chosen = torch.zeros(12, 13, dtype=torch.bool).scatter_(1, select.long() % 13, True)[:, :12]
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / 4
    weights = logits.masked_fill(~chosen, -torch.inf).softmax(-1)
    close_to(out, torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1)))


def test_layers_without_index_keys_use_the_last_selection() -> None:
    index = {**INDEX, "layers": [0, 3], "selects": "latent"}
    cache = cache_of({"latent": {**MLA, "layers": "0-4"}, "index": index})
    assert [cache.selector_of(layer) for layer in range(6)] == [0, 0, 0, 3, 3, None]
    assert cache_of("minimax").selector_of(0) is None
    with pytest.raises(SpecError, match=r"need a layer of a sparse_index group: 0::3$"):
        cache.select(1, torch.randn(1, 2, 16), None, cache.extend(cache.open(), 1))


def test_a_backend_attends_over_what_was_written() -> None:
    cache, step = _step("full")
    q, k, v = torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    cache.write(1, step, k=k, v=v)
    runner, index = cache.backend(1), cache.pool(1)[1]
    want = cache.attend(1, q, None, None, step)
    assert torch.equal(runner.attend(index, q, step, AttendExtra()), want)
    assert want.abs().sum() > 0


# ---- one write for all groups of a layer -----------------------------------------------------


@pytest.mark.parametrize("layer", [1, 2])
def test_one_write_is_three(layer: int) -> None:
    values = layer == 2
    rows = {"k": torch.randn(12, 2, 16), "v": torch.randn(12, 2, 16)}
    keys = {"index_k": torch.randn(12, 16), **({"index_v": torch.randn(12, 16)} if values else {})}
    q, index_q = torch.randn(12, 4, 16), torch.randn(12, 2, 16)
    (one, first), (two, second) = _step("minimax"), _step("minimax")
    one.write(layer, first, **rows, **keys)
    a = one.select(layer, index_q, None, first)
    b = two.select(layer, index_q, keys["index_k"], second, v_index=keys.get("index_v"))
    assert torch.equal(a, b)
    got = one.attend(layer, q, None, None, first, select=a)
    assert torch.equal(got, two.attend(layer, q, rows["k"], rows["v"], second, select=b))
    assert same(snapshot(one), snapshot(two))


def test_a_write_writes_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, step = _step("dsa")
    k, v, index = torch.randn(12, 32), torch.randn(12, 16), torch.randn(12, 16)
    before = snapshot(cache)
    for wrong, match in (
        ({"k": k, "v": v, "index_k": index[:5]}, "index_k"),
        ({"k": k[:, :8], "v": v, "index_k": index}, "latent"),
        ({"k": k, "index_k": index}, "1 tensors to write"),
        ({"k": k, "v": v, "index_keys": index}, "try index_k"),
    ):
        with pytest.raises(SpecError, match=match):
            cache.write(0, step, **wrong)
    with pytest.raises(SpecError, match=r"a sparse_index group: 0$"):
        cache.write(1, step, k=k, v=v, index_k=index)
    assert same(before, snapshot(cache))
    runs: list[str] = []
    monkeypatch.setattr(Write, "run", lambda write: runs.append(",".join(write.rows)))
    cache.write(0, step, k=k, v=v, index_k=index)
    assert runs == ["latent,rope", "index_k"]


# ---- entries of several tokens ---------------------------------------------------------------


def test_entries_are_written_by_the_token_that_completes_them() -> None:
    cache = cache_of("pooled")
    a, b = cache.open(2)
    cache.commit(cache.extend([a, b], [3, 6]))
    step = cache.extend([a, b], [6, 1])
    assert completing(step.host, 4).tolist() == [0, 4]  # positions 3 and 7 of a
    pool, index = cache.pool(0, "index")
    cache.select(0, torch.randn(7, 2, 16), torch.ones(2, 16), step)
    stored = next(iter(pool.views(index).values())).flatten(0, 1)
    assert int(stored.any(-1).sum()) == 2
    with pytest.raises(SpecError, match=r"\[2, 1, 16\]"):
        cache.select(0, torch.randn(7, 2, 16), torch.ones(7, 16), step)


# ---- kinds of layers -------------------------------------------------------------------------


def test_layers_that_keep_nothing() -> None:
    cache, step = _step("full")
    assert cache.groups(5) == ()
    with pytest.raises(SpecError, match="which is in no group"):
        cache.attend(5, torch.randn(12, 4, 16), None, None, step)


def test_k_only_reads_keys_as_values() -> None:
    cache, step = _step({"full": K_ONLY})
    q, k = torch.randn(12, 4, 16), torch.randn(12, 2, 16)
    out = cache.attend(0, q, k, None, step)
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / 4
    seen = torch.ones(12, 12, dtype=torch.bool).tril()
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    close_to(out, torch.einsum("hqk,khd->qhd", weights, k.repeat_interleave(2, 1)))
    with pytest.raises(SpecError, match=r"1 \(k"):
        cache.attend(0, q, k, k, step)


def test_aliases_read_and_never_write() -> None:
    groups = {"full": FULL, "local": {**WINDOW, "layers": [2]}}
    cache = cache_of(groups, model={"aliases": [[3, 1], [4, 2]]})
    step = cache.extend(cache.open(), 12)
    q, k, v = torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    out = cache.attend(1, q, k, v, step)
    assert torch.equal(cache.attend(3, q, None, None, step), out)
    with pytest.raises(SpecError, match="an earlier one"):
        cache.attend(3, q, k, v, step)
    assert cache.pool(4)[0] is cache.pool(2)[0]


# ---- gates -----------------------------------------------------------------------------------


def test_readers_wait_for_their_layer() -> None:
    cache = cache_of({"full": FULL}, model={"aliases": [[2, 1]]})
    step = cache.extend(cache.open(), 3)
    feed = Feed(cache)
    feed.run(step, [1, 2, 3])
    q, done = torch.randn(3, 4, 16), []
    gate = cache.gate()

    def read(layer: int) -> None:
        cache.attend(layer, q, None, None, step)
        done.append(layer)

    readers = {layer: threading.Thread(target=read, args=(layer,)) for layer in (0, 1, 2)}
    for reader in readers.values():
        reader.start()
    readers[0].join(0.05)
    assert done == []
    gate.open(0)
    readers[0].join(5)
    assert done == [0]
    gate.open(1)
    for layer in (1, 2):
        readers[layer].join(5)
    assert sorted(done) == [0, 1, 2]
    assert gate.done


def test_other_layers_pass_a_gate_and_a_failed_load_is_an_error() -> None:
    cache, step = _step("full")
    q = torch.randn(12, 4, 16)
    gate = cache.gate([1])
    cache.attend(0, q, None, None, step)
    gate.fail("the other side is gone")
    with pytest.raises(BuildError, match="the other side is gone"):
        cache.attend(1, q, None, None, step)


# ---- memory that stores nothing --------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_null_memory_counts_and_refuses(model: str) -> None:
    laid = plan(spec_of(MODELS[model], memory={"name": "null"}))
    stored = plan(spec_of(MODELS[model]))
    assert laid.tables[0].num_pages == stored.tables[0].num_pages
    assert laid.bytes + laid.counted_bytes == stored.bytes
    assert any("counted, not allocated" in note for note in laid.notes)
    cache = build(laid)
    a, b = cache.open(2)
    step = cache.extend([a, b], [9, 4])
    group = next(group for group in laid.groups if group.kind != "linear")
    pool, index = cache.pool(group.layers[0], group.group)
    assert all(view.is_meta for view in pool.views(index).values())
    rows = {t.name: torch.randn(13, *(n for _, n in t.logical.axes)) for t in group.tensors}
    with pytest.raises(BuildError, match="store nothing"):
        pool.write(index, step.tables[group.table].slots, **rows)
    cache.commit(step)
    cache.fork(a, 1)
    cache.commit(cache.extend([a], 1))
    (c,) = cache.load(cache.offload([b]))
    cache.close([a, c])


def test_null_memory_attends_over_nothing() -> None:
    cache, step = _step("dsa", memory={"name": "null"})
    with pytest.raises(BuildError, match="memory=auto"):
        cache.attend(0, torch.randn(12, 4, 48), None, None, step)
    with pytest.raises(BuildError, match="memory=auto"):
        cache.select(0, torch.randn(12, 2, 16), None, step)


def test_null_memory_has_no_bytes_to_share() -> None:
    with pytest.raises(PlanError, match=r"memory\.budget=null"):
        plan(spec_of(MODELS["full"], memory={"name": "null", "budget": 2**20}))


# ---- drafts ----------------------------------------------------------------------------------


def test_a_draft_has_its_own_geometry_and_shares_tables() -> None:
    own = {"full": {**FULL, "layers": "0", "kv_heads": 1, "head_dim": 32}, "state": STATE}
    draft = {"num_layers": 3, "groups": own}
    cache = cache_of("hybrid", model={"draft": draft})
    groups = {group.name: group for group in cache.plan.groups}
    assert groups["draft_full"].layers == (6,)
    assert groups["draft_state"].layers == (6, 8)
    assert groups["draft_full"].table == groups["full"].table == "full"
    assert groups["draft_state"].table == groups["state"].table
    driver = Driver(cache)
    (sequence,) = driver.open()
    outs = [driver.step({sequence: part})[sequence] for part in ([1, 2, 3], [4], [5, 6])]
    close_to(torch.cat(outs), scratch(cache, driver.tokens[sequence]))


def test_a_draft_may_read_the_target_and_own_nothing() -> None:
    cache = cache_of("windows", model={"draft": {"num_layers": 2, "reads": [[0, 1], [1, 3]]}})
    assert cache.plan.bytes == cache_of("windows").plan.bytes
    step = cache.extend(cache.open(), 12)
    feed = Feed(cache)
    feed.run(step, some_tokens(12))
    q = torch.randn(12, 4, 32)
    out = cache.attend(3, q, None, None, step)
    assert torch.equal(cache.attend(7, q, None, None, step), out)


def test_layer_sets_of_the_target_stay_the_targets() -> None:
    recipes = {"edge": {"layers": [0, -1], "quant": {"k": "int8_token_head"}}}
    groups = {"full": {**FULL, "layers": "not 2"}}
    draft = {"num_layers": 1, "groups": {"full": {**FULL, "layers": "0"}}}
    laid = plan(spec_of(groups, model={"draft": draft}, kv={"recipes": recipes}))
    assert {g.name: g.layers for g in laid.groups} == {
        "full": (1, 3, 4),
        "full.edge": (0, 5),
        "draft_full": (6,),
    }


@pytest.mark.parametrize(
    ("draft", "match"),
    [
        ({"num_layers": 1, "dtype": "bfloat16"}, "model.draft.dtype=float32"),
        ({"num_layers": 1, "reads": [[0, 6]]}, r"model\.draft\.reads"),
        ({"num_layers": 1, "aliases": [[1, 0]]}, r"model\.draft\.aliases"),
        ({"num_layers": 1, "groups": {"full": {**FULL, "layers": [1]}}}, "model.draft.groups.full"),
        ({"num_layers": 2, "reads": [[0, 5]]}, "an owner with a cache"),
    ],
)
def test_impossible_drafts_are_refused(draft: dict[str, Any], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        plan(spec_of(MODELS["full"], model={"draft": draft}))
