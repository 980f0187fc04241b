"""What the user said: the one schema of a configuration, frozen and strict.

YAML and overrides arrive as a plain dict; ``Spec.parse`` validates it and reports every problem
at once. Rules that need plugins or span several groups belong to the planner.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from kvfactory.errors import Problem, SpecError
from kvfactory.spec.kv import KV
from kvfactory.spec.model import Frozen, Model, Name, NonNegative, Positive
from kvfactory.spec.plain import plain
from kvfactory.spec.validation import from_validation

MOST_REQUESTS = 2**20
"""Rows of the device tables; numbers of a step stay within int32."""

Requests = Annotated[int, Field(ge=1, le=MOST_REQUESTS)]
Share = Annotated[float, Field(gt=0, le=1)]

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _bytes(value: object) -> object:
    if isinstance(value, str):
        found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?(KiB|MiB|GiB|TiB)", value)
        if not found:
            raise ValueError(
                "bytes as an integer, or a number with KiB, MiB, GiB or TiB such as '64GiB'"
            )
        return int(float(found[1]) * _UNITS[found[2]])
    return value


Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=1, le=2**60)]


class Memory(Frozen):
    """What backs the bytes, and how many there may be; without a budget the workload decides.

    By group: ``ratios`` are tables' shares of the budget, ``tokens`` stand in place of one.
    ``checkpoints`` are slots for int8 copies of recurrent states, which a prefix cache fills.
    """

    name: Name = "auto"
    budget: Bytes | None = None
    ratios: dict[Name, Share] = Field(default_factory=dict)
    tokens: dict[Name, Positive] = Field(default_factory=dict)
    checkpoints: Annotated[int, Field(ge=1, le=2**20)] | None = None


class Device(Frozen):
    """The target of the plan. ``auto`` must be resolved before planning."""

    name: Name = "cpu"
    type: Literal["auto", "cpu", "cuda"] = "cpu"
    sm: NonNegative = 0
    num_sms: NonNegative = 0
    memory_bytes: Bytes | None = None
    granule_bytes: Bytes = 2**21

    @model_validator(mode="after")
    def _known_card(self) -> Device:
        if self.type == "cuda" and not (self.sm and self.num_sms):
            raise ValueError("sm and num_sms of a device of type cuda, as device=h200 has them")
        return self


class BackendChoice(Frozen):
    """Which kernels attend; ``auto`` picks per group."""

    name: Name = "auto"
    options: dict[str, Any] = Field(default_factory=dict)
    new_tokens: Literal["stored", "exact"] = "stored"
    prefill: Literal["auto", "paged", "ragged"] = "auto"
    accuracy: Literal["exact", "fast"] = "exact"
    deterministic: bool = False


class Engine(Frozen):
    """What the caller's loop does.

    ``max_requests`` is the number of rows of the device tables (null: as many as the plan
    admits), ``prefill_chunk_tokens`` the most prompt tokens in a step, ``steps_in_flight`` the
    steps open at once, ``draft_tokens`` the extra tokens a request may verify in a step, in a
    chain or, with ``draft_tree``, a tree.

    Recurrent states: ``state_tracking`` are further slots of each request, for states that a
    prefix cache wants (lazy: the second one when it is needed). ``state_replay`` keeps what drives
    the last tokens in a ring of ``replay_tokens``: of decodes, so that the state is written once
    a ring; or of drafts, in place of a snapshot per token, folded at every commit or when full.
    """

    max_requests: Requests | None = None
    prefill_chunk_tokens: Annotated[int, Field(ge=1, le=2**24)] = 2048
    steps_in_flight: Annotated[int, Field(ge=1, le=8)] = 2
    draft_tokens: Annotated[int, Field(ge=0, le=1024)] = 0
    draft_tree: bool = False
    state_tracking: Literal["none", "one", "two", "lazy"] = "none"
    state_replay: Literal["none", "decode_ring", "verify_fold", "verify_ring"] = "none"
    replay_tokens: Annotated[int, Field(ge=1, le=1024)] = 16

    @property
    def tracking_slots(self) -> int:
        """Most tracking slots of a request."""
        return {"none": 0, "one": 1}.get(self.state_tracking, 2)

    @property
    def state_slots(self) -> int:
        """State slots that sizing gives a request: its own and tracking ones, of lazy ones one."""
        return 2 if self.state_tracking == "lazy" else 1 + self.tracking_slots


class Workload(Frozen):
    """``requests`` of ``tokens`` each, on average of ``mean_tokens`` if given; ``trace`` a file."""

    requests: Requests = 8
    tokens: Annotated[int, Field(ge=1, le=2**26)] = 128
    mean_tokens: Annotated[int, Field(ge=1, le=2**26)] | None = None
    trace: str | None = None
    step_ms: Annotated[float, Field(gt=0, le=1e6)] = 30.0


class Spec(Frozen):
    """A whole configuration."""

    model: Model
    kv: KV = KV()
    memory: Memory = Memory()
    device: Device = Device()
    backend: BackendChoice = BackendChoice()
    engine: Engine = Engine()
    workload: Workload = Workload()

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Spec:
        """Validate a plain dict (from YAML, JSON or code).

        Raises:
            SpecError: every malformed, missing or unknown key, each with its path and mend; or
                values that are no plain data.
        """
        try:
            return cls.model_validate_json(json.dumps(plain(data)))
        except ValidationError as error:
            problems = from_validation(error, cls)
        raise SpecError(*(_with_preset(problem, data) for problem in problems))


_PRESETS = ("model", "kv", "memory", "device", "backend", "workload")


def _with_preset(problem: Problem, data: Mapping[str, Any]) -> Problem:
    """``problem``; the name of a section's preset in its place is mended by who looks it up."""
    name = data.get(problem.path) if problem.path in _PRESETS else None
    if not isinstance(name, str):
        return problem
    return replace(problem, fix=f'kvfactory.compose("{problem.path}={name}")')
