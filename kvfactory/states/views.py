"""What the kernels of a recurrent layer work on: views of its states at a step's slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kvfactory.planning.cacheplan import GroupPlan
from kvfactory.pools import Pool
from kvfactory.states.rings import Ring


@dataclass(frozen=True)
class StateViews:
    """One layer of a recurrent group in a step.

    ``tensors``: plane key -> [slots, *axes] in the plane's type (``conv0``, ``recurrent`` ...).
    ``slots``, ``fresh`` and ``rows`` int32 [batch]: the state slot of each sequence, whether it
    was just cleared, and its request row. Kernels leave the new state at its slot, unless the
    sequence has at most ``nodes`` new tokens in the step and ``nodes`` is not 0: then the state
    stays, that after each token goes to ``snapshots`` (name -> [rows, nodes, *axes], windows of
    convolutions overlapping in memory where drafts are chains), and commit brings the accepted one
    to the slot. Such a step is to be committed before the layers of the next one run.

    ``ring`` where the plan replays: raw views in ``records`` (name -> [slots, tokens, *axes]) with
    the cursors [slots, 3]; the recurrent tensor then has no snapshots of drafts.
    """

    group: GroupPlan
    index: int
    tensors: Mapping[str, Tensor]
    slots: Tensor
    fresh: Tensor
    rows: Tensor
    nodes: int
    snapshots: Mapping[str, Tensor]
    records: Mapping[str, Tensor]
    pool: Pool
    ring: Ring | None

    def __repr__(self) -> str:
        shapes = ", ".join(f"{key} {tuple(each.shape)}" for key, each in self.tensors.items())
        layer = self.group.layers[self.index]
        return f"StateViews(layer {layer}: {shapes}; {len(self.slots)} slots, nodes={self.nodes})"


def snapshot_views(pool: Pool, states: GroupPlan) -> dict[str, Tensor]:
    """Tensor -> [layers, rows, nodes, *axes] of the snapshots of group ``states``."""
    found = {}
    for tensor in pool.group.tensors:
        view = pool.bound.planes[tensor.name]
        axes = [name for name, _ in tensor.logical.axes]
        if "node" not in axes:
            own = states.tensor(tensor.name).logical
            taps = own.extent("tap")
            at = 2 + axes.index("tap")
            # [layers, rows, *axes without tap, nodes, tap] -> nodes first, tap where it was
            view = view.unfold(at, taps, 1).movedim(at, 2).movedim(-1, at + 1)
        found[tensor.name] = view
    return found
