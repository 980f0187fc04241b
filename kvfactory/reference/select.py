"""Sparse selection: the positions that a query may attend to, from its index keys.

Two rules. *Weighted* (DeepSeek sparse attention, DeepSeek-V3.2-Exp technical report): the score of
an entry is sum over heads of weight * relu(q . k) * dim ** -0.5. *Block* (MiniMax-M3, block sparse
attention): the score of a block is the largest q . k over its visible entries and all heads, and
the query's own block always counts among the chosen. Ties go to the lower position.

An index entry of several tokens (GLM-5-Next, DeepSeek-V4) is chosen as a whole; tokens after the
last complete entry, which no entry speaks for yet, are always chosen besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfactory.planning.cacheplan import GroupPlan
from kvfactory.planning.cacheplan import Select as SelectWork
from kvfactory.reference.paged import Reader, Request, entry_slots, live_requests

if TYPE_CHECKING:
    from kvfactory.steps.step import Step

PIECE_SCORES = 2**24


@dataclass(frozen=True)
class Rule:
    """How many units to choose, and of what.

    ``block_entries`` index entries of ``per_entry`` tokens make a unit. With ``blocks`` the block
    rule scores; else the weighted rule.
    """

    topk: int
    per_entry: int = 1
    block_entries: int = 1
    blocks: bool = False

    @property
    def unit_tokens(self) -> int:
        """Tokens of one unit."""
        return self.block_entries * self.per_entry

    @property
    def width(self) -> int:
        """Positions that a query can be given."""
        return self.topk * self.unit_tokens + self.per_entry - 1


@dataclass(frozen=True)
class Selected:
    """``positions`` int32 [tokens, width] and ``units`` int32 [tokens, topk].

    Both ascend and are padded with -1. A unit is a token, an index entry or a block.
    """

    positions: Tensor
    units: Tensor


def rule_of(group: GroupPlan) -> Rule:
    """The rule of a sparse-index group: blocks wherever a block holds several index entries."""
    assert isinstance(group.work, SelectWork)
    per_entry = group.tokens_per_entry
    block_entries = max(1, group.work.block_tokens // per_entry)
    return Rule(group.work.topk, per_entry, block_entries, blocks=block_entries > 1)


def choose(
    q: Tensor, k: Tensor, positions: Tensor, rule: Rule, weights: Tensor | None = None
) -> Selected:
    """What each query of one request selects; scores are float32, or float64 for float64 queries.

    Args:
        q: index queries, float [tokens, heads, dim].
        k: index keys of all complete entries, float [entries, dim].
        positions: of the queries, int64 [tokens].
        rule: what to choose.
        weights: float [tokens, heads], equal ones when None; the block rule has none.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = max(1, PIECE_SCORES // max(1, q.shape[1] * k.shape[0]))
    units = []
    for at in range(0, len(q), rows):
        piece = slice(at, at + rows)
        w = None if weights is None else weights[piece].to(dtype)
        scores = _scores(q[piece].to(dtype), k.to(dtype), positions[piece], rule, w)
        units.append(_top(scores, rule.topk))
    chosen = torch.cat(units) if units else q.new_zeros(0, rule.topk, dtype=torch.int64)
    return Selected(_expanded(chosen, positions, rule).int(), chosen.int())


class Selector:
    """Selection over one index group's pool; deterministic.

    Args:
        group: a sparse-index group.
        reader: its pool.
        accumulate: the type of all arithmetic; float64 is for tests.
    """

    def __init__(
        self, group: GroupPlan, reader: Reader, accumulate: torch.dtype = torch.float32
    ) -> None:
        self.group, self.reader, self.rule = group, reader, rule_of(group)
        self.accumulate = accumulate

    def select(
        self, layer_index: int, q: Tensor, step: Step, weights: Tensor | None = None
    ) -> Selected:
        """What each new token selects among the index keys that the pool holds.

        ``q`` float [tokens, index_heads, dim], ``weights`` float [tokens, index_heads]; tokens of
        padded batch entries select nothing.

        Raises:
            BooksError: an index key lies in a released page.
        """
        units = q.new_full((len(q), self.rule.topk), -1, dtype=torch.int32)
        positions = q.new_full((len(q), self.rule.width), -1, dtype=torch.int32)
        for request in live_requests(step, step.tables[self.group.table]):
            rows = slice(request.start, request.stop)
            w = None if weights is None else weights[rows]
            stop = request.prefix + request.stop - request.start
            order = torch.arange(request.prefix, stop, device=q.device)
            k = self._keys(layer_index, request, step)
            found = choose(q[rows].to(self.accumulate), k, order, self.rule, w)
            units[rows], positions[rows] = found.units, found.positions
        return Selected(positions, units)

    def _keys(self, layer_index: int, request: Request, step: Step) -> Tensor:
        slots = entry_slots(step.tables[self.group.table], request, self.group, 0)
        tensors = self.reader.read(layer_index, slots, torch.float32)
        return tensors["index_k"].flatten(1)


def _scores(q: Tensor, k: Tensor, positions: Tensor, rule: Rule, weights: Tensor | None) -> Tensor:
    """Scores of the units [tokens, units], -inf where a query sees none of it."""
    dots = torch.matmul(q, k.T) * q.shape[-1] ** -0.5
    ends = (torch.arange(len(k), device=k.device) + 1) * rule.per_entry - 1
    future = ends > positions[:, None]
    if not rule.blocks:
        heads = q.new_ones(q.shape[:2]) if weights is None else weights
        scores = torch.einsum("th,the->te", heads, dots.relu_())
        return scores.masked_fill(future, -torch.inf)
    scores = dots.amax(1).masked_fill(future, -torch.inf)
    short = -len(k) % rule.block_entries
    scores = torch.nn.functional.pad(scores, (0, short), value=-torch.inf)
    scores = scores.view(len(scores), -1, rule.block_entries).amax(-1)
    return _forced(scores, positions, rule)


def _forced(scores: Tensor, positions: Tensor, rule: Rule) -> Tensor:
    """``scores`` with +inf for the query's own block."""
    own = positions[:, None] // rule.unit_tokens
    number = torch.arange(scores.shape[1], device=scores.device)
    seen = scores > -torch.inf
    return scores.masked_fill(seen & (number == own), torch.inf)


def _top(scores: Tensor, topk: int) -> Tensor:
    """Units of the ``topk`` best scores above -inf, ascending, int64 [tokens, topk]."""
    order = torch.sort(scores, dim=1, descending=True, stable=True)
    found = order.indices[:, :topk].masked_fill(order.values[:, :topk] == -torch.inf, -1)
    found = torch.nn.functional.pad(found, (0, topk - found.shape[1]), value=-1)
    return _ascending(found)


def _expanded(units: Tensor, positions: Tensor, rule: Rule) -> Tensor:
    """Positions that the units cover up to the query, and the incomplete tail."""
    tokens = torch.arange(rule.unit_tokens, device=units.device)
    covered = units[..., None] * rule.unit_tokens + tokens
    covered = covered.masked_fill((units < 0)[..., None], -1).flatten(1)
    own = positions[:, None]
    tail = (own + 1) // rule.per_entry * rule.per_entry
    tail = tail + torch.arange(rule.per_entry - 1, device=units.device)
    if rule.per_entry > 1:
        covered = covered.masked_fill(covered >= tail[:, :1], -1)
    covered = torch.cat([covered, tail], 1)
    return _ascending(covered.masked_fill(covered > own, -1))


def _ascending(ids: Tensor) -> Tensor:
    """``ids`` [tokens, m] sorted, with the -1 last."""
    last = torch.iinfo(ids.dtype).max
    found = ids.masked_fill(ids < 0, last).sort(1).values
    return found.masked_fill(found == last, -1)
