"""Every path of every draft tree of up to four tokens gives the state of its tokens alone."""

from __future__ import annotations

import itertools

import pytest
from states_support import RULES, Loop

TREES = [
    tree
    for size in (1, 2, 3, 4)
    for tree in itertools.product(*(range(-1, node) for node in range(size)))
]


def paths_of(tree: tuple[int, ...]) -> list[list[int]]:
    """The path to every node, and the empty one."""
    paths: dict[int, list[int]] = {-1: []}
    for node, parent in enumerate(tree):
        paths[node] = [*paths[parent], node]
    return list(paths.values())


def test_there_are_so_many_trees() -> None:
    """n tokens have n! trees, counting those of several roots."""
    assert len(TREES) == 1 + 2 + 6 + 24
    assert paths_of((-1, 0, 0, 2)) == [[], [0], [0, 1], [0, 2], [0, 2, 3]]


@pytest.mark.parametrize("rule", RULES)
def test_every_path_of_every_tree(rule: str) -> None:
    """A sequence for each path of a tree, all in one step; the next tree follows on them."""
    loop = Loop(rule, engine={"draft_tokens": 3, "draft_tree": True}, workload=_workload(5))
    sequences = loop.open(5)
    loop.step(sequences, [2] * 5)
    for tree in TREES:
        paths = paths_of(tree)
        chosen = sequences[: len(paths)]
        loop.step(chosen, [len(tree)] * len(paths), paths, list(tree) * len(paths))
        for sequence in chosen:
            loop.check(sequence, exact=True)


def _workload(requests: int) -> dict[str, int]:
    return {"requests": requests, "tokens": 160}
