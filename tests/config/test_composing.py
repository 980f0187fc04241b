"""compose(): overrides, types, isolation from other users of Hydra."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvfactory.composer import compose
from kvfactory.errors import SpecError
from kvfactory.spec import LayoutFamilies, Plugin, Spec

CPU = "device=cpu"


def named(ref: Plugin | None) -> str:
    return ref.name if ref else ""


def test_groups_values_and_dicts() -> None:
    spec = compose("model=gpt_oss", "kv=fp8_hnd", "kv.page_tokens=64", "memory.budget=4GiB", CPU)
    assert (spec.model.name, spec.kv.page_tokens, spec.memory.budget) == ("gpt-oss-20b", 64, 2**32)
    assert named(spec.kv.quant.k) == "fp8_e4m3"


def test_a_scalar_for_all_roles_and_an_ordinary_override_for_one() -> None:
    every = compose("kv.quant=nvfp4", CPU).kv.quant
    assert (named(every.every), every.k) == ("nvfp4", None)
    one = compose("kv=fp8_hnd", "kv.quant.v=nvfp4", CPU).kv.quant
    assert (named(one.k), named(one.v)) == ("fp8_e4m3", "nvfp4")


def test_layouts_by_name_and_as_quoted_patterns() -> None:
    assert compose("kv.layout=hnd", CPU).kv.layout.tokens == LayoutFamilies(k="hnd")
    pattern = "page layer plane slot%32 slot/32 head dim"
    tokens = compose(f'kv.layout.tokens="{pattern}"', CPU).kv.layout.tokens
    assert tokens == LayoutFamilies(k=pattern)


def test_a_plugin_with_options_does_not_inherit_options() -> None:
    quant = compose("kv=fp8_hnd", "kv.quant.k={name: int8_token_head}", CPU).kv.quant
    assert quant.k == Plugin(name="int8_token_head")
    quant = compose("kv=fp8_hnd", "kv.quant.k={options: {scale: head}}", CPU).kv.quant
    assert quant.k == Plugin(name="fp8_e4m3", options={"scale": "head", "center": False})


def test_groups_and_recipes_that_no_preset_names() -> None:
    spec = compose(
        "model=gemma3_27b",
        "kv.groups.local.quant.k=plain",
        "kv.recipes.edge={layers: [0, -1], quant: {k: plain}}",
        CPU,
    )
    assert spec.kv.groups["local"].quant.k is not None
    assert spec.kv.recipes["edge"].layers == (0, -1)


def test_an_override_wins_over_an_experiment_and_a_preset() -> None:
    spec = compose("experiment=h200_chat", "kv=bf16_nhd", "engine.max_requests=7")
    assert spec.device.name == "h200"
    assert spec.engine.max_requests == 7
    assert named(spec.kv.quant.k) == "plain"


def test_memory_null_is_a_choice() -> None:
    assert compose("memory=null", CPU).memory.name == "null"


def test_device_auto_is_resolved_and_keeps_given_keys() -> None:
    device = compose("device.granule_bytes=4MiB").device
    assert device.type in ("cpu", "cuda")
    assert device.granule_bytes == 2**22
    assert device.memory_bytes


# ---- types ---------------------------------------------------------------------------------

REFUSED = ["16.0", "1e3", "true", "'16'", "on", "010", "1:30", "0x10", "None", "null", "[16]"]


@pytest.mark.parametrize("text", REFUSED)
def test_words_that_are_no_integers(text: str) -> None:
    with pytest.raises(SpecError, match=r"kv\.page_tokens"):
        compose(f"kv.page_tokens={text}", CPU)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("True", True), ("FALSE", False)]
)
def test_booleans(text: str, value: bool) -> None:
    assert compose(f"backend.deterministic={text}", CPU).backend.deterministic is value


@pytest.mark.parametrize("text", ["on", "off", "yes", "no", "0", "1", "'true'", "null"])
def test_words_that_are_no_booleans(text: str) -> None:
    with pytest.raises(SpecError, match=r"backend\.deterministic"):
        compose(f"backend.deterministic={text}", CPU)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("64GiB", 2**36), ("1.5GiB", 3 * 2**29), ("512", 512), ("2 MiB", 2**21), ("null", None)],
)
def test_sizes(text: str, num_bytes: int | None) -> None:
    assert compose(f"memory.budget={text}", CPU).memory.budget == num_bytes


@pytest.mark.parametrize("text", ["64GB", "64g", "64G", "64gib", "GiB", "-1GiB", "1e9", "0"])
def test_sizes_without_a_clear_unit(text: str) -> None:
    with pytest.raises(SpecError, match=r"memory\.budget"):
        compose(f"memory.budget={text}", CPU)


# ---- isolation -----------------------------------------------------------------------------


def test_threads_compose_at_once() -> None:
    def one(number: int) -> int:
        if number % 5 == 0:
            with pytest.raises(SpecError):
                compose("kv.page_tokens=x", CPU)
        return compose(f"kv.page_tokens={number + 1}", CPU).kv.page_tokens

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(16))) == list(range(1, 17))


def test_inside_another_application(tmp_path: Path) -> None:
    """Our composing leaves the Hydra of the caller as it was, also after an error."""
    (tmp_path / "theirs.yaml").write_text("x: 1\n", encoding="utf-8")
    script = f"""
import hydra, kvfactory
from concurrent.futures import ThreadPoolExecutor
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime
from kvfactory.errors import SpecError

@hydra.main(config_path={str(tmp_path)!r}, config_name="theirs", version_base="1.3")
def app(config):
    before = GlobalHydra.instance().hydra, JobRuntime.instance().get("name")
    with ThreadPoolExecutor(4) as pool:
        one = lambda n: kvfactory.compose(f"kv.page_tokens={{n}}", "device=cpu")
        specs = list(pool.map(one, range(1, 9)))
    assert [spec.kv.page_tokens for spec in specs] == list(range(1, 9))
    try:
        kvfactory.compose("kv=nope")
    except SpecError:
        pass
    assert before == (GlobalHydra.instance().hydra, JobRuntime.instance().get("name"))
    assert HydraConfig.get().job.name == before[1]
    assert config.x == 1
    print("done")
app()
"""
    (tmp_path / "app.py").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "app.py", "hydra.run.dir=."], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == "done", done.stderr


# ---- the public keys -----------------------------------------------------------------------

KEYS = {
    "model": "name num_layers dtype max_context groups aliases draft",
    "kv": "page_tokens align_bytes quant layout groups recipes constants",
    "memory": "name budget ratios tokens checkpoints",
    "device": "name type sm num_sms memory_bytes granule_bytes",
    "backend": "name options new_tokens prefill accuracy deterministic",
    "engine": "max_requests prefill_chunk_tokens steps_in_flight draft_tokens draft_tree"
    " state_tracking state_replay replay_tokens",
    "workload": "requests tokens mean_tokens trace step_ms",
}


def test_public_keys_are_frozen() -> None:
    """A new key is a decision: change this list with it."""
    schema: dict[str, Any] = Spec.model_fields
    assert {name: " ".join(field.annotation.model_fields) for name, field in schema.items()} == KEYS
