"""What a plan does not use is said, and what nothing could use is refused."""

from __future__ import annotations

from typing import Any

import pytest
from planner_support import spec_of

from kvfactory.errors import KVFactoryError, PlanError, SpecError
from kvfactory.planner import plan

FULL = {"kind": "full", "layers": "0-1", "q_heads": 4, "kv_heads": 2, "head_dim": 64}
STATE = {
    "kind": "linear",
    "layers": "2-3",
    "recurrence": "gdn",
    "recurrent": {"head": 2, "key": 4, "value": 4},
}
MODEL = {"name": "m", "num_layers": 4, "groups": {"full": FULL, "state": STATE}}


def _notes(kv: dict[str, Any], model: dict[str, Any] = MODEL, **parts: Any) -> list[str]:
    return list(plan(spec_of(model, kv=kv, **parts)).notes)


@pytest.mark.parametrize(
    ("kv", "note"),
    [
        ({"quant": {"latent": "nvfp4"}}, "kv.quant.latent is unused: the model has no latent"),
        (
            {"groups": {"state": {"quant": "nvfp4"}}},
            "kv.groups.state.quant=nvfp4 is unused: group state lacks what it fits",
        ),
        (
            {"groups": {"full": {"quant": {"state": "state_int8"}}}},
            "kv.groups.full.quant.state is unused: group full has no state",
        ),
        (
            {"groups": {"full": {"layout": {"state": "slot_major"}}}},
            "kv.groups.full.layout.state is unused: group full has no state",
        ),
        (
            {"recipes": {"edge": {"layers": [0], "quant": {"latent": "nvfp4"}}}},
            "kv.recipes.edge.quant.latent is unused: its layers have no latent",
        ),
        (
            {"recipes": {"edge": {"layers": [2], "quant": "nvfp4"}}},
            "kv.recipes.edge.quant=nvfp4 is unused: its layers lack what it fits",
        ),
        (
            {"recipes": {"edge": {"layers": [0]}}},
            "kv.recipes.edge is unused: it names no quant",
        ),
        ({"layout": {"index": "hnd"}}, "kv.layout.index is unused: the model has no index"),
    ],
)
def test_unused_settings_are_noted(kv: dict[str, Any], note: str) -> None:
    assert _notes(kv) == [note]


@pytest.mark.parametrize(
    "kv",
    [
        {"quant": "nvfp4"},
        {"layout": "hnd"},
        {"quant": {"k": "nvfp4", "state": "state_int8"}, "layout": {"state": "slot_major"}},
        {"groups": {"full": {"quant": "nvfp4"}}},
        {"recipes": {"edge": {"layers": [0], "quant": {"v": "nvfp4"}}}},
    ],
)
def test_what_is_used_is_not(kv: dict[str, Any]) -> None:
    assert _notes(kv) == []


def test_a_workload_beyond_the_model_is_warned_of() -> None:
    model = MODEL | {"max_context": 100}
    assert plan(spec_of(model, workload={"tokens": 100})).warnings == ()
    assert plan(spec_of(model, workload={"tokens": 101})).warnings == (
        "workload.tokens=101 is beyond model.max_context=100",
    )


def test_what_presets_say_of_other_models_is_not_noted() -> None:
    """A preset names K and V and latents in one breath; one for latents alone is a mistake here."""
    alike = {"k": "fp8_e4m3", "v": "fp8_e4m3", "latent": "fp8_e4m3", "rope": "plain"}
    assert _notes({"quant": alike}) == []
    assert _notes({"quant": alike | {"k": "plain", "v": "plain"}}) == [
        "kv.quant.latent is unused: the model has no latent"
    ]


@pytest.mark.parametrize(
    ("extra", "kv", "engine"),
    [
        ("full.edge", {"recipes": {"edge": {"layers": [0], "quant": "nvfp4"}}}, {}),
        ("state.snapshots", {}, {"draft_tokens": 2}),
    ],
)
def test_no_group_has_the_name_of_a_part_of_another(
    extra: str, kv: dict[str, Any], engine: dict[str, Any]
) -> None:
    groups = {"full": FULL, "state": STATE, extra: FULL | {"layers": "2-3"}}
    model = MODEL | {"groups": groups}
    assert len(plan(spec_of(model)).groups) == 3
    with pytest.raises(PlanError, match=f"2 groups called {extra}"):
        plan(spec_of(model, kv=kv, engine=engine))


@pytest.mark.parametrize("backend", ["auto", "torch", "flashinfer"])
def test_no_backend_ignores_an_option(backend: str) -> None:
    choice = {"name": backend, "options": {"dequantise": True}}
    with pytest.raises(SpecError, match=r"backend.options.dequantise: got an unknown key"):
        plan(spec_of(MODEL, backend=choice))


def test_an_option_of_one_backend_does_under_auto() -> None:
    plan(spec_of(MODEL, backend={"options": {"dequantize": True}}))
    with pytest.raises(KVFactoryError, match=r"backend.options.dequantize: got 7"):
        plan(spec_of(MODEL, backend={"options": {"dequantize": 7}}))


def test_a_cuda_device_is_known_by_its_architecture() -> None:
    with pytest.raises(SpecError, match=r"^device: got .*need sm and num_sms"):
        spec_of(MODEL, device={"name": "x", "type": "cuda"})
