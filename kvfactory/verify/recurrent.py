"""A recurrent layer in plain torch over a cache's states: what verification drives and checks.

Between the projections of a model (which are drawn here) lie convolutions and the recurrence:

- gdn, kda: the first convolution runs over q, k and v; q and k of unit length; gates drawn.
- mamba2: over x, B and C; step sizes drawn. mamba1: over x; step sizes, B and C drawn.
- lightning: q, k and v drawn, a fixed slope per head. none: convolutions alone.

    layer = LinearLayer(group, spec.model.groups[group.group], layer_id)
    inputs = layer.draw(tokens)                          # of a whole step, in batch order
    out = layer.advance(cache.state(layer_id, step), inputs, step)      # [tokens, features]
    want, _ = layer.run(layer.fresh(), history)          # one request, all its inputs in one go

``LinearInputs.part`` cuts and ``LinearInputs.join`` concatenates inputs along tokens. Up to
``SCANNED`` tokens are scanned one by one, which differs in nothing but the rounding of whole
tensors however they are split; so are states of few keys a head (Mamba-1), where blocks cost more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

from kvfactory.planning.cacheplan import GroupPlan, Recurrence
from kvfactory.planning.geometry import heads_of
from kvfactory.quant.numerics import torch_dtype
from kvfactory.reference.conv import causal_conv
from kvfactory.reference.drives import gated_delta, kimi_delta, lightning, mamba1, mamba2
from kvfactory.reference.recurrence import Drive, chunk, scan
from kvfactory.spec import LinearGroup
from kvfactory.states.planes import fetch, store
from kvfactory.states.rings import BASE, PENDING, Ring
from kvfactory.states.views import StateViews
from kvfactory.steps.step import Step

SCANNED = 16

State = dict[str, Tensor]
"""Tensor name -> [*axes] of one request: ``conv0`` ..., ``recurrent``."""


@dataclass(frozen=True)
class LinearInputs:
    """What projections give a layer for n tokens: ``conv`` by convolution [n, channels], in the
    model's type, and ``drawn`` by name [n, ...] float32.
    """

    conv: tuple[Tensor, ...]
    drawn: Mapping[str, Tensor]

    def part(self, start: int, stop: int) -> LinearInputs:
        """Tokens ``start:stop``."""
        drawn = {name: x[start:stop] for name, x in self.drawn.items()}
        return LinearInputs(tuple(x[start:stop] for x in self.conv), drawn)

    def join(self, later: LinearInputs) -> LinearInputs:
        """These tokens, then those of ``later``."""
        drawn = {name: torch.cat([x, later.drawn[name]]) for name, x in self.drawn.items()}
        pairs = zip(self.conv, later.conv, strict=True)
        return LinearInputs(tuple(torch.cat(pair) for pair in pairs), drawn)


@dataclass(frozen=True)
class Run:
    """What tokens did: ``out`` float32 [n, features], the state after them, and their drive."""

    out: Tensor
    state: State
    drive: Drive | None


class LinearLayer:
    """One layer of recurrent ``group`` with weights drawn for model layer ``layer``.

    Equal seeds give equal numbers on every ``device``.
    """

    def __init__(
        self,
        group: GroupPlan,
        spec: LinearGroup,
        layer: int,
        dtype: str = "bfloat16",
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        assert isinstance(group.work, Recurrence)
        self.group, self.work, self.spec = group, group.work, spec
        self.heads, self.dtype = heads_of(spec), torch_dtype(dtype)
        self.device = device
        self._random = torch.Generator().manual_seed(seed * 100_003 + layer)
        self._weights = [
            self._normal(channels, taps + 1) / (taps + 1) ** 0.5 for channels, taps in spec.conv
        ]
        heads = self.heads.heads if self.heads else spec.conv[0][0] if spec.conv else 1
        self._rates = torch.rand(heads, generator=self._random).to(device) * 0.5 + 0.01
        self._shapes = self._drawn_shapes()

    # ---- inputs ------------------------------------------------------------------------------

    def draw(self, tokens: int) -> LinearInputs:
        """Random inputs of ``tokens`` tokens; the next call draws others."""
        conv = tuple(
            self._normal(tokens, channels).to(self.dtype) for channels, _ in self.spec.conv
        )
        shapes = self._shapes.items()
        return LinearInputs(conv, {name: self._normal(tokens, *shape) for name, shape in shapes})

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random).to(self.device)

    def _drawn_shapes(self) -> dict[str, tuple[int, ...]]:
        rule, heads = self.work.rule, self.heads
        if rule == "mamba1":
            assert self.spec.recurrent is not None
            channels, states = self.spec.recurrent["channel"], self.spec.recurrent["state"]
            return {"dt": (channels,), "b": (states,), "c": (states,)}
        if heads is None:
            return {}
        per_head, by_rule = (heads.heads,), dict[str, dict[str, tuple[int, ...]]]()
        by_rule["gdn"] = {"gate": per_head, "beta": per_head}
        by_rule["kda"] = {"gate": (heads.heads, heads.key), "beta": per_head}
        by_rule["mamba2"] = {"dt": per_head}
        shapes = by_rule.get(rule, {})
        if self._stacked():
            return shapes
        keys = (heads.key_heads, heads.key)
        return {**shapes, "q": keys, "k": keys, "v": (heads.heads, heads.value)}

    def _stacked(self) -> bool:
        """Whether the first convolution runs over q, k and v."""
        if self.heads is None or not self.spec.conv:
            return False
        heads, key_heads, key, value = self.heads
        return self.spec.conv[0][0] == heads * value + 2 * key_heads * key

    # ---- one request -------------------------------------------------------------------------

    def fresh(self) -> State:
        """The state before any token: zeros [*axes]."""
        return {
            tensor.name: torch.zeros(
                [extent for _, extent in tensor.logical.axes],
                dtype=torch_dtype(tensor.logical.dtype),
                device=self.device,
            )
            for tensor in self.group.tensors
        }

    def run(self, state: State, inputs: LinearInputs, one_by_one: bool = False) -> Run:
        """All tokens of ``inputs`` after ``state``, which is left alone."""
        outs, after = [], dict(state)
        for number, (x, weight) in enumerate(zip(inputs.conv, self._weights, strict=True)):
            name = f"conv{number}"
            first = self.work.conv_window_first
            out, window = causal_conv(state[name], x, weight, window_first=first)
            outs.append(out)
            after[name] = window.to(state[name].dtype)
        if "recurrent" not in state:
            return Run(torch.cat(outs, -1), after, None)
        drive = self._drive(outs[0] if outs else None, inputs.drawn)
        axes = tuple(name for name, _ in self.group.tensor("recurrent").logical.axes)
        short = one_by_one or min(drive.tokens, drive.k.shape[-1]) <= SCANNED
        out, recurrent = (scan if short else chunk)(state["recurrent"], axes, drive)
        after["recurrent"] = recurrent.to(state["recurrent"].dtype)
        return Run(torch.cat([out.flatten(1), *outs[1:]], -1), after, drive)

    def _drive(self, mixed: Tensor | None, drawn: Mapping[str, Tensor]) -> Drive:
        """What drives the recurrence: keys and values as rings keep them, in the model's type."""
        if self.work.rule == "mamba1":
            assert mixed is not None
            a = -self._rates.unsqueeze(-1).expand(len(self._rates), drawn["b"].shape[-1])
            return self._rounded(mamba1(mixed, softplus(drawn["dt"]), a, drawn["b"], drawn["c"]))
        q, k, v = self._qkv(mixed, drawn)
        assert self.heads is not None
        scale = self.heads.key**-0.5
        if self.work.rule == "mamba2":
            return self._rounded(mamba2(v, softplus(drawn["dt"]), -self._rates, k, q))
        if self.work.rule == "lightning":
            return self._rounded(lightning(q, k * scale, v, self._rates))
        rule = {"gdn": gated_delta, "kda": kimi_delta}[self.work.rule]
        gate, beta = logsigmoid(drawn["gate"] + 3), torch.sigmoid(drawn["beta"])
        q, k = normalize(q, dim=-1), normalize(k, dim=-1)
        return self._rounded(rule(q, k, v, gate, beta, scale))

    def _qkv(
        self, mixed: Tensor | None, drawn: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self._stacked():
            return drawn["q"], drawn["k"], drawn["v"]
        assert mixed is not None
        assert self.heads is not None
        heads, key_heads, key, value = self.heads
        sizes = [key_heads * key, key_heads * key, heads * value]
        q, k, v = torch.split(mixed, sizes, -1)
        keys = (len(mixed), key_heads, key)
        return q.reshape(keys), k.reshape(keys), v.reshape(len(mixed), heads, value)

    def _rounded(self, drive: Drive) -> Drive:
        return Drive(
            q=drive.q.float(),
            k=drive.k.to(self.dtype).float(),
            v=drive.v.to(self.dtype).float(),
            log_decay=drive.log_decay.float(),
            beta=drive.beta,
        )

    # ---- a step ------------------------------------------------------------------------------

    def advance(self, views: StateViews, inputs: LinearInputs, step: Step) -> Tensor:
        """The layer's outputs float32 [tokens, features] for a step; its states move on.

        ``inputs`` are those of all new tokens of the step, in batch order.
        """
        outs, parents = [], step.host.parents
        bounds = step.host.q_indptr.tolist()
        for number, (start, stop) in enumerate(pairwise(bounds)):
            if start == stop:
                continue
            part = inputs.part(start, stop)
            slot, row = (ids[number : number + 1].long() for ids in (views.slots, views.rows))
            if stop - start <= views.nodes:
                tree = range(-1, stop - start - 1) if parents is None else parents[start:stop]
                outs.append(self._draft(views, slot, int(row), part, [int(p) for p in tree]))
            else:
                outs.append(self._extend(views, slot, part))
        return torch.cat(outs) if outs else torch.zeros(0, 0)

    def _load(self, views: StateViews, slot: Tensor) -> State:
        state = {
            t.name: fetch(views.pool, views.index, slot, t.name)[0] for t in self.group.tensors
        }
        if views.ring:
            pending = int(views.ring.cursor(views.index, slot)[0, PENDING])
            state["recurrent"] = views.ring.current(views.index, slot, pending)[0]
        return state

    def _extend(self, views: StateViews, slot: Tensor, part: LinearInputs) -> Tensor:
        """Tokens that stay: the new state goes to its slot, or a decoded record to the ring."""
        ring, before = views.ring, self._load(views, slot)
        done = self.run(before, part)
        decoded = ring is not None and not ring.drafts and len(done.out) == 1
        if ring and decoded:
            _record_decode(ring, views.index, slot, before["recurrent"], done.drive)
        elif ring:
            ring.empty(views.index, slot)
        for name, value in done.state.items():
            if not (decoded and name == "recurrent"):
                store(views.pool, views.index, slot, name, value.unsqueeze(0))
        return done.out

    def _draft(
        self, views: StateViews, slot: Tensor, row: int, part: LinearInputs, parents: Sequence[int]
    ) -> Tensor:
        """Tokens that may be rejected: the state after each goes to snapshots or the ring."""
        root, outs = self._load(views, slot), []
        after: list[State] = []
        ring = views.ring
        cursor = ring.cursor(views.index, slot)[0] if ring else None
        for node, parent in enumerate(parents):
            before = root if parent < 0 else after[parent]
            done = self.run(before, part.part(node, node + 1))
            outs.append(done.out)
            after.append(done.state)
            for name, view in views.snapshots.items():
                view[row, node] = done.state[name]
            if ring and cursor is not None:
                place = (cursor[BASE] + cursor[PENDING] + node) % ring.tokens
                ring.append(views.index, slot, place, _record(ring, done.drive))
        return torch.cat(outs)


def _record(ring: Ring, drive: Drive | None) -> dict[str, Tensor]:
    """The ring's record of a drive of one token."""
    assert drive is not None
    shared = ring.heads.heads // ring.heads.key_heads
    gate = drive.log_decay[0]
    record = {"value": drive.v[0], "key": drive.k[0, ::shared]}
    record["gate"] = gate.squeeze(-1) if gate.shape[-1] == 1 else gate
    if drive.beta is not None:
        record["beta"] = drive.beta[0]
    return record


def _record_decode(
    ring: Ring, index: int, slot: Tensor, before: Tensor, drive: Drive | None
) -> None:
    """Append what a decoded token added to the state ``before`` it, emptying a full ring first."""
    assert drive is not None
    cursor = ring.cursor(index, slot)
    if int(cursor[0, PENDING]) == ring.tokens:
        ring.flush(index, slot)
        cursor = ring.cursor(index, slot)
    record = _record(ring, drive)
    if drive.beta is not None:
        decay = Drive(drive.k, drive.k * 0, drive.v, drive.log_decay)
        recalled = scan(before, ring.axes, decay)[0][0]
        record["value"] = (drive.v[0] - recalled) * drive.beta[0].unsqueeze(-1)
    ring.append(index, slot, cursor[0, PENDING], record)
    cursor[0, PENDING] += 1
    ring.set_cursor(index, slot, cursor)
