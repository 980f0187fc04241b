"""Annexes: what recurrent groups keep beside their states, planned like any other group.

Snapshots hold the state after each of the D = 1 + draft_tokens tokens of a verified step, in a
slot for each request row. Windows of K - 1 inputs of consecutive tokens overlap in all but one
column: a chain stores the D + K - 2 columns once, a tree (and Kimi delta attention, whose kernels
transpose windows) D windows. Rings hold what drove the last tokens, in the slots of the states;
with the accepted ones folded into the state there need be no snapshots of it. Checkpoints are
states in eight-bit integers. All annexes lie in the layout ``state_split``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvfactory.errors import Problem
from kvfactory.kinds import Lifetime
from kvfactory.planning.cacheplan import Annex, Limits
from kvfactory.planning.geometry import Heads, heads_of, logical_tensors
from kvfactory.planning.grouping import Draft, Findings, TableKey
from kvfactory.planning.storage import DEFAULT_QUANT, arrange, choose_layout, store
from kvfactory.quant import Logical
from kvfactory.spec import Engine, LinearGroup, Plugin, Quants, Spec

ROWS = TableKey(Lifetime("row"), 0)
CHECKPOINTS = TableKey(Lifetime("checkpoint"), 0)
CURSOR = ("pending", "base", "flush")
"""The numbers of a ring's cursor: tokens in it, the place of the oldest, whether it is full."""


def draft_annexes(spec: Spec, drafts: Iterable[Draft], findings: Findings) -> tuple[Draft, ...]:
    """The annexes of the recurrent groups among ``drafts``.

    Raises:
        PlanError: a replay that the drafts or the recurrences do not go with.
    """
    linear = [
        (draft, group)
        for draft in drafts
        if isinstance(group := spec.model.groups[draft.group], LinearGroup)
    ]
    findings.problems += _replay_problems(spec.engine, [group for _, group in linear])
    findings.check()
    findings.notes += _unused(spec, bool(linear))
    return tuple(
        _annex(base, annex, tensors)
        for base, group in linear
        for annex, tensors in _annexes(base, group, spec)
    )


def fixed_slots(drafts: Iterable[Draft], limits: Limits, spec: Spec) -> Mapping[TableKey, int]:
    """Slots of annexes that do not follow the number of states, sinks included."""
    slots = {ROWS: 1 + limits.max_requests, CHECKPOINTS: 1 + (spec.memory.checkpoints or 0)}
    return {draft.key: slots[draft.key] for draft in drafts if draft.key in slots}


def replayed(group: LinearGroup, engine: Engine) -> bool:
    """Whether ``group`` folds accepted drafts from a ring, in place of snapshots of its state."""
    return engine.state_replay.startswith("verify") and heads_of(group) is not None


def _annexes(
    base: Draft, group: LinearGroup, spec: Spec
) -> Iterator[tuple[Annex, tuple[Logical, ...]]]:
    engine, states = spec.engine, logical_tensors(group, spec.model.dtype)
    if engine.draft_tokens:
        tokens = 1 + engine.draft_tokens
        overlap = not engine.draft_tree and group.recurrence != "kda"
        kept = [s for s in states if s.name != "recurrent" or not replayed(group, engine)]
        snapshots = tuple(_snapshots(state, tokens, overlap) for state in kept)
        if snapshots:
            yield Annex(base.name, "snapshots", tokens, overlap), snapshots
    heads = heads_of(group)
    if heads and engine.state_replay != "none":
        tokens, cursor = ring_tokens(group, engine)
        yield Annex(base.name, "ring", tokens), _ring(group, heads, engine, spec, tokens, cursor)
    if spec.memory.checkpoints:
        yield Annex(base.name, "checkpoints"), states


def _annex(base: Draft, annex: Annex, tensors: tuple[Logical, ...]) -> Draft:
    key = {"snapshots": ROWS, "ring": base.key, "checkpoints": CHECKPOINTS}[annex.use]
    quant = Plugin(name="state_int8") if annex.use == "checkpoints" else DEFAULT_QUANT
    path, layout = choose_layout("state", ())
    stored = tuple(
        store(tensor, [("memory.checkpoints", Quants(state=quant))]) for tensor in tensors
    )
    return Draft(
        name=f"{base.name}.{annex.use}",
        group=base.group,
        kind=base.kind,
        layers=base.layers,
        key=key,
        page_slots=1,
        tokens_per_entry=1,
        stored=stored,
        placed=arrange(stored, layout, None, path),
        work=annex,
    )


def _snapshots(state: Logical, tokens: int, overlap: bool) -> Logical:
    axes = (("node", tokens), *state.axes)
    if overlap and state.name != "recurrent":
        axes = tuple((n, size + tokens - 1 if n == "tap" else size) for n, size in state.axes)
    return Logical(state.name, "state", axes, state.dtype)


# ---- rings -----------------------------------------------------------------------------------


def ring_tokens(group: LinearGroup, engine: Engine) -> tuple[int, bool]:
    """Tokens in the ring of ``group``, and whether it has a cursor.

    A ring that is folded at every commit holds the drafts of one step from its start on; that of
    Kimi delta attention stays a ring.
    """
    if engine.state_replay == "verify_fold" and group.recurrence != "kda":
        return 1 + engine.draft_tokens, False
    return engine.replay_tokens, True


def _ring(
    group: LinearGroup, heads: Heads, engine: Engine, spec: Spec, tokens: int, cursor: bool
) -> tuple[Logical, ...]:
    """``value``, ``key``, ``gate`` and ``beta`` of each token, and the ``cursor``.

    Of decodes the values are what was added to the state, in its type, without ``beta``; of drafts
    they and the keys are raw, in the type in which the model made them.
    """
    verify = engine.state_replay != "decode_ring"
    dtype = (group.conv_dtype or spec.model.dtype) if verify else group.state_dtype
    width = (("key", heads.key),) if group.recurrence == "kda" else ()
    token = ("token", tokens)
    found = [
        Logical("value", "state", (token, ("head", heads.heads), ("value", heads.value)), dtype),
        Logical("key", "state", (token, ("head", heads.key_heads), ("key", heads.key)), dtype),
        Logical("gate", "state", (token, ("head", heads.heads), *width), "float32"),
    ]
    if verify and group.recurrence in ("gdn", "kda"):
        found.append(Logical("beta", "state", (token, ("head", heads.heads)), "float32"))
    if cursor:
        found.append(Logical("cursor", "state", (("field", len(CURSOR)),), "int32"))
    return tuple(found)


# ---- what does not go together ---------------------------------------------------------------


def _replay_problems(engine: Engine, groups: Iterable[LinearGroup]) -> Iterator[Problem]:
    path, replay = "engine.state_replay", engine.state_replay
    if replay == "none":
        return
    fitting = [group for group in groups if heads_of(group)]
    if not fitting:
        need = "a recurrence with heads (mamba2, gdn, kda, lightning)"
        yield Problem(path, f"{replay} without one", need, f"{path}=none")
    if replay == "decode_ring" and engine.draft_tokens:
        need = "verify_fold or verify_ring, which replay drafts"
        yield Problem(path, f"{replay} with drafts", need, f"{path}=verify_fold")
    if replay != "decode_ring" and not engine.draft_tokens:
        yield Problem(path, f"{replay} without drafts", "engine.draft_tokens", f"{path}=none")
    if replay != "decode_ring" and engine.draft_tree:
        yield Problem(path, f"{replay} of a draft tree", "a chain", "engine.draft_tree=false")
    for group in fitting:
        yield from _length_problems(engine, group)


def _length_problems(engine: Engine, group: LinearGroup) -> Iterator[Problem]:
    tokens, cursor = ring_tokens(group, engine)
    if engine.state_replay == "decode_ring" or not cursor:
        return
    least = 1 + engine.draft_tokens
    power = 1 << (2 * least - 1).bit_length()
    path, fix = "engine.replay_tokens", f"engine.replay_tokens={power}"
    if group.recurrence == "kda" and (tokens < 2 * least or tokens & (tokens - 1)):
        need = f"a power of two of at least twice the {least} tokens of a step (kda)"
        yield Problem(path, str(tokens), need, fix)
    elif tokens < least:
        yield Problem(path, str(tokens), f"at least the {least} tokens of a step", fix)


def _unused(spec: Spec, linear: bool) -> Iterator[str]:
    engine = spec.engine
    given = {
        "engine.state_tracking": engine.state_tracking != "none" and not linear,
        "memory.checkpoints": spec.memory.checkpoints is not None and not linear,
    }
    for path, unused in given.items():
        if unused:
            yield f"{path} is unused: the model has no recurrent states"
    if engine.draft_tree and not engine.draft_tokens:
        yield "engine.draft_tree is unused: engine.draft_tokens=0"
