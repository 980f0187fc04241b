"""Every shipped YAML file: it composes, it plans, it says what the table of models says."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from kvfactory.backends import BACKENDS
from kvfactory.composer import compose
from kvfactory.config.confdirs import ConfDir, conf_dir, unsafe_yaml
from kvfactory.memory import MEMORIES
from kvfactory.planner import plan
from kvfactory.spec import AttentionGroup, IndexGroup, LinearGroup, MlaGroup, Plugin, Spec
from kvfactory.spec.layers import parse_layers

CONF = ConfDir(conf_dir(), "built-in")
TABLE = json.loads((Path(__file__).parents[1] / "data" / "models.json").read_text())["models"]
OTHERS = [
    f"{group}={option}"
    for group in CONF.groups()
    for option in CONF.options(group)
    if group != "model" and option != "auto"
]
SHORT_NAMES = {"qwen3", "gemma4", "gpt_oss", "llama3", "falcon_h1", "nemotron_h", "jamba"}
MODELS = [name for name in CONF.options("model") if name not in {"hf", *SHORT_NAMES}]

LONG_NAMES = {  # names of the table that say more than the model's
    "Ring-Hybrid": "Bailing/Ring hybrid",
    "GLM-5.3-Flash": "GLM-5-Next / GLM-5.3-Flash",
    "MiniMax-M1": "MiniMax-Text-01 / M1",
    "MiniMax-M2.5": "MiniMax-M2.5/M2.7",
    "Step-3.7-Flash": "Step-3.5/3.7-Flash",
    "Jamba-1.5-Mini": "Jamba-1.5-Mini (= v0.1 shapes)",
    "Inkling": "Inkling (text, class defaults)",
}


@functools.cache
def model_spec(name: str) -> Spec:
    return compose(f"model={name}", "device=cpu")


def row_of(spec: Spec) -> dict[str, Any]:
    wanted = LONG_NAMES.get(spec.model.name, spec.model.name)
    return next(row for row in TABLE if wanted in (row["name"], row["name"].partition(" (")[0]))


@pytest.mark.parametrize("override", OTHERS)
def test_every_choice_plans(override: str) -> None:
    group, _, option = override.partition("=")
    known = {"memory": MEMORIES, "backend": BACKENDS}.get(group)
    if known and option not in known.names():
        pytest.skip("its plugin is not there yet")
    extra = ("device=h200",) if override in {"memory=cuda", "memory=pinned"} else ("device=cpu",)
    if override.startswith(("device=", "experiment=")):
        extra = ()
    if override.startswith("backend="):
        extra = ("device=h200",)
    spec = compose(override, *extra)
    assert plan(spec).bytes > 0
    if group == "kv":  # an override of these roles is then an ordinary one
        assert None not in (spec.kv.quant.k, spec.kv.quant.v, spec.kv.quant.latent)
        assert spec.kv.quant.rope == Plugin(name="plain")


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_the_table(name: str) -> None:
    spec = model_spec(name)
    row, model = row_of(spec), spec.model
    assert (model.num_layers, model.max_context) == (row["num_layers"], row["max_context"])
    ours = sorted(_described(spec, name) for name in model.groups)
    theirs = sorted([*map(_kv_described, row["kv_groups"]), *map(_state, row["state_groups"])])
    assert [entry[:-1] for entry in ours] == [entry[:-1] for entry in theirs]
    heads = row["q_heads"]
    for entry in ours:
        if isinstance(heads, int) and entry[-1]:
            assert entry[-1] == heads


def _described(spec: Spec, name: str) -> tuple[Any, ...]:
    """(layers, family, shape..., query heads) of one of our groups."""
    group = spec.model.groups[name]
    layers = parse_layers(group.layers, spec.model.num_layers)
    if isinstance(group, LinearGroup):
        recurrent = tuple((group.recurrent or {}).values())
        return (layers, "state", tuple(map(tuple, group.conv)), recurrent, 0)
    if isinstance(group, IndexGroup):
        return (layers, "index", (group.head_dim,), (group.tokens_per_entry,), 0)
    assert isinstance(group, AttentionGroup)
    reach = group.window_tokens or group.chunk_tokens or group.encoder_tokens or 0
    reach -= spec.model.name == "MiMo-V2-Flash" and group.kind == "swa"  # the hub's 128, +1
    kind = f"{group.kind} {reach}"
    if isinstance(group, MlaGroup):
        return (layers, kind, (group.kv_lora_rank, group.qk_rope_head_dim), (), group.q_heads)
    v_head_dim = group.head_dim if group.v_head_dim is None else group.v_head_dim
    logits = (group.soft_cap or 0.0, group.sinks)
    return (layers, kind, (group.kv_heads, group.head_dim, v_head_dim), logits, group.q_heads)


def _kv_described(entry: dict[str, Any]) -> tuple[Any, ...]:
    layers = tuple(entry["layers"])
    if entry["kind"] == "index_k":
        return (layers, "index", (entry["index_head_dim"],), (entry["compress_ratio"],), 0)
    if entry["kind"].startswith("mla"):
        return (layers, "full 0", (entry["kv_lora_rank"], entry["qk_rope_head_dim"]), (), 0)
    kind = entry["kind"] if entry["kind"] in ("swa", "chunked", "cross") else "full"
    reach = entry.get("window") or entry.get("cross_len") or 0
    shape = (entry["kv_heads"], entry["k_head_dim"], entry["v_head_dim"])
    logits = (entry.get("softcap", 0.0), entry.get("sinks", False))
    return (layers, f"{kind} {reach}", shape, logits, 0)


def _state(entry: dict[str, Any]) -> tuple[Any, ...]:
    conv = entry["conv_state_shape_engine"]
    windows = (tuple(conv),) * entry["n_conv_states"] if conv else ()
    return (
        tuple(entry["layers"]),
        "state",
        windows,
        tuple(entry["recurrent_state_shape"] or ()),
        0,
    )


def test_every_expressible_model_ships() -> None:
    shipped = {row_of(model_spec(name))["name"] for name in MODELS}
    missing = {row["name"] for row in TABLE} - shipped
    assert missing == {
        "DeepSeek-V4-Flash",  # compressed entries with an overlap, kept beside a window
        "DeepSeek-V4-Pro",
    }


@pytest.mark.parametrize("name", sorted(SHORT_NAMES))
def test_short_names(name: str) -> None:
    assert compose(f"model={name}", "device=cpu").model.groups


def test_no_orphans_and_no_misread_words() -> None:
    known = {"config.yaml", *(f"{g}/{o}.yaml" for g in CONF.groups() for o in CONF.options(g))}
    assert {str(path.relative_to(CONF.path)) for path in CONF.path.rglob("*.*")} == known
    assert [path for path in CONF.path.rglob("*.yaml") if unsafe_yaml(path)] == []
