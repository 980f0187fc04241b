"""Which kernels are chosen and why, what is refused, and what the plan reserves."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from flashinfer_scene import FP8, GROUP, H200, LATENT, WINDOW, make_spec, plan_of

from kvfactory.backends.flashinfer import FlashInferBackend
from kvfactory.backends.flashinfer.choose import Kernels
from kvfactory.backends.flashinfer.library import installed
from kvfactory.errors import BuildError, CapabilityError, SpecError

BACKEND = FlashInferBackend()


def kernels_of(group: dict[str, Any], **options: Any) -> Kernels:
    plan = plan_of({"main": group}, **options)
    return BACKEND.served(plan.groups, plan.spec)[0].kernels


@pytest.mark.parametrize(
    ("group", "options", "decode", "prefill"),
    [
        (GROUP, {}, "fa2", "fa3"),
        ({**GROUP, "q_heads": 2}, {}, "cuda_cores", "fa3"),
        ({**GROUP, "q_heads": 6}, {}, "cuda_cores", "fa3"),
        ({**GROUP, "q_heads": 2}, {"kv": {"quant": FP8}}, "fa2", "fa2"),
        (GROUP, {"device": {"sm": 80}}, "fa2", "fa2"),
        (GROUP, {"device": {"sm": 100}}, "fa2", "fa2"),
        (GROUP, {"kv": {"quant": FP8}}, "fa2", "fa2"),
        (GROUP, {"backend": {"deterministic": True}}, "fa2", "fa2"),
        ({**GROUP, "q_heads": 2}, {"backend": {"deterministic": True}}, "fa2", "fa2"),
        (GROUP, {"backend": {"accuracy": "fast"}}, "fa2", "fa3"),
        (LATENT, {}, "mla_fa3", "mla_fa3"),
        (LATENT, {"device": {"sm": 80}}, "mla_fa2", "mla_fa2"),
    ],
)
def test_the_rule(group: Any, options: Any, decode: str, prefill: str) -> None:
    found = kernels_of(group, **options)
    assert (found.decode.name, found.prefill.name) == (decode, prefill)
    assert found.decode.why
    assert found.prefill.why


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, ""),
        ({"kv": {"page_tokens": 8}}, "pages of 8"),
        ({"kv": {"quant": {"k": "fp8_e5m2", "v": "fp8_e5m2"}}}, "float8_e5m2"),
        ({"device": {"sm": 89}}, "sm89"),
        ({"group": {"soft_cap": 5.0}}, "soft cap"),
        ({"group": {"sinks": True}}, "sinks"),
        ({"group": {"q_heads": 6}}, "3 query heads"),
    ],
)
def test_xqa_says_what_it_misses(change: dict[str, Any], word: str) -> None:
    group = {**GROUP, **change.pop("group", {})}
    kv = {"quant": FP8, "page_tokens": 16, **change.pop("kv", {})}
    found = kernels_of(group, kv=kv, backend={"accuracy": "fast"}, **change)
    assert (found.decode.name == "xqa") == (not word)
    assert word in found.decode.why


def test_auto_takes_it_where_fast_is_accepted() -> None:
    backend = {"name": "auto", "accuracy": "fast"}
    plan = plan_of({"main": GROUP}, kv={"quant": FP8, "page_tokens": 16}, backend=backend)
    (group,) = plan.groups
    assert group.choice is not None
    assert group.choice.backend == "flashinfer"
    assert BACKEND.kernels(group, plan.spec)["decode"].startswith("xqa")


def test_explanations_name_use_kernel_and_reason() -> None:
    plan = plan_of({"main": GROUP}, kv={"quant": FP8}, backend={"new_tokens": "exact"})
    said = BACKEND.kernels(plan.groups[0], plan.spec)
    assert set(said) == {"decode", "new tokens", "paged prefix"}
    assert said["new tokens"].startswith("fa3: Hopper")


@pytest.mark.parametrize(
    ("groups", "options", "words"),
    [
        ({"main": {**GROUP, "head_dim": 80}}, {}, "k of 80 elements a head"),
        ({"main": {**GROUP, "v_head_dim": 128}}, {}, "unequal_head_dims"),
        ({"main": {**GROUP, "kind": "chunked", "chunk_tokens": 32}}, {}, "chunk"),
        ({"main": {**GROUP, "tokens_per_entry": 4}}, {}, "entries"),
        ({"main": {**LATENT, "kv_lora_rank": 256}}, {}, "latent and rope of"),
        ({"main": {**LATENT, "soft_cap": 3.0}}, {}, "mla_soft_cap"),
        ({"main": GROUP}, {"kv": {"quant": {"k": "nvfp4", "v": "nvfp4"}}}, "k in nvfp4"),
        ({"main": GROUP}, {"kv": {"quant": {"k": "fp8_e4m3", "v": "plain"}}}, "unequal types"),
        ({"main": GROUP}, {"kv": {"layout": "vectorized", "page_tokens": 16}}, "dim innermost"),
        (
            {"main": GROUP},
            {"kv": {"quant": {**FP8, "k": {"name": "fp8_e4m3", "options": {"scale": "head"}}}}},
            "scale_per_head",
        ),
        ({"main": GROUP}, {"device": {"sm": 75}}, "compute capability 75"),
        ({"main": GROUP}, {"device": {"type": "cpu", "sm": 0, "name": "cpu"}}, "type cuda"),
        (
            {"main": GROUP},
            {"kv": {"quant": FP8}, "backend": {"prefill": "ragged"}},
            "ragged_of_stored",
        ),
        (
            {"main": GROUP},
            {"backend": {"prefill": "ragged", "deterministic": True}},
            "deterministic_ragged",
        ),
        (
            {"main": GROUP, "index": {"kind": "sparse_index", "layers": "0-1", "selects": "main",
             "index_heads": 2, "head_dim": 64, "topk": 8}},
            {},
            "selected",
        ),
    ],
)  # fmt: skip
def test_what_is_refused_and_in_which_words(groups: Any, options: Any, words: str) -> None:
    with pytest.raises(CapabilityError) as caught:
        plan_of(groups, **options)
    assert words in str(caught.value)


def test_a_copy_lifts_what_concerns_storage() -> None:
    quant = {"k": "nvfp4", "v": "int8_token_head"}
    plan = plan_of(
        {"main": GROUP, "read": {**GROUP, "layers": "2-3"}},
        kv={"quant": quant, "groups": {"read": {"quant": FP8}}},
        backend={"options": {"dequantize": True}},
    )
    served = BACKEND.served(plan.groups, plan.spec)
    assert [one.direct for one in served] == [False, True]
    assert [one.shape.kv_dtype for one in served] == ["bfloat16", "float8_e4m3fn"]
    (row,) = [row for row in plan.rows if row.what == "workspace dequantized"]
    pages = plan.groups[0].planes[0].place.shape[1]
    assert row.num_bytes == pages * 8 * 2 * 64 * 2 * 2


def test_an_unknown_option_is_a_bad_spec() -> None:
    with pytest.raises(SpecError, match="dequantize"):
        plan_of({"main": GROUP}, backend={"options": {"dequantise": True}})


def test_a_missing_library_is_a_build_error_with_the_extra_that_brings_it() -> None:
    with pytest.raises(BuildError, match=r"kvfactory\[cuda\]"):
        installed()


def test_planning_and_binding_to_a_double_import_no_flashinfer() -> None:
    script = (
        "import sys; sys.path.insert(0, 'tests/flashinfer')\n"
        "from flashinfer_scene import GROUP, Scene, plan_of\n"
        "Scene(plan_of({'main': GROUP})).turns([(3, 4), (1, 1)])\n"
        "assert 'flashinfer' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_gpu_backend_on_a_cpu_says_what_is_missing_and_ends_in_2() -> None:
    command = [sys.executable, "-m", "kvfactory", "model=gemma3_27b", "kv=fp8_page_major"]
    done = subprocess.run(
        [*command, "backend=flashinfer", "device=cpu"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "type cuda" in done.stderr
    assert "backend=torch" in done.stderr


# ---- bytes -----------------------------------------------------------------------------------


def test_every_byte_kept_is_a_row_of_the_plan() -> None:
    groups = {"main": GROUP, "local": {**WINDOW, "layers": "2-3"}}
    kv = {"quant": FP8, "page_tokens": 16}
    plan = plan_of(groups, kv=kv, backend={"accuracy": "fast"})
    uses = {row.what for row in plan.rows if row.owner == "flashinfer"}
    assert uses == {"workspace partial results", "workspace host plans", "workspace xqa"}
    assert plan.bytes == sum(row.num_bytes for row in plan.rows)
    assert make_spec({"main": GROUP}).device.num_sms == H200["num_sms"]
