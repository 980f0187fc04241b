"""The oracle: attention in plain torch, float32 accumulation, any layout and any quant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfactory.backends.contract import AttentionRunner, Needs
from kvfactory.cacheplan import GroupPlan, Limits
from kvfactory.spec import Device

if TYPE_CHECKING:
    from torch import Tensor

    from kvfactory.pools import Pool


FEATURES = frozenset(
    {"window", "chunk", "soft_cap", "sinks", "non_causal", "cross", "mla", "k_only"}
    | {"exact", "tree_mask", "select"}
)


@dataclass(frozen=True)
class TorchBackend:
    """Serves every group on every device; the specification that other backends are held to."""

    name: str = "torch"
    rank: int = 0

    def needs(self, device: Device) -> Needs:
        """Nothing but torch."""
        return Needs(device_types=frozenset({"cpu", "cuda"}), features=FEATURES)

    def workspace(
        self, groups: Sequence[GroupPlan], limits: Limits, device: Device
    ) -> Mapping[str, int]:
        """None."""
        return {}

    def bind(
        self, group: GroupPlan, pool: Pool, workspace: Mapping[str, Tensor]
    ) -> AttentionRunner:
        """The oracle over ``pool``."""
        from kvfactory.reference import Oracle

        return Oracle(group, pool)


PLUGINS = (TorchBackend(),)
