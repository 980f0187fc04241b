"""The backend contract: what kernels need, what they cost, and one pure check of both.

A backend module imports neither torch nor its kernels at module level. ``needs`` is data; whether
a group meets it is decided here, with reasons, so no backend has a method that raises
"unsupported" later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvfactory.cacheplan import Attention, GroupPlan, Limits, Recurrence, Select
from kvfactory.errors import Problem
from kvfactory.registry import Registry
from kvfactory.spec import BackendChoice, Device, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from kvfactory.pools import Pool
    from kvfactory.steps import Step


@dataclass(frozen=True)
class Needs:
    """What a backend can serve; ``None`` means anything.

    ``features`` are names among window, chunk, soft_cap, sinks, non_causal, cross, mla, k_only,
    exact, tree_mask, select, recurrence. ``contiguous_dim``: the innermost axis is dim, unsplit.
    ``equal_strides``: K and V views have the same shape and strides. ``max_stride_elements``
    bounds every stride.
    """

    device_types: frozenset[str]
    features: frozenset[str]
    min_sm: int = 0
    head_dims: frozenset[int] | None = None
    quants: frozenset[str] | None = None
    contiguous_dim: bool = False
    equal_strides: bool = False
    max_stride_elements: int | None = None
    page_tokens: frozenset[int] | None = None


class AttentionRunner(Protocol):
    """A backend bound to one group's pool; made at build, called every step."""

    def attend(self, layer_index: int, q: Tensor, step: Step, extra: AttendExtra) -> Tensor:
        """Attention of ``q`` [tokens, q_heads, dim] over the pool: [tokens, q_heads, v_dim]."""
        ...


@dataclass(frozen=True)
class AttendExtra:
    """What one call of attend adds to the group's constants.

    ``new_k`` / ``new_v`` are the step's unquantized tensors (only with new_tokens=exact), ``mask``
    bool [sum over requests of q * kv] replaces causality, ``sinks`` float32 [q_heads], ``select``
    int32 [tokens, topk] token positions, -1 padded.
    """

    new_k: Tensor | None = None
    new_v: Tensor | None = None
    mask: Tensor | None = None
    sinks: Tensor | None = None
    select: Tensor | None = None


class Backend(Protocol):
    """A family of kernels. ``rank`` orders ``backend=auto``: the highest that serves wins."""

    @property
    def name(self) -> str:
        """The name in configs."""
        ...

    @property
    def rank(self) -> int:
        """Preference under ``auto``."""
        ...

    def needs(self, device: Device) -> Needs:
        """What it can serve on ``device``. Pure."""
        ...

    def workspace(
        self, groups: Sequence[GroupPlan], limits: Limits, device: Device
    ) -> Mapping[str, int]:
        """Bytes it keeps beyond the pools for the ``groups`` that it serves, by use. Pure."""
        ...

    def bind(
        self, group: GroupPlan, pool: Pool, workspace: Mapping[str, Tensor]
    ) -> AttentionRunner:
        """A runner over ``pool``; ``workspace`` are uint8 views of the planned bytes."""
        ...


BACKENDS: Registry[Backend] = Registry("backend", "kvfactory.backends", "kvfactory.backends")


def refusals(name: str, needs: Needs, group: GroupPlan, spec: Spec) -> tuple[Problem, ...]:
    """Why the backend ``name`` with ``needs`` cannot serve ``group``; empty when it can."""
    path, device = f"backend {name} for group {group.name}", spec.device
    wrong: list[Problem] = []
    if device.type not in needs.device_types:
        kinds = " or ".join(sorted(needs.device_types))
        wrong.append(Problem(path, f"device {device.name} of type {device.type}", f"type {kinds}"))
    elif device.sm < needs.min_sm:
        wrong.append(Problem(path, f"compute capability {device.sm}", f"at least {needs.min_sm}"))
    missing = sorted(features(group, spec.backend) - needs.features)
    if missing:
        wrong.append(
            Problem(path, f"a group with {', '.join(missing)}", "a backend that serves it")
        )
    return (*wrong, *_storage_refusals(needs, group, path))


def features(group: GroupPlan, choice: BackendChoice) -> frozenset[str]:
    """The features, in the words of ``Needs``, that serving ``group`` takes."""
    work = group.work
    if isinstance(work, Select):
        return frozenset({"select"})
    if isinstance(work, Recurrence):
        return frozenset({"recurrence"})
    asked: Mapping[str, Any] = {
        "window": work.window_tokens,
        "chunk": work.chunk_tokens,
        "soft_cap": work.soft_cap,
        "sinks": work.sinks,
        "non_causal": not work.causal,
        "cross": group.kind == "cross",
        "mla": work.geometry == "mla",
        "k_only": work.geometry == "gqa" and not group.has("v"),
        "exact": choice.new_tokens == "exact",
    }
    return frozenset(name for name, value in asked.items() if value)


def _storage_refusals(needs: Needs, group: GroupPlan, path: str) -> Iterable[Problem]:
    for tensor in group.tensors:
        dim = tensor.logical.extent("dim")
        if needs.quants is not None and tensor.quant not in needs.quants:
            can = ", ".join(sorted(needs.quants))
            yield Problem(path, f"{tensor.name} in {tensor.quant}", f"one of {can}")
        if (
            needs.head_dims is not None
            and isinstance(group.work, Attention)
            and dim not in needs.head_dims
        ):
            can = ", ".join(map(str, sorted(needs.head_dims)))
            yield Problem(path, f"{tensor.name} of {dim} elements a head", f"one of {can}")
    data = [plane for plane in group.planes if plane.part == "data"]
    for plane in data:
        place = plane.place
        if needs.contiguous_dim and (
            place.axes[-1] != "dim" or place.strides[-1] != place.itemsize
        ):
            yield Problem(path, f"layout '{group.layout}'", "dim innermost and whole")
        limit = needs.max_stride_elements
        if limit is not None and max(place.strides[1:], default=0) // place.itemsize >= limit:
            yield Problem(
                path,
                f"strides of {plane.key} up to {max(place.strides[1:])} B",
                f"below {limit} elements",
            )
    if needs.equal_strides and len({(p.place.shape, p.place.strides) for p in data}) > 1:
        yield Problem(
            path, f"unequal shapes or strides of {' and '.join(p.key for p in data)}", "equal ones"
        )
    if needs.page_tokens is not None and group.page_slots not in needs.page_tokens:
        can = ", ".join(map(str, sorted(needs.page_tokens)))
        yield Problem(
            path,
            f"pages of {group.page_slots}",
            f"pages of {can}",
            f"kv.page_tokens={min(needs.page_tokens)}",
        )
