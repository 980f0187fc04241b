"""Sparse selection against loops: scores, ties, visibility, blocks, entries, pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_scenes import Store, make_step
from torch import Tensor

from kvfactory.errors import BooksError
from kvfactory.planner import plan
from kvfactory.planning.cacheplan import GroupPlan
from kvfactory.reference import Rule, Selector, choose, rule_of
from kvfactory.spec import Spec


def index_plan(**index: Any) -> GroupPlan:
    data = {"kind": "sparse_index", "layers": "0-1", "selects": "main", "index_heads": 3}
    main = {"kind": "full", "layers": "0-1", "q_heads": 4, "kv_heads": 1, "head_dim": 8}
    groups = {"main": main, "index": data | {"head_dim": 8} | index}
    model = {"name": "toy", "num_layers": 2, "dtype": "float32", "groups": groups}
    return plan(Spec.parse({"model": model, "kv": {"page_tokens": 8}})).by_name["index"]


def best(scores: dict[int, float], topk: int) -> list[int]:
    """The ``topk`` best units by score, then by number; ascending."""
    return sorted(sorted(scores, key=lambda unit: (-scores[unit], unit))[:topk])


def weighted(q: Tensor, k: Tensor, weights: Tensor, at: int, rule: Rule) -> list[int]:
    """Entries of the weighted rule for one query, by loops."""
    scores = {}
    for entry in range(len(k)):
        if (entry + 1) * rule.per_entry - 1 <= at:
            dots = [float(row @ k[entry]) * len(k[entry]) ** -0.5 for row in q]
            parts = (float(w) * max(dot, 0.0) for w, dot in zip(weights, dots, strict=True))
            scores[entry] = sum(parts)
    return best(scores, rule.topk)


def block(q: Tensor, k: Tensor, at: int, rule: Rule) -> list[int]:
    """Blocks of the block rule for one query, by loops."""
    scores: dict[int, float] = {}
    for entry in range(len(k)):
        if (entry + 1) * rule.per_entry - 1 <= at:
            number = entry // rule.block_entries
            here = max(float(row @ k[entry]) for row in q)
            scores[number] = max(scores.get(number, -torch.inf), here)
    own = at // rule.unit_tokens
    if own in scores:
        scores[own] = torch.inf
    return best(scores, rule.topk)


def row_of(ids: Tensor) -> list[int]:
    """The ids before the padding, which has to come last."""
    found = ids.tolist()
    kept = [number for number in found if number >= 0]
    assert found == kept + [-1] * (len(found) - len(kept))
    return kept


@pytest.mark.parametrize("topk", [1, 4, 64])
def test_weighted_tokens(topk: int) -> None:
    torch.manual_seed(0)
    q, k, w = torch.randn(9, 3, 8).double(), torch.randn(20, 8).double(), torch.rand(9, 3)
    at, rule = torch.arange(11, 20), Rule(topk)
    found = choose(q, k, at, rule, w)
    assert found.positions.shape == (9, topk)
    assert found.positions.dtype == torch.int32
    for number in range(9):
        want = weighted(q[number], k, w[number], 11 + number, rule)
        assert row_of(found.positions[number]) == want
        assert row_of(found.units[number]) == want


def test_negative_weights_rank_below_zero() -> None:
    q, k = torch.ones(1, 1, 2), torch.tensor([[1.0, 1], [-1, -1], [2, 2]])
    found = choose(q, k, torch.tensor([2]), Rule(1), torch.tensor([[-1.0]]))
    assert found.positions.tolist() == [[1]]


def test_ties_go_to_the_lower_position() -> None:
    """relu makes zeros of all negative dots: a stable order is what makes results repeat."""
    q, k = torch.ones(2, 2, 4), -torch.ones(40, 4)
    k[30] = 1.0
    found = choose(q, k, torch.tensor([20, 39]), Rule(3))
    assert found.positions.tolist() == [[0, 1, 2], [0, 1, 30]]


@pytest.mark.parametrize("topk", [1, 2, 5])
def test_blocks(topk: int) -> None:
    torch.manual_seed(1)
    q, k = torch.randn(26, 3, 8).double(), torch.randn(26, 8).double()
    rule = Rule(topk, block_entries=4, blocks=True)
    found = choose(q, k, torch.arange(26), rule)
    for at in range(26):
        want = block(q[at], k, at, rule)
        assert row_of(found.units[at]) == want
        tokens = [t for b in want for t in range(4 * b, 4 * b + 4) if t <= at]
        assert row_of(found.positions[at]) == tokens


def test_own_block_is_chosen_whatever_it_scores() -> None:
    k = torch.ones(12, 2)
    k[8:] = -1.0
    found = choose(torch.ones(1, 1, 2), k, torch.tensor([9]), Rule(1, 1, 4, blocks=True))
    assert found.units.tolist() == [[2]]
    assert row_of(found.positions[0]) == [8, 9]


def test_entries_bring_the_incomplete_tail() -> None:
    torch.manual_seed(2)
    rule = Rule(2, per_entry=4)
    q, k, w = torch.randn(23, 3, 8).double(), torch.randn(5, 8).double(), torch.rand(23, 3)
    found = choose(q, k, torch.arange(23), rule, w)
    assert found.positions.shape == (23, 2 * 4 + 3)
    for at in range(23):
        want = weighted(q[at], k, w[at], at, rule)
        assert row_of(found.units[at]) == want
        tail = range((at + 1) // 4 * 4, at + 1)
        assert row_of(found.positions[at]) == [4 * e + i for e in want for i in range(4)] + [*tail]


def test_blocks_of_entries() -> None:
    torch.manual_seed(3)
    rule = Rule(2, per_entry=2, block_entries=3, blocks=True)
    q, k = torch.randn(21, 3, 8).double(), torch.randn(10, 8).double()
    found = choose(q, k, torch.arange(21), rule)
    for at in range(21):
        want = block(q[at], k, at, rule)
        assert row_of(found.units[at]) == want
        tokens = {t for b in want for t in range(6 * b, 6 * b + 6) if t <= at}
        assert row_of(found.positions[at]) == sorted(tokens | set(range((at + 1) // 2 * 2, at + 1)))


def test_nothing_visible_and_nothing_asked() -> None:
    empty = choose(torch.randn(2, 3, 8), torch.randn(0, 8), torch.tensor([0, 1]), Rule(2, 4))
    assert [row_of(row) for row in empty.positions] == [[0], [0, 1]]
    none = choose(torch.randn(0, 3, 8), torch.randn(4, 8), torch.arange(0), Rule(2))
    assert none.positions.shape == (0, 2)


@pytest.mark.parametrize(
    ("index", "rule"),
    [
        ({"topk": 5}, Rule(5)),
        ({"topk": 2, "block_tokens": 4}, Rule(2, 1, 4, blocks=True)),
        ({"topk": 2, "block_tokens": 4, "tokens_per_entry": 4}, Rule(2, 4)),
        ({"topk": 2, "tokens_per_entry": 4}, Rule(2, 4)),
        ({"topk": 2, "block_tokens": 8, "tokens_per_entry": 2}, Rule(2, 2, 4, blocks=True)),
    ],
)
def test_paged_equals_flat(index: dict[str, Any], rule: Rule) -> None:
    """Shuffled pages, poison where nothing was written, padding on the sink."""
    torch.manual_seed(4)
    group = index_plan(**index)
    assert rule_of(group) == rule
    store = Store(group, 12)
    pages = torch.tensor([[0, 0, 0], [9, 2, 5], [7, 0, 0]], dtype=torch.int32)
    batch = [(0, 0, 1, 1), (2, 0, 6, 6), (1, 16, 3, 19), (0, 0, 1, 0)]
    step = make_step(group.table, batch, pages, [0] * 4)
    q, w = torch.randn(11, 3, 8).double(), torch.rand(11, 3).double()
    weights = None if rule.blocks else w
    flat = {}
    for row, _, _, kv in batch[1:3]:
        entry = torch.arange(kv // rule.per_entry)
        size = group.page_slots
        slots = pages[row].long()[entry // size] * size + entry % size
        flat[row] = torch.randn(len(entry), 8)
        store.tensors["index_k"][1, slots, 0] = flat[row]
    found = Selector(group, store, torch.float64).select(1, q, step, weights)
    assert found.positions.shape == (11, rule.width)
    for (row, prefix, new, _), start in zip(batch[1:3], (1, 7), strict=True):
        rows = slice(start, start + new)
        at = torch.arange(prefix, prefix + new)
        want = choose(q[rows], flat[row].double(), at, rule, None if rule.blocks else w[rows])
        assert torch.equal(found.positions[rows], want.positions)
        assert torch.equal(found.units[rows], want.units)
    assert (found.positions[[0, 10]] == -1).all()


def test_released_index_pages_are_refused() -> None:
    group = index_plan(topk=2)
    pages = torch.tensor([[0, 0], [0, 2]], dtype=torch.int32)
    step = make_step(group.table, [(1, 9, 1, 10)], pages, [1])
    with pytest.raises(BooksError):
        Selector(group, Store(group, 4)).select(0, torch.randn(1, 3, 8), step)
