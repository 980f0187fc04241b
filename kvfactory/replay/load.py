"""The load: what of a trace a model can take at all, and the spec of the plan to serve it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvfactory.kinds import ceil_div
from kvfactory.replay.traces import Trace
from kvfactory.spec import Spec


@dataclass(frozen=True)
class Load:
    """The requests of a trace with the tokens that each may grow to.

    ``total`` int64 [requests] is prompt and output, cut at ``limit``; ``refused`` counts by
    reason those that are refused on sight, ``accepted`` bool [requests] marks the others.
    """

    trace: Trace
    limit: int
    limit_is: str
    total: NDArray[np.int64]
    accepted: NDArray[np.bool_]
    refused: Mapping[str, int]

    @property
    def cut(self) -> int:
        """Accepted requests whose output ends at the limit."""
        whole = self.trace.prompt + self.trace.output
        return int(np.count_nonzero(self.accepted & (whole > self.total)))


def load_of(trace: Trace, spec: Spec) -> Load:
    """The load of ``trace`` on the model: prompts beyond the limit are refused, outputs cut.

    The limit is the model's context, or ``workload.tokens`` where somebody set that lower.
    """
    limit, named = _limit(trace, spec)
    accepted = trace.prompt <= limit
    total = np.minimum(trace.prompt + trace.output, limit)
    count = int(np.count_nonzero(~accepted))
    refused = {f"prompt beyond {named}": count} if count else {}
    return Load(trace, limit, named, total, accepted, refused)


def _limit(trace: Trace, spec: Spec) -> tuple[int, str]:
    longest = int((trace.prompt + trace.output).max())
    limits = [(longest, f"the trace's longest, {longest}")]
    context = spec.model.max_context
    if context is not None:
        limits.insert(0, (context, f"model.max_context={context}"))
    if _is_given(spec):
        tokens = spec.workload.tokens
        limits.insert(0, (tokens, f"workload.tokens={tokens}"))
    return min(limits, key=lambda limit: limit[0])


def _is_given(spec: Spec) -> bool:
    """Whether somebody set ``workload.tokens``: its default is no statement about a trace."""
    return "tokens" in spec.workload.model_fields_set


def spec_for(load: Load, spec: Spec) -> Spec:
    """The spec to plan with: as it is where ``workload.tokens`` is set, else sized by the load.

    Rows then hold the longest accepted request, and requests are counted at the mean length.
    """
    if _is_given(spec):
        return spec
    totals = load.total[load.accepted]
    longest = int(totals.max(initial=1))
    mean = spec.workload.mean_tokens or ceil_div(int(totals.sum()), max(1, len(totals)))
    update = {"tokens": longest, "mean_tokens": max(1, min(mean, longest))}
    workload = spec.workload.model_copy(update=update)
    return spec.model_copy(update={"workload": workload})
