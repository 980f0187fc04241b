"""Drafts: an accepted step of any length, and any path of a tree, is as if there had been no other.

States are compared bit for bit with replaying the accepted tokens one by one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from states_support import REPLAYED, RULES, Loop, spec_of

from kvfactory.builder import build
from kvfactory.errors import BooksError, PlanError
from kvfactory.planner import plan
from kvfactory.spec import Spec

DRAFTS = 3


def _replays(rule: str) -> list[dict[str, Any]]:
    ways: list[dict[str, Any]] = [{}]
    if rule in REPLAYED:
        ways += [
            {"state_replay": way, "replay_tokens": 8} for way in ("verify_fold", "verify_ring")
        ]
    return ways


CHAINS = [
    pytest.param(rule, way, id=f"{rule}-{way.get('state_replay', 'snapshots')}")
    for rule in RULES
    for way in _replays(rule)
]


@pytest.mark.parametrize(("rule", "way"), CHAINS)
def test_a_chain_accepted_to_any_length(rule: str, way: dict[str, Any]) -> None:
    loop = Loop(rule, engine={"draft_tokens": DRAFTS, **way})
    sequences = loop.open(3)
    for _ in range(3):
        loop.step(sequences, [1] * 3)
    for shift in range(6):
        lengths = [(shift + number) % (DRAFTS + 2) for number in range(3)]
        loop.step(sequences, [DRAFTS + 1] * 3, [range(length) for length in lengths])
        for sequence in sequences:
            loop.check(sequence, exact=True)


@pytest.mark.parametrize("rule", RULES)
def test_every_path_of_a_tree(rule: str) -> None:
    tree = [-1, 0, 0, 1, 2, 2]
    loop = Loop(rule, engine={"draft_tokens": len(tree) - 1, "draft_tree": True})
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(tree):
        paths.append([*next(p for p in paths if (p[-1] if p else -1) == parent), node])
    (sequence,) = loop.open()
    loop.step([sequence], [1])
    for path in paths:
        loop.step([sequence], [len(tree)], [path], tree)
        loop.check(sequence, exact=True)


@pytest.mark.parametrize(("rule", "way"), CHAINS)
def test_prompts_and_drafts_in_one_step(rule: str, way: dict[str, Any]) -> None:
    loop = Loop(rule, engine={"draft_tokens": DRAFTS, **way})
    a, b, c = loop.open(3)
    loop.step([a, b], [9, 2])
    loop.step([c, a, b], [11, 4, 0], [range(11), range(2), []])
    loop.step([a, b, c], [4, 3, 4], [range(3), range(1), range(4)])
    for sequence in (a, b, c):
        loop.check(sequence)


def test_windows_of_chains_share_their_columns() -> None:
    loop = Loop("gdn", engine={"draft_tokens": DRAFTS})
    pool = loop.cache._parts.pools["state.snapshots"]
    assert pool.bound.planes["conv0"].shape[2:] == (56, DRAFTS + 1 + 3 - 1)
    (sequence,) = loop.open()
    views = loop.cache.state(0, loop.cache.extend([sequence], [4]))
    assert views.snapshots["conv0"].shape[1:] == (DRAFTS + 1, 56, 3)
    assert views.snapshots["recurrent"].shape[1:] == (DRAFTS + 1, 4, 8, 6)
    row = views.snapshots["conv0"][int(views.rows[0])]
    row[0, :, 2] = 5
    assert (row[1, :, 1] == 5).all()
    assert (row[2, :, 0] == 5).all()


@pytest.mark.parametrize("engine", [{"draft_tree": True}, {}])
def test_windows_of_trees_and_of_kda_do_not(engine: dict[str, Any]) -> None:
    rule = "gdn" if engine else "kda"
    loop = Loop(rule, engine={"draft_tokens": DRAFTS, **engine})
    shape = loop.cache._parts.pools["state.snapshots"].bound.planes["conv0"].shape
    assert shape[2] == DRAFTS + 1
    assert shape[4] == 3


@pytest.mark.parametrize(
    ("rule", "engine", "path"),
    [
        ("mamba1", {"state_replay": "decode_ring"}, "state_replay"),
        ("gdn", {"state_replay": "decode_ring", "draft_tokens": 2}, "state_replay"),
        ("gdn", {"state_replay": "verify_fold"}, "state_replay"),
        ("gdn", {"state_replay": "verify_ring", "draft_tokens": 2, "draft_tree": True}, "replay"),
        ("kda", {"state_replay": "verify_fold", "draft_tokens": 3, "replay_tokens": 9}, "twice"),
        ("kda", {"state_replay": "verify_ring", "draft_tokens": 3, "replay_tokens": 4}, "=8"),
        ("gdn", {"state_replay": "verify_ring", "draft_tokens": 3, "replay_tokens": 2}, "at least"),
    ],
)
def test_replays_that_cannot_be(rule: str, engine: dict[str, Any], path: str) -> None:
    with pytest.raises(PlanError, match=path):
        plan(spec_of(rule, engine=engine))


def test_counts_on_a_device_restore_there() -> None:
    """What commit() does with counts that the host does not have yet."""
    loop = Loop("gdn", engine={"draft_tokens": DRAFTS})
    sequences = loop.open(2)
    loop.step(sequences, [1, 1])
    step = loop.cache.extend(sequences, [4, 4])
    _, inputs = loop.forward(step)
    loop.cache.commit(step, torch.tensor([3, 1]))
    for number, (sequence, taken) in enumerate(zip(sequences, (3, 1), strict=True)):
        for layer, new in inputs.items():
            part = new.part(4 * number, 4 * number + taken)
            loop.history[sequence][layer] = loop.history[sequence][layer].join(part)
        loop.check(sequence, exact=True)


def test_a_draft_head_shares_the_request_table_and_owns_its_states() -> None:
    """Slots are the target's, bytes the draft's own: a clone of the slots with a fresh pool."""
    linear = {"kind": "linear", "layers": [0], **RULES["none"]}
    draft = {"num_layers": 1, "groups": {"state": linear}}
    model = {**spec_of("none").model.model_dump(), "draft": draft}
    spec = Spec.parse({"model": model, "workload": {"requests": 2, "tokens": 32}})
    cache = build(plan(spec))
    (table,) = cache.plan.states
    target, head = (cache.plan.by_name[name] for name in ("state", "draft_state"))
    assert (target.table, head.table) == (table.name, table.name)
    assert head.offset >= target.offset + target.num_bytes
    (sequence,) = cache.open()
    step = cache.extend([sequence], [3])
    views = [cache.state(layer, step) for layer in (0, 3)]
    assert views[0].slots.tolist() == views[1].slots.tolist()
    views[1].tensors["conv0"][views[1].slots.long()] = 1
    assert not views[0].tensors["conv0"].any()
    cache.commit(step)
    (child,) = cache.fork(sequence, 1)
    step = cache.extend([child], [1])
    assert cache.state(3, step).tensors["conv0"][step.states[table.name].slots.long()].all()


@pytest.mark.parametrize(
    "accepted",
    [
        5,
        [1.5, 1],
        [None, None],
        torch.ones(2),
        torch.ones(2, dtype=torch.bool),
        torch.tensor(1),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, requires_grad=True),
        torch.ones(2, dtype=torch.int64, device="meta"),
    ],
)
def test_what_are_no_accepted_counts(accepted: Any) -> None:
    loop = Loop("gdn", engine={"draft_tokens": DRAFTS})
    step = loop.cache.extend(loop.open(2), 2)
    loop.forward(step)
    with pytest.raises(BooksError, match="accepted: "):
        loop.cache.commit(step, accepted)
    loop.cache.commit(step, torch.tensor([1, 2]))
