"""The oracle: attention in plain torch, float32 accumulation, any layout and any quant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvfactory.backends.contract import (
    AttendExtra,
    AttentionRunner,
    Needs,
    Resources,
    SelectRunner,
)
from kvfactory.errors import Problem, SpecError
from kvfactory.planning.cacheplan import GroupPlan, Limits
from kvfactory.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from kvfactory.reference import Oracle, Selector
    from kvfactory.steps.step import Step


FEATURES = frozenset(
    {"window", "chunk", "soft_cap", "sinks", "non_causal", "cross", "k_only", "entries"}
    | {"unequal_head_dims"}
    | {"mla", "mla_window", "mla_soft_cap", "mla_exact", "exact", "selected", "select"}
    | {"center", "center_with_soft_cap", "scale_per_head", "deterministic"}
    | {"deterministic_ragged"}
)


@dataclass(frozen=True)
class OracleRunner:
    """The oracle for one group; it reads lengths from the step, so there is nothing to prepare."""

    oracle: Oracle
    takes_new: bool
    capturable: bool = False

    def prepare(self, step: Step) -> None:
        """Nothing."""

    def begin(self, step: Step) -> None:
        """Nothing."""

    def check(self, step: Step, extra: AttendExtra) -> None:
        """Nothing: it takes everything."""

    def attend(self, layer_index: int, q: Tensor, step: Step, extra: AttendExtra) -> Tensor:
        """Attention of ``q`` [tokens, q_heads, dim] over the pool: [tokens, q_heads, v_dim]."""
        return self.oracle.attend(layer_index, q, step, extra)


@dataclass(frozen=True)
class OracleSelector:
    """The oracle's selection over one index group."""

    selector: Selector

    def select(self, layer_index: int, q: Tensor, step: Step, weights: Tensor | None) -> Tensor:
        """Token positions int32 [tokens, width] that each new token attends to, -1 padded."""
        return self.selector.select(layer_index, q, step, weights).positions


@dataclass(frozen=True)
class TorchBackend:
    """Serves all but ragged prefill of stored K and V, on every device; the specification that
    other backends are held to.
    """

    name: str = "torch"
    rank: int = 0

    def needs(self, spec: Spec) -> Needs:
        """Nothing but torch.

        Raises:
            SpecError: options, which it has none of.
        """
        if spec.backend.name == self.name and spec.backend.options:
            need = "no options: backend torch has none"
            keys = [f"backend.options.{key}" for key in spec.backend.options]
            raise SpecError(*(Problem(key, "an unknown key", need) for key in keys))
        return Needs(device_types=frozenset({"cpu", "cuda"}), features=FEATURES)

    def workspace(
        self, groups: Sequence[GroupPlan], limits: Limits, spec: Spec
    ) -> Mapping[str, int]:
        """None."""
        return {}

    def kernels(self, group: GroupPlan, spec: Spec) -> Mapping[str, str]:
        """One path for everything."""
        return {"decode and prefill": "torch operations: the oracle, float32 arithmetic"}

    def bind(
        self, groups: Sequence[GroupPlan], resources: Resources
    ) -> Mapping[str, AttentionRunner]:
        """The oracle over each group's pool."""
        from kvfactory.reference import Oracle

        exact = resources.plan.spec.backend.new_tokens == "exact"
        return {
            group.name: OracleRunner(Oracle(group, resources.pools[group.name]), exact)
            for group in groups
        }

    def selectors(
        self, groups: Sequence[GroupPlan], resources: Resources
    ) -> Mapping[str, SelectRunner]:
        """Selection over each index group's pool."""
        from kvfactory.reference import Selector

        return {
            group.name: OracleSelector(Selector(group, resources.pools[group.name]))
            for group in groups
        }


PLUGINS = (TorchBackend(),)
