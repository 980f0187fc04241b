"""Bad plans from the command line: geometry, storage, sizing, replays. One line each, exit 2.

What composition alone refuses is in ``tests/config``; traces are in ``tests/replay``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_input import Bad

from kvfactory.cli import main

INDEX = "model=deepseek_v32"
GEMMA = "model=gemma3_27b"
CASES = [
    # layers
    Bad(f"{GEMMA} model.groups.local.layers=0-61", "model.groups.local.layers", "layer 5, which",
        "layers that no other such group has"),
    Bad("model.num_layers=10", "model.groups.full.layers", "layer 35", "a model of 10 layers"),
    Bad("model.groups.full.layers=[0,99]", "model.groups.full.layers", "layer 99", "36 layers"),
    Bad("model.groups.full.layers=[]", "model.groups.full.layers", "no layer", "at least one"),
    Bad("model.groups.full.layers=0-", "model.groups.full.layers", "'0-'", "both ends included"),
    Bad("model.aliases=[[40,1]]", "model.aliases", "[40, 1]", "layers below model.num_layers=36"),
    Bad("model.aliases=[[3,1]]", "model.aliases", "[3, 1]", "a layer without a cache of its own"),
    Bad("model.groups.full.layers=0-9 model.aliases=[[20,15]]", "model.aliases", "[20, 15]",
        "layer 15 is in no group"),
    Bad("model.groups.full.layers=0-9 model.aliases=[[20,1],[20,2]]", "model.aliases", "[20, 2]",
        "one owner a layer"),
    Bad("model.draft={num_layers:2,reads:[[0,35],[0,34]]}", "model.aliases", "[36, 34]",
        "one owner a layer"),
    Bad("model.groups.full.layers=0-9 model.aliases=[[20,21]]", "model.aliases", "[20, 21]",
        "an owner before the layer"),
    # geometry
    Bad(f"{GEMMA} model.groups.local.window_tokens=0", "model.groups.local.window_tokens", "0",
        "greater than or equal to 1"),
    Bad(f"{GEMMA} model.groups.local.window_tokens=-5", "model.groups.local.window_tokens", "-5",
        "greater than or equal to 1"),
    Bad(f"{GEMMA} model.groups.local.window_tokens=null", "model.groups.local", "",
        "window_tokens for kind swa"),
    Bad("model.groups.full.head_dim=0", "model.groups.full.head_dim", "0", "greater than"),
    Bad("model.groups.full.head_dim=1e3", "model.groups.full.head_dim", "1000.0", "integer"),
    Bad("model.groups.full.kv_heads=5", "model.groups.full.q_heads", "32", "of kv_heads=5"),
    Bad("model.groups.full.scale=-1", "model.groups.full.scale", "-1", "greater than 0"),
    Bad("model.num_layers=0", "model.num_layers", "0", "greater than or equal to 1"),
    Bad("model.num_layers=99999999", "model.num_layers", "99999999", "less than or equal"),
    Bad("model.groups.full.tokens_per_entry=3", "kv.page_tokens", "16",
        "a multiple of tokens_per_entry=3", "kv.groups.full.page_tokens=48"),
    Bad("model.groups.full.kind=[full]", "model.groups.full.kind", '["full"]', "'full'"),
    # a sparse index
    Bad(f"{INDEX} model.groups.index.selects=latnt", "model.groups.index.selects", "'latnt'",
        "one of latent", "model.groups.index.selects=latent"),
    Bad(f"{INDEX} model.groups.index.topk=0", "model.groups.index.topk", "0", "greater than"),
    Bad(f"{INDEX} kv.groups.index.page_tokens=32", "kv.groups.index.page_tokens", "32",
        "the page_tokens of group latent"),
    # storage
    Bad("kv.groups.locale.page_tokens=8", "kv.groups.locale", "the model lacks", "one of full"),
    Bad("kv.quant.k=nvfp4 model.groups.full.head_dim=100", "kv.quant.k", "100",
        "multiple of 16"),
    Bad("kv.quant.k=state_int8", "kv.quant.k", "for role k", "plain", "kv.quant.k=plain"),
    Bad("kv=mxfp8_fa4 kv.page_tokens=16", "kv.layout.tokens", "16", "multiple of 32"),
    Bad("kv.recipes.a.layers=[0] kv.recipes.b.layers=[0]", "kv.recipes.b.layers",
        "layer 0, which recipe a has too", "one recipe a layer"),
    Bad("kv.recipes.a.layers=9-3", "kv.recipes.a.layers", "'9-3'", "ascends"),
    # sizing
    Bad("memory.budget=-1GiB", "memory.budget", "'-1GiB'", "GiB"),
    Bad("memory.budget=0", "memory.budget", "0", "greater than or equal to 1"),
    Bad(f"{GEMMA} memory.budget=1GiB workload.tokens=100000", "memory.budget", "1073741824 B",
        "one request of workload.tokens=100000", "memory.budget="),
    Bad("memory.budget=8GiB memory.tokens.full=5000", "memory.tokens", "beside memory.budget",
        "not both", "memory.budget=null"),
    Bad("memory.ratios.full=0.5", "memory.ratios", "without a budget", "a budget to share",
        "memory.budget=64GiB"),
    Bad(f"{GEMMA} memory.budget=64GiB memory.ratios.full=0.8 memory.ratios.local=0.3",
        "memory.ratios", "add up to 1.1", "at most 1"),
    Bad("memory.budget=8GiB memory.ratios.full=1.5", "memory.ratios.full", "1.5", "less than or"),
    Bad("memory.budget=8GiB memory.ratios.full=0", "memory.ratios.full", "0", "greater than 0"),
    Bad("memory.budget=8GiB memory.ratios.full=half", "memory.ratios.full", "'half'", "number"),
    Bad(f"{GEMMA} memory.budget=64GiB memory.ratios.locl=0.3", "memory.ratios.locl",
        "the model lacks", "full, local", "memory.ratios.local=0.3"),
    Bad(f"{GEMMA} memory.budget=64GiB memory.ratios.local=0.0001", "memory.ratios.local",
        "0.0001, which is", "pages for one request"),
    Bad("memory.tokens.full=100 workload.tokens=1000", "memory.tokens.full", "100",
        "at least 1008: one request", "memory.tokens.full=1008"),
    Bad("memory.tokens.full=-3", "memory.tokens.full", "-3", "greater than or equal to 1"),
    Bad("model=falcon_h1 memory.tokens.state=5", "memory.tokens.state", "recurrent states", "full"),
    Bad("workload.mean_tokens=5000", "workload.mean_tokens", "5000", "at most workload.tokens="),
    Bad("workload.tokens=0", "workload.tokens", "0", "greater than or equal to 1"),
    Bad("workload.tokens=99999999999", "workload.tokens", "99999999999", "less than or equal"),
    Bad("engine.steps_in_flight=0", "engine.steps_in_flight", "0", "greater than or equal to 1"),
    Bad("engine.prefill_chunk_tokens=-1", "engine.prefill_chunk_tokens", "-1", "greater than"),
    # run, replay and explain
    Bad("action=run memory=meta", "memory.name", "'meta'", "memory with storage", "memory=auto"),
    Bad("action=run memory=null", "memory.name", "'null'", "memory with storage", "memory=auto"),
    Bad("action=replay", "workload.trace", "nothing", "a file of requests", "workload.trace="),
    Bad("action=replay workload.trace=/nowhere/trace.csv", "workload.trace", "no such file",
        "can be read"),
    Bad("action=replay workload.trace=17", "workload.trace", "17", "a valid string"),
    Bad("action=replay workload.step_ms=0", "workload.step_ms", "0", "greater than 0"),
    Bad("action=explain memory.budget=1KiB", "memory.budget", "1024 B", "one request"),
]  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(case, id=case.arguments) for case in CASES])
def test_bad_plan(
    case: Bad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    action = [] if "action=" in case.arguments else ["action=plan"]
    assert main([*action, "device=cpu", *case.arguments.split(" ")]) == 2
    caught = capsys.readouterr()
    assert not caught.out
    assert not list(tmp_path.iterdir())
    assert "Traceback" not in caught.err
    assert case.answered(caught.err), caught.err
