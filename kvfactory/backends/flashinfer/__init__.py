"""FlashInfer (arXiv:2501.01005): paged decode and prefill, ragged new tokens, latent attention.

What it reads in place is 16-bit or plain 8-bit K/V with the head dim innermost. With
``backend.options.dequantize=true`` everything else is first decoded, one layer at a time, into a
copy in the compute type, which is a row of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, ValidationError

from kvfactory.backends.contract import AttentionRunner, Needs, Resources, SelectRunner, refusals
from kvfactory.backends.flashinfer.sizes import Served, serve, workspace_bytes
from kvfactory.errors import SpecError
from kvfactory.planning.cacheplan import GroupPlan, Limits
from kvfactory.spec import Spec
from kvfactory.spec.validation import from_validation

ANYWHERE = frozenset(
    {"window", "soft_cap", "sinks", "non_causal", "cross", "k_only", "exact", "deterministic"}
    | {"mla"}
)
IN_PLACE = ANYWHERE | {"center"}
COPIED = ANYWHERE | {"center", "center_with_soft_cap", "scale_per_head"}


class Options(BaseModel):
    """``dequantize``: attend over a decoded copy where the pool itself cannot be read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    dequantize: bool = False


@dataclass(frozen=True)
class FlashInferBackend:
    """Kernels of the package ``flashinfer``, which is imported when the backend is bound."""

    name: str = "flashinfer"
    rank: int = 20

    def needs(self, spec: Spec) -> Needs:
        """What the kernels read in place or, when asked to, from a decoded copy."""
        return copied_needs() if _options(spec).dequantize else in_place_needs()

    def workspace(
        self, groups: Sequence[GroupPlan], limits: Limits, spec: Spec
    ) -> Mapping[str, int]:
        """Partial results, host plans, page lists and decoded copies."""
        return workspace_bytes(self.served(groups, spec), limits, spec)

    def kernels(self, group: GroupPlan, spec: Spec) -> Mapping[str, str]:
        """fa2, fa3, CUDA cores, XQA or latent kernels, by device, type and group size."""
        one = self.served([group], spec)[0]
        read = {} if one.direct else {"stored": "decoded to the compute type, a layer at a time"}
        return one.kernels.described() | read

    def served(self, groups: Sequence[GroupPlan], spec: Spec) -> tuple[Served, ...]:
        """The groups with their shapes and kernels."""
        return tuple(serve(group, self._in_place(group, spec), spec) for group in groups)

    def _in_place(self, group: GroupPlan, spec: Spec) -> bool:
        return not refusals(self.name, in_place_needs(), group, spec)

    def bind(
        self, groups: Sequence[GroupPlan], resources: Resources
    ) -> Mapping[str, AttentionRunner]:
        """Runners over the groups' pools, with every kernel compiled.

        Raises:
            BuildError: FlashInfer is missing, or of a version whose kernels are called otherwise.
        """
        from kvfactory.backends.flashinfer.bind import bind
        from kvfactory.backends.flashinfer.library import installed

        return bind(self.served(groups, resources.plan.spec), resources, installed())

    def selectors(
        self, groups: Sequence[GroupPlan], resources: Resources
    ) -> Mapping[str, SelectRunner]:
        """None: it has no kernels that select."""
        return {}


def in_place_needs() -> Needs:
    """What FlashInfer's kernels demand of the stored bytes."""
    return Needs(
        device_types=frozenset({"cuda"}),
        features=IN_PLACE,
        min_sm=80,
        head_dims=frozenset({64, 128, 256}),
        latent_dims=frozenset({(512, 64)}),
        dtypes=frozenset({"bfloat16", "float16"}),
        quants=frozenset({"plain", "fp8_e4m3", "fp8_e5m2"}),
        latent_quants=frozenset({"plain"}),
        contiguous_dim=True,
        equal_strides=True,
        max_stride_elements=2**32,
        align_bytes=16,
    )


def copied_needs() -> Needs:
    """The same where a decoded copy, 16-bit and dense, stands between."""
    return replace(
        in_place_needs(),
        features=COPIED,
        quants=None,
        latent_quants=None,
        contiguous_dim=False,
        equal_strides=False,
        max_stride_elements=None,
        align_bytes=1,
    )


def _options(spec: Spec) -> Options:
    """The backend's options; under ``auto`` other backends' are passed over."""
    given = spec.backend.options
    if spec.backend.name == "auto":
        given = {key: value for key, value in given.items() if key in Options.model_fields}
    try:
        return Options.model_validate(given)
    except ValidationError as error:
        raise SpecError(*from_validation(error, Options, "backend.options")) from None


PLUGINS = (FlashInferBackend(),)
