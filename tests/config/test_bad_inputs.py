"""Bad input: what stderr must say, exit code 2, no traceback, nothing written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from bad_input import Bad

CASES = [
    # names of choices and keys
    Bad("kv=fp8_hdn", "kv", "'fp8_hdn'", "31 choices, such as fp8_nhd", "kv=fp8_hnd"),
    Bad("model=qwen33", "model", "'qwen33'", "qwen3_8b", "model=qwen3"),
    Bad("memory=pined", "memory", "'pined'", "pinned", "memory=pinned"),
    Bad("device=h201", "device", "'h201'", "h200", "device=h20"),
    Bad("backend=flashinfr", "backend", "'flashinfr'", "flashinfer", "backend=flashinfer"),
    Bad("workload=chatt", "workload", "'chatt'", "chat", "workload=chat"),
    Bad("experiment=gird", "experiment", "'gird'", "grid", "experiment=grid"),
    Bad("kv=null", "kv", "'null'", "bf16_nhd"),
    Bad("kv={page_tokens: 3}", "kv", "{page_tokens: 3}", "the name of a choice"),
    Bad("kv=", "kv", "nothing", "the name of a choice"),
    Bad("+experiment=grid", "experiment", "+experiment=grid", "without +", "experiment=grid"),
    Bad("modle=qwen3", "modle", "an unknown key", "model", "model=qwen3"),
    Bad("pages=3", "pages", "an unknown key", "workload"),
    Bad("qwen3", "qwen3", "no value", "key=value", "model=qwen3"),
    Bad("plan", "plan", "no value", "key=value", "action=plan"),
    Bad("model=x/c.json", "model", "x/c.json", "hf reads", "model=hf model.path=x/c.json"),
    Bad("model=~/x", "model", "'~/x'", "hf reads files", "model=hf 'model.path=\"~/x\"'"),
    Bad("model=hf model.path=~/x", "model.path", "~/x", "in quotes", "'model.path=\"~/x\"'"),
    Bad("model.foo", "model.foo", "no value", "key=value"),
    Bad("action=paln", "action", "'paln'", "run, plan", "action=plan"),
    Bad("output=jsn", "output", "'jsn'", "table, json", "output=json"),
    # unknown keys inside a section
    Bad("kv.page_token=8", "kv.page_token", "an unknown key", "page_tokens", "kv.page_tokens=8"),
    Bad("kv.quant.key=plain", "kv.quant.key", "an unknown key", "latent"),
    Bad("kv.quant.latnt=plain", "kv.quant.latnt", "an unknown key", "v", "kv.quant.latent=plain"),
    Bad(
        "kv.layout.token=hnd",
        "kv.layout.token", "an unknown key", "index", "kv.layout.tokens=hnd",
    ),
    Bad("kv.groups.full.qant.k=plain", "kv.groups.full.qant", "an unknown key", "page_tokens"),
    Bad(
        "model.groups.full.kv_head=4",
        "model.groups.full.kv_head", "an unknown key", "scale", "kv_heads=4",
    ),
    Bad("memory.bugdet=1GiB", "memory.bugdet", "an unknown key", "ratios", "memory.budget=1GiB"),
    Bad("engine.max_request=4", "engine.max_request", "an unknown key", "draft_tokens", "=4"),
    Bad("device.sms=4", "device.sms", "an unknown key", "num_sms"),
    Bad("workload.token=4", "workload.token", "an unknown key", "requests", "workload.tokens=4"),
    Bad("backend.accurcy=fast", "backend.accurcy", "an unknown key", "prefill", "=fast"),
    # types, units, words
    Bad("kv.page_tokens=abc", "kv.page_tokens", "'abc'", "a valid integer"),
    Bad("kv.page_tokens=16.0", "kv.page_tokens", "16.0", "a valid integer"),
    Bad("kv.page_tokens=1e9", "kv.page_tokens", "1000000000.0", "a valid integer"),
    Bad("kv.page_tokens=true", "kv.page_tokens", "true", "a valid integer"),
    Bad("kv.page_tokens=010", "kv.page_tokens", "'010'", "a valid integer"),
    Bad("kv.page_tokens='16'", "kv.page_tokens", "'16'", "a valid integer"),
    Bad("kv.page_tokens=0", "kv.page_tokens", "0", "greater than or equal to 1"),
    Bad("kv.page_tokens=-16", "kv.page_tokens", "-16", "greater than or equal to 1"),
    Bad("kv.page_tokens=null", "kv.page_tokens", "null", "a valid integer"),
    Bad("kv.page_tokens=[16]", "kv.page_tokens", "[16]", "a valid integer"),
    Bad("kv.page_tokens=", "kv.page_tokens", "''", "a valid integer"),
    Bad(
        "kv.page_tokens=16,32",
        "kv.page_tokens", "16,32", "-m to sweep", "-m kv.page_tokens=16,32",
    ),
    Bad("kv.align_bytes=24", "kv.align_bytes", "24", "a power of two"),
    Bad("memory.budget=64GB", "memory.budget", "'64GB'", "GiB", "memory.budget=64GiB"),
    Bad("memory.budget=1.5g", "memory.budget", "'1.5g'", "GiB", "memory.budget=1.5GiB"),
    Bad("workload.tokens=32k", "workload.tokens", "'32k'", "integer", "workload.tokens=32768"),
    Bad("memory.budget=lots", "memory.budget", "'lots'", "GiB"),
    Bad("backend.deterministic=on", "backend.deterministic", "'on'", "a valid boolean"),
    Bad("backend.accuracy=best", "backend.accuracy", "'best'", "'exact' or 'fast'"),
    Bad("model.dtype=fp8", "model.dtype", "'fp8'", "'bfloat16'"),
    Bad("workload.step_ms=nan", "workload.step_ms", "NaN", "a finite number"),
    Bad("workload.requests=99999999999", "workload.requests", "99999999999", "less than or equal"),
    # shapes of a model
    Bad("model.groups.full.kind=sliding", "model.groups.full.kind", "'sliding'", "'swa'"),
    Bad("model.groups.full.kind=swa", "model.groups.full", "", "window_tokens for kind swa"),
    Bad("model.groups.full.window_tokens=8", "model.groups.full", "", "belongs to kind swa"),
    Bad("model.groups.full.layers=0-99", "model.groups.full.layers", "layer 99", "36 layers"),
    Bad("model.groups.full.layers=5-1", "model.groups.full.layers", "'5-1'", "ascends", "=1-5"),
    Bad("model.groups.full.layers=[1,1]", "model.groups.full.layers", "layer 1 twice", "once"),
    Bad("model.groups=null", "model.groups", "null", "an object"),
    Bad(
        "model.groups.full.q_heads=30",
        "model.groups.full.q_heads", "30", "a multiple of kv_heads=8",
    ),
    # what only a whole configuration shows
    Bad("kv.quant=plain kv.quant.k=nvfp4", "kv.quant.k", "together", "not both", "leaving out"),
    Bad("kv.quant.k=nvfp5", "kv.quant.k", "'nvfp5'", "nvfp4", "kv.quant.k=nvfp4"),
    Bad("kv.quant=fp8", "kv.quant", "'fp8'", "fp8_e4m3", "kv.quant=fp8_e4m3"),
    Bad("kv.layout=hndd", "kv.layout.tokens", "'hndd'", "nhd", "hnd"),
    Bad(
        "kv.quant.k={name: fp8_e4m3, options: {scal: head}}",
        "kv.quant.k.options.scal", "an unknown key", "scale",
    ),
    Bad("kv.groups.local.quant.k=plain", "kv.groups.local", "the model lacks", "full"),
    Bad("kv.recipes.edge.layers=[0,99]", "kv.recipes.edge.layers", "layer 99", "36 layers"),
    Bad("memory=pinned device=cpu", "memory.name", "'pinned'", "type cpu", "memory=auto"),
    Bad("memory.budget=1MiB", "memory.budget", "1048576 B", "one request", "memory.budget="),
    Bad(
        "engine.max_requests=1",
        "engine.max_requests", "1", "workload.requests=8", "engine.max_requests=8",
    ),
    Bad("model=hf", "model.path", "nothing", "mandatory", "model.path=..."),
    Bad("model.name=${nowhere}", "model.name", "'nowhere' not found", "a value that resolves"),
    Bad("model.name=${model.name}", "model.name", "Recursive interpolation", "that resolves"),
    # Hydra's grammar
    Bad("kv.page_tokens=[1", "kv.page_tokens", "[1", "in Hydra's grammar"),
    Bad("kv.layout.tokens=page,layer", "kv.layout.tokens", "page,layer", "-m to sweep"),
    Bad("kv@other=fp8_hnd", "kv@other", "Hydra refuses", "in Hydra's grammar"),
    Bad("hydra/launcher=nope", "hydra/launcher/nope", "no such file", "basic"),
    Bad("hydra.searchpath=[/nowhere]", "hydra.searchpath", "/nowhere", "a folder of YAML files"),
    Bad("--config-dir /nowhere", "hydra.searchpath", "/nowhere", "a folder of YAML files"),
    Bad("--config-name other", "--config-name", "another primary", "shipped", "--config-dir"),
    Bad("--cfg job kv.page_tokens=[1", "kv.page_tokens", "[1", "grammar"),
    # code in a config
    Bad("kv._target_=os.system", "kv._target_", "an underscore", "runs no code"),
    Bad("kv.quant.k={_target_: os.system}", "kv.quant.k._target_", "an underscore", "runs no code"),
    Bad("hydra.launcher._target_=os.system", "hydra.launcher._target_", "an underscore", "no code"),
    # a sweep that cannot start
    Bad("-m kv=fp8_hnd,fp8_hdn", "kv", "'fp8_hdn'", "31 choices", "kv=fp8_hnd"),
    Bad("-m kv.page_tokens=[1", "kv.page_tokens", "[1", "grammar"),
]  # fmt: skip


def _split(arguments: str) -> list[str]:
    """Arguments apart at blanks that are not inside braces."""
    if "{" in arguments:
        return [arguments]
    return arguments.split(" ")


def _ids(case: Bad) -> ParameterSet:
    return pytest.param(case, id=case.arguments)


@pytest.mark.parametrize("case", [_ids(case) for case in CASES])
def test_bad_input(case: Bad, cli: Callable[..., Any]) -> None:
    arguments = _split(case.arguments)
    if not case.arguments.startswith(("action=", "--config-name", "-m", "--cfg")):
        arguments = ["action=plan", *arguments]
    if "device" not in case.arguments:
        arguments.append("device=cpu")
    done = cli(*arguments)
    assert done.code == 2, done
    assert "Traceback" not in done.err
    assert not done.out
    assert done.files == ()
    assert case.answered(done.err), done.err


def test_all_problems_of_a_stage_at_once(cli: Callable[..., Any]) -> None:
    done = cli("action=plan", "kv=x", "modle=y", "kv.quant=a", "kv.quant.k=b", "device.sms=1")
    assert len(done.err.splitlines()) == 3
    done = cli("action=plan", "device.sms=1", "kv.page_token=1", "engine.max_requests=x")
    assert len(done.err.splitlines()) == 3
