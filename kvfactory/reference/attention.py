"""The oracle: attention over a paged pool, one path for decode, extend and prefill.

Everything is summed in float32. An entry that covers several tokens counts from the last of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfactory.planning.cacheplan import Attention, GroupPlan
from kvfactory.reference.paged import Reader, Request, entry_slots, live_requests
from kvfactory.reference.softmax import Queries, Stored, attend, finite, first_visible

if TYPE_CHECKING:
    from kvfactory.backends.contract import AttendExtra
    from kvfactory.steps.step import Step

FEW_QUERIES = 16
"""Up to here, strided keys cost less than copying them."""


class Oracle:
    """Attention over one group's pool, the specification that other backends are held to.

    A key is visible when it is stored, not after the query (unless the group is not causal),
    within the query's window or chunk, and allowed by ``mask`` and ``select``. A ``mask`` replaces
    causality; windows still hold. A query that sees nothing gives zeros; a non-finite entry makes
    NaN of the queries that see it and of no others. Soft cap: cap * tanh(logit / cap) (Gemma 2,
    arXiv:2408.00118). Sinks: one more logit per head in the denominator (gpt-oss;
    arXiv:2309.17453), neither scaled nor capped. Cross attention reads what is stored, also with
    exact new tokens.

    Args:
        group: an attention group.
        reader: its pool.
        accumulate: the type of all arithmetic; float64 is for tests.
    """

    def __init__(
        self, group: GroupPlan, reader: Reader, accumulate: torch.dtype = torch.float32
    ) -> None:
        assert isinstance(group.work, Attention)
        self.group, self.work, self.reader = group, group.work, reader
        self.accumulate = accumulate
        self.latent = self.work.geometry == "mla"
        value = "latent" if self.latent else "v" if group.has("v") else "k"
        self.v_dim = group.tensor(value).logical.extent("dim")

    def attend(self, layer_index: int, q: Tensor, step: Step, extra: AttendExtra) -> Tensor:
        """Attention of ``q`` [tokens, q_heads, dim] over the pool: [tokens, q_heads, v_dim].

        Returns the type of ``q``; tokens of padded batch entries are zero.

        Raises:
            BooksError: a visible entry lies in a released page.
        """
        return self.attend_lse(layer_index, q, step, extra)[0]

    def attend_lse(
        self, layer_index: int, q: Tensor, step: Step, extra: AttendExtra
    ) -> tuple[Tensor, Tensor]:
        """``attend``, and the log of the denominator [tokens, q_heads] (natural, sinks included).

        The LSE is -inf where a query sees nothing and has no sink.

        Raises:
            BooksError: a visible entry lies in a released page.
        """
        out = q.new_zeros(*q.shape[:2], self.v_dim)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=self.accumulate)
        for request in live_requests(step, step.tables[self.group.table]):
            rows = slice(request.start, request.stop)
            queries = self._queries(q, request, step, extra)
            stored = self._stored(layer_index, request, step, extra)
            found, lse[rows] = attend(queries, stored, self.work, extra.sinks)
            out[rows] = found.to(q.dtype)
        return out, lse

    def _queries(self, q: Tensor, request: Request, step: Step, extra: AttendExtra) -> Queries:
        rows = slice(request.start, request.stop)
        count = request.stop - request.start
        mask, select = extra.mask, extra.select
        if mask is not None:
            part = mask[request.mask_start : request.mask_start + count * request.kv_tokens]
            mask = part.view(count, request.kv_tokens)
        return Queries(
            q=q[rows].to(self.accumulate) * self.work.scale,
            order=torch.arange(request.prefix, request.prefix + count, device=q.device),
            positions=step.positions[rows],
            mask=mask,
            select=None if select is None else select[rows],
        )

    def _stored(self, layer_index: int, request: Request, step: Step, extra: AttendExtra) -> Stored:
        per_entry = self.group.tokens_per_entry
        positions = step.positions[request.start : request.stop]
        first = int(first_visible(self.work, positions).min()) // per_entry
        first = min(first, request.kv_tokens // per_entry)
        slots = entry_slots(step.tables[self.group.table], request, self.group, first)
        tensors = self.reader.read(layer_index, slots, torch.float32)
        if extra.new_k is not None and self.group.kind != "cross":
            tensors = self._with_new(tensors, first, request, step, extra)
        k, v, broken = finite(*self._keys_values(tensors))
        if len(positions) > FEW_QUERIES:
            k, v = k.contiguous(), v.contiguous()
        return Stored(k, v, first, per_entry, self._ends(first, request, positions), broken)

    def _keys_values(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [H, n, dim]; a latent key is the latent and the rope key together."""
        rows = {name: x.to(self.accumulate).transpose(0, 1) for name, x in tensors.items()}
        if not self.latent:
            return rows["k"], rows["v"] if "v" in rows else rows["k"]
        latent = rows["latent"]
        return torch.cat([latent, rows["rope"]], -1) if "rope" in rows else latent, latent

    def _with_new(
        self,
        tensors: dict[str, Tensor],
        first: int,
        request: Request,
        step: Step,
        extra: AttendExtra,
    ) -> dict[str, Tensor]:
        """``tensors`` with the entries that this step completed as the caller gave them."""
        names = ("latent", "rope") if self.latent else ("k", "v")
        per_entry = self.group.tokens_per_entry
        new_from, new_to = request.prefix // per_entry, request.kv_tokens // per_entry
        at = _completed_before(step, request.start, per_entry) - new_from
        mixed = dict(tensors)
        for name, new in zip(names, (extra.new_k, extra.new_v), strict=True):
            if name in tensors and new is not None:
                old = tensors[name][: max(new_from - first, 0)]
                rows = new[at + max(first, new_from) : at + new_to]
                mixed[name] = torch.cat([old, rows.reshape(-1, *old.shape[1:]).to(old.dtype)])
        return mixed

    def _ends(self, first: int, request: Request, positions: Tensor) -> Tensor:
        """Position of the last token of each entry from ``first`` on, int64 [n]."""
        per_entry = self.group.tokens_per_entry
        stop = request.kv_tokens // per_entry
        order = torch.arange(first + 1, stop + 1, device=positions.device) * per_entry - 1
        if self.group.kind == "cross":
            return order
        new = order - request.prefix
        return torch.where(new < 0, order, positions[new.clamp(0, len(positions) - 1)])


def _completed_before(step: Step, start: int, per_entry: int) -> int:
    """Entries that the batch entries before token ``start`` completed in this step."""
    lengths = step.q_indptr[1:] - step.q_indptr[:-1]
    earlier = step.q_indptr[1:] <= start
    done = (step.prefix + lengths) // per_entry - step.prefix // per_entry
    return int(done[earlier].sum())
