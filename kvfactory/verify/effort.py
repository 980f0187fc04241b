"""How much of a workload a run on this machine verifies, so that it takes seconds, not hours.

The plan is built whole. What is too much for plain torch on one core is sampled, in this order:
layers of each group, requests, and the share of each prompt that is attended; the rest of the
prompt is written only. The longest request keeps its length, so windows and selections stay real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfactory.planning.cacheplan import Attention, CachePlan, GroupPlan, Select

SECONDS = 25.0
"""The aim, on one quiet core."""

FLOP_PER_SECOND = 2.4e10
STATE_SECONDS = 2e-9  # per element of a recurrent state and token
TOKEN_SECONDS = 3e-4  # per token of a recurrent layer: convolutions, drawing
NUMBER_SECONDS = 2e-8  # per number that is drawn
CHOICE_SECONDS = 5e-7  # per selected position

STEPS = (
    (10**6, 10**6, 0.0),
    (24, 10**6, 0.0),
    (12, 10**6, 0.0),
    (6, 10**6, 0.0),
    (4, 10**6, 0.0),
    (4, 4, 0.0),
    (4, 3, 0.5),
    (2, 3, 0.5),
    (2, 3, 0.8),
    (2, 2, 0.95),
    (1, 2, 0.95),
)
"""Layers a group, requests, and the share of prompts that is written only: less and less."""


@dataclass(frozen=True)
class Effort:
    """``layers`` of the model, final ``lengths`` of the requests, and the ``quiet`` share."""

    layers: tuple[int, ...]
    lengths: tuple[int, ...]
    quiet: float


def choose(plan: CachePlan) -> Effort:
    """The most that is done in about ``SECONDS``; the least there is where nothing is."""
    effort = Effort((), (), 0.0)
    for layers, requests, quiet in STEPS:
        effort = Effort(sample(plan, layers), request_lengths(plan, requests), quiet)
        if seconds(plan, effort) <= SECONDS:
            break
    return effort


def request_lengths(plan: CachePlan, most: int = 10**6) -> tuple[int, ...]:
    """Final lengths of the requests, from short to ``workload.tokens``.

    Where pages are planned for a mean length, the others are so few and short that they keep to it.
    """
    workload, longest = plan.spec.workload, plan.limits.tokens
    count = min(plan.limits.admitted, workload.requests, most)
    if workload.mean_tokens is None:
        return tuple(max(1, longest * (number + 1) // count) for number in range(count))
    page = max((table.page_tokens for table in plan.tables), default=1)
    pages = max(0, workload.mean_tokens * plan.limits.admitted - longest) // page
    others = min(count - 1, pages)
    mean_pages = pages // max(1, others)
    ramp = (max(1, 2 * mean_pages * (number + 1) // (others + 1)) for number in range(others))
    return (*(min(longest, page * pages_of_one) for pages_of_one in ramp), longest)


def sample(plan: CachePlan, count: int) -> tuple[int, ...]:
    """Up to ``count`` layers of every group, evenly spread; and what they need or share.

    Layers whose selection they use, and as many aliases of each owner.
    """
    found: set[int] = set()
    for group in plan.groups:
        found |= set(_spread(group.layers, count))
    by_owner: dict[int, list[int]] = {}
    for layer, owner in plan.spec.model.aliases:
        by_owner.setdefault(owner, []).append(layer)
    for owner in found & by_owner.keys():
        found |= set(_spread(by_owner[owner], count))
    return tuple(sorted(found))


def _spread(layers: Sequence[int], count: int) -> list[int]:
    if count >= len(layers):
        return list(layers)
    if count == 1:
        return [layers[len(layers) // 2]]
    return [layers[number * (len(layers) - 1) // (count - 1)] for number in range(count)]


def seconds(plan: CachePlan, effort: Effort) -> float:
    """A rough time for the cache's part and the reference's."""
    owner = dict(plan.spec.model.aliases)
    homes = [owner.get(layer, layer) for layer in effort.layers]
    return sum(
        sum(home in group.layers for home in homes) * _layer_seconds(group, effort)
        for group in plan.groups
    )


def _layer_seconds(group: GroupPlan, effort: Effort) -> float:
    tokens = sum(effort.lengths)
    attended = tokens * (1 - effort.quiet)
    pairs = sum(n * n * (1 - effort.quiet**2) / 2 for n in effort.lengths)
    elements = sum(tensor.logical.elements for tensor in group.tensors)
    work = group.work
    if isinstance(work, Attention):
        dims = sum(tensor.logical.extent("dim") for tensor in group.tensors)
        near = min(pairs, attended * (work.window_tokens + 128)) if work.window_tokens else pairs
        flop = 2 * work.q_heads * dims * (near + pairs)
        drawn = attended * work.q_heads * dims + tokens * elements
        return flop / FLOP_PER_SECOND + drawn * NUMBER_SECONDS
    if isinstance(work, Select):
        flop = 10 * work.index_heads * elements * pairs
        drawn = attended * work.index_heads * elements
        chosen = attended * work.topk * work.block_tokens
        return flop / FLOP_PER_SECOND + drawn * NUMBER_SECONDS + chosen * CHOICE_SECONDS
    return 2 * tokens * (elements * STATE_SECONDS + TOKEN_SECONDS)
