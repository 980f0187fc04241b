"""``kv.constants``: calibrated files and checkpoint scales reach every write and every read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import kvfactory
from kvfactory.calibration import Key
from kvfactory.calibration.checkpoint import read_constants
from kvfactory.calibration.constants import FORMAT
from kvfactory.errors import SpecError
from kvfactory.quant import Constant, resolve_codec
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


REQUIRED = {Key(0, "k", "scale"): Constant("scale", (), 1.0)}


def _scales(of_layer_0: str) -> str:
    cache = f'{{"dtype": "float8_e4m3fn", "scaling_factor": {{"0": {{"0": {of_layer_0}}}}}}}'
    return f'{{"kv_cache": {cache}}}'


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("deep.json", "[" * 200_000, "need a JSON file of scales"),
        ("text.json", _scales('"0.5"'), "scaling_factor.0: got '0.5', need layer -> scale"),
        ("true.json", _scales("true"), "scaling_factor.0: got True, need layer -> scale"),
        ("x" * 5_000, None, "need a safetensors file of constants"),
        ("~/nowhere", None, str(Path.home() / "nowhere")),
    ],
)
def test_corrupt_files_are_named_with_their_key(
    tmp_path: Path, name: str, content: str | None, told: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
        name = str(tmp_path / name)
    with pytest.raises(kvfactory.SpecError) as caught:
        read_constants(name, REQUIRED)
    assert str(caught.value).startswith("kv.constants: ")
    assert told in str(caught.value)


def test_types_that_numpy_lacks(tmp_path: Path) -> None:
    path = tmp_path / "constants.safetensors"
    values = {"layers.0.k.scale": torch.tensor(0.5, dtype=torch.bfloat16)}
    save_file(values, path, metadata={"format": FORMAT})
    with pytest.raises(kvfactory.SpecError, match=r"layers.0.k.scale: got BF16, need float32"):
        read_constants(path, REQUIRED)


def test_constants_that_nothing_takes_are_noted() -> None:
    told = "kv.constants is unused: no number format of the model takes any"
    for kv, unused in (("bf16_nhd", True), ("fp8_nhd", False)):
        spec = kvfactory.compose(f"kv={kv}", "kv.constants=c.safetensors", "device=cpu")
        assert (told in kvfactory.plan(spec).notes) is unused


def test_a_home_that_nobody_has() -> None:
    with pytest.raises(SpecError, match=r"kv\.constants: got '~nouser/x'"):
        read_constants("~nouser/x", {})
