"""``kv.constants``: calibrated files and checkpoint scales reach every write and every read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvfactory
from kvfactory.calibration import Key
from kvfactory.quant import resolve_codec
from kvfactory.spec import Spec


def _spec(constants: Path | None, quant: dict[str, Any], layers: str = "0-2") -> Spec:
    group = {"kind": "full", "layers": layers, "q_heads": 4, "kv_heads": 2, "head_dim": 64}
    kv = {"quant": quant, "page_tokens": 4, "constants": str(constants) if constants else None}
    model = {"name": "tiny", "num_layers": 3, "groups": {"full": group}}
    return Spec.parse({"model": model, "kv": kv, "workload": {"requests": 1, "tokens": 32}})


def _round_trip(spec: Spec, x: torch.Tensor) -> torch.Tensor:
    cache = kvfactory.build(kvfactory.plan(spec))
    pool, index = cache.pool(1)
    slots = torch.arange(4, 4 + len(x))
    pool.write(index, slots, k=x, v=x)
    return pool.read(index, slots)["k"]


def test_calibrated_centers_and_scales_are_used(tmp_path: Path) -> None:
    quant = {name: {"name": "nvfp4", "options": {"center": True}} for name in ("k", "v")}
    offset = torch.zeros(2, 64)
    offset[:, ::8] = 16.0
    x = torch.randn(24, 2, 64) + offset
    codecs = {name: resolve_codec("nvfp4", {"center": True}, "test") for name in ("k", "v")}
    observed = {layer: {"k": x, "v": x} for layer in range(3)}
    path = tmp_path / "constants.safetensors"
    kvfactory.calibrate(observed, codecs).save(path)
    plain = (_round_trip(_spec(None, quant), x) - x).norm() / (x - offset).norm()
    fitted = (_round_trip(_spec(path, quant), x) - x).norm() / (x - offset).norm()
    assert fitted < 0.12 < plain


def test_checkpoint_scales_are_used(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    scales = {"0": {str(layer): 0.5 + layer for layer in range(3)}}
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": scales}
    path.write_text(json.dumps({"kv_cache": cache}), encoding="utf-8")
    spec = _spec(path, {"k": "fp8_e4m3", "v": "fp8_e4m3"})
    built = kvfactory.build(kvfactory.plan(spec))
    pool, index = built.pool(1)
    assert float(pool.constants(index)["k"]["scale"]) == 1.5
    x = torch.randn(8, 2, 64)
    codec = resolve_codec("fp8_e4m3", {}, "test")
    tensor = built.plan.groups[0].tensor("k").logical
    one = {"scale": torch.tensor(1.5)}
    want = codec.decode(tensor, codec.encode(tensor, x, one), one, "bfloat16")
    assert torch.equal(_round_trip(spec, x), want)


def test_a_missing_layer_is_an_error(tmp_path: Path) -> None:
    codecs = {name: resolve_codec("fp8_e4m3", {}, "test") for name in ("k", "v")}
    observed = {layer: {"k": torch.ones(4, 2, 64), "v": torch.ones(4, 2, 64)} for layer in (0, 1)}
    path = tmp_path / "constants.safetensors"
    kvfactory.calibrate(observed, codecs).save(path)
    plan = kvfactory.plan(_spec(path, {"k": "fp8_e4m3", "v": "fp8_e4m3"}))
    with pytest.raises(kvfactory.SpecError, match=str(Key(2, "k", "scale"))):
        kvfactory.build(plan)
    kvfactory.build(kvfactory.plan(_spec(path, {"k": "fp8_e4m3", "v": "fp8_e4m3"}, "0-1")))
