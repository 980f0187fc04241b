"""Static scales as checkpoints carry them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kvfactory.calibration import Key
from kvfactory.calibration.checkpoint import from_checkpoint
from kvfactory.errors import SpecError


def write(path: Path, **scales: float | list[float] | torch.Tensor) -> Path:
    tensors = {name: torch.as_tensor(value) for name, value in scales.items()}
    save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    "form",
    [
        "model.layers.{}.self_attn.{}_scale",
        "model.layers.{}.self_attn.attn.{}_scale",
        "transformer.layers.{}.attn.{}_scale",
        "model.layers.{}.self_attn.{}_proj.{}_scale",
        "model.layers.{}.self_attn.{}_proj.output_scale",
        "model.language_model.layers.{}.self_attn.{}_scale",
        "backbone.layers.{}.mixer.{}_scale",
    ],
)
def test_names_of_engines(form: str, tmp_path: Path) -> None:
    scales = {
        form.format(layer, part, part): 0.01 * layer + 0.5 * (part == "v")
        for layer in (1, 2, 11)
        for part in "kv"
    }
    others = {"model.layers.1.self_attn.k_proj.weight_scale": 9.0, "model.layers.1.q_scale": 9.0}
    path = write(tmp_path / "model.safetensors", **scales, **others)
    values = from_checkpoint(path, (1, 11)).values
    assert {str(key): float(value) for key, value in values.items()} == pytest.approx(
        {
            "layers.1.k.scale": 0.01,
            "layers.1.v.scale": 0.51,
            "layers.11.k.scale": 0.11,
            "layers.11.v.scale": 0.61,
        }
    )
    assert all(value.dtype == np.float32 and value.shape == () for value in values.values())


def test_shards_kinds_and_shapes(tmp_path: Path) -> None:
    write(tmp_path / "model-1.safetensors", **{"model.layers.0.self_attn.kv_scale": [0.25]})
    heads = {
        "model.layers.1.self_attn.k_scale": torch.tensor([0.5, 2.0], dtype=torch.bfloat16),
        "model.layers.1.self_attn.v_scale": torch.tensor([1.0, 4.0]),
    }
    write(tmp_path / "model-2.safetensors", **heads)
    values = from_checkpoint(tmp_path, (0, 1), constant="global_scale").values
    assert values[Key(0, "k", "global_scale")] == values[Key(0, "v", "global_scale")] == 0.25
    assert values[Key(0, "v", "global_scale")].shape == ()
    assert values[Key(1, "k", "global_scale")].tolist() == [0.5, 2.0]


def test_a_missing_layer_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", **{"model.layers.0.self_attn.k_scale": 0.5})
    with pytest.raises(SpecError) as refused:
        from_checkpoint(path, (0, 1))
    assert [problem.path for problem in refused.value.problems] == [
        f"{path}: layers.0.v.scale",
        f"{path}: layers.1.k.scale",
        f"{path}: layers.1.v.scale",
    ]
    assert "got no v_scale" in str(refused.value)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_cannot_be_divided_by_is_an_error(bad: float, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", **{"model.layers.0.self_attn.kv_scale": bad})
    with pytest.raises(SpecError, match="need positive, finite scales"):
        from_checkpoint(path, [0])


def test_a_latent_has_one_scale(tmp_path: Path) -> None:
    scales = {"model.layers.0.self_attn.k_scale": 0.5, "model.layers.0.self_attn.v_scale": 0.5}
    path = write(tmp_path / "a.safetensors", **scales)
    values = from_checkpoint(path, [0], ["latent", "rope"]).values
    assert {str(key): float(value) for key, value in values.items()} == {
        "layers.0.latent.scale": 0.5,
        "layers.0.rope.scale": 0.5,
    }
    scales["model.layers.0.self_attn.v_scale"] = 0.25
    path = write(tmp_path / "b.safetensors", **scales)
    with pytest.raises(SpecError, match=r"unequal k_scale 0.5 and v_scale 0.25"):
        from_checkpoint(path, [0], ["latent"])
    with pytest.raises(SpecError, match="tensor 'index_k', need one of k, v, latent, rope"):
        from_checkpoint(path, [0], ["index_k"])


def test_two_models_in_one_checkpoint_need_a_prefix(tmp_path: Path) -> None:
    scales = {"model.layers.0.self_attn.kv_scale": 0.5, "mtp.layers.0.self_attn.kv_scale": 0.25}
    path = write(tmp_path / "a.safetensors", **scales)
    with pytest.raises(SpecError, match="need one scale a layer; try prefix="):
        from_checkpoint(path, [0])
    assert from_checkpoint(path, [0], prefix="mtp.").values[Key(0, "k", "scale")] == 0.25


def write_json(path: Path, **kv_cache: object) -> Path:
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": kv_cache}))
    return path


def test_json_form(tmp_path: Path) -> None:
    ranks = {"0": {"0": 0.02, "1": 0.03}, "1": {"0": 0.04, "1": 0.05}}
    path = write_json(tmp_path / "kv.json", dtype="float8_e4m3fn", scaling_factor=ranks)
    values = from_checkpoint(path, (0, 1), tp_rank=1).values
    assert {str(key): float(value) for key, value in values.items()} == pytest.approx(
        {"layers.0.k.scale": 0.04, "layers.0.v.scale": 0.04, "layers.1.k.scale": 0.05}
        | {"layers.1.v.scale": 0.05}
    )
    with pytest.raises(SpecError, match="a scale for layer 2"):
        from_checkpoint(path, [2])
    with pytest.raises(SpecError, match=r"kv\.json: 2: got None, need a mapping"):
        from_checkpoint(path, [0], tp_rank=2)


def test_malformed_files(tmp_path: Path) -> None:
    path = write_json(tmp_path / "kv.json", dtype="int8", scaling_factor={"0": {"0": 1.0}})
    with pytest.raises(SpecError, match=r"kv_cache\.dtype: got 'int8'"):
        from_checkpoint(path, [0])
    path = write_json(tmp_path / "kv.json", dtype="float8_e4m3fn", scaling_factor={"0": {"0": "x"}})
    with pytest.raises(SpecError, match="need layer -> scale"):
        from_checkpoint(path, [0])
    write_json(path, dtype="float8_e4m3fn", scaling_factor={"0": {"0": 10**400}})
    with pytest.raises(SpecError, match="need layer -> scale"):
        from_checkpoint(path, [0])
    path.write_text("[1, 2]")
    with pytest.raises(SpecError, match="kv_cache: got None, need a mapping"):
        from_checkpoint(path, [0])
    path.write_text("{")
    with pytest.raises(SpecError, match="need a JSON file of scales"):
        from_checkpoint(path, [0])
    for name in ("missing.json", "missing.safetensors", ""):
        with pytest.raises(SpecError):
            from_checkpoint(tmp_path / name, [0])


def test_layers_without_end_and_complex_scales(tmp_path: Path) -> None:
    endless = f"model.layers.{'9' * 5_000}.self_attn.k_scale"
    path = write(tmp_path / "a.safetensors", **{endless: 1.0})
    with pytest.raises(SpecError, match="a scale for layer 0"):
        from_checkpoint(path, [0])
    path = write(tmp_path / "a.safetensors", **{"layers.0.k_scale": torch.tensor(1 + 2j)})
    with pytest.raises(SpecError, match="need real scales"):
        from_checkpoint(path, [0])
