"""Constants: fitted to observations, saved, loaded, and refused when a cache cannot use them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from kvfactory.calibration import Constants, Key, calibrate, required_constants
from kvfactory.errors import SpecError
from kvfactory.quant import Codec, Logical, resolve_codec

LAYERS = (0, 3, 7)


def tensor(name: str) -> Logical:
    return Logical(name, name, (("head", 2), ("dim", 32)), "bfloat16")


def codecs() -> dict[str, Codec]:
    return {
        "k": resolve_codec("fp8_e4m3", {"scale": "head", "center": True}, "quant.k"),
        "v": resolve_codec("nvfp4", {}, "quant.v"),
    }


def required():
    return required_constants(
        (layer, tensor(name), codec) for layer in LAYERS for name, codec in codecs().items()
    )


def observed() -> dict[int, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {
        layer: {
            name: torch.randn(4, 16, 2, 32, generator=generator) + torch.arange(32)
            for name in ("k", "v")
        }
        for layer in LAYERS
    }


@pytest.fixture
def constants() -> Constants:
    return calibrate(observed(), codecs())


def test_every_required_constant_is_calibrated(constants: Constants) -> None:
    assert set(constants.values) == set(required())
    constants.check(required(), "calibrated")
    assert Key(3, "k", "center") in constants.values
    assert all(value.dtype == np.float32 for value in constants.values.values())


def test_calibrated_values_follow_the_rule() -> None:
    seen = observed()
    for headroom in (1.0, 2.0):
        values = calibrate(seen, codecs(), headroom).values
        k, v = seen[3]["k"].double().flatten(0, 1), seen[3]["v"].double()
        center = k.mean(0)
        scale = (k - center).abs().amax((0, 2)) / 448 * headroom
        global_scale = v.abs().max() / 2688 * headroom
        np.testing.assert_allclose(values[Key(3, "k", "center")], center, rtol=1e-6)
        np.testing.assert_allclose(values[Key(3, "k", "scale")], scale, rtol=1e-6)
        np.testing.assert_allclose(values[Key(3, "v", "global_scale")], global_scale, rtol=1e-6)


def test_calibrated_constants_lower_the_error(constants: Constants) -> None:
    x = observed()[7]["v"]
    codec = codecs()["v"]
    errors = []
    for value in (
        torch.from_numpy(constants.values[Key(7, "v", "global_scale")]),
        torch.tensor(1e-4),
    ):
        bound = {"global_scale": value}
        planes = codec.encode(tensor("v"), x, bound)
        errors.append((codec.decode(tensor("v"), planes, bound, "float32") - x).norm() / x.norm())
    assert errors[0] < 0.15 < errors[1]


def test_a_dead_head_takes_the_range_of_the_others() -> None:
    seen = observed()
    seen[0]["k"][:, :, 1] = 0.0
    scale = calibrate(seen, codecs()).values[Key(0, "k", "scale")]
    assert scale[1] == scale[0] > 0


def test_unusable_observations_are_all_refused_at_once() -> None:
    seen = observed()
    seen[0]["k"][0, 0, 0, 0] = float("nan")
    seen[3]["v"].zero_()
    seen[7]["v"] = torch.empty(0, 2, 32)
    seen[7]["index_k"] = torch.ones(1, 1, 32)
    with pytest.raises(SpecError) as refused:
        calibrate(seen, {**codecs(), "rope": codecs()["k"]}, headroom=0.5)
    text = str(refused.value)
    for part in (
        "headroom: got 0.5",
        "observed[0]['k']: got NaN or infinity",
        "observed[3]['v']: got zeros only",
        "observed[7]['v']: got shape [0, 2, 32]",
        "observed[7]['index_k']: got a tensor without codec",
        "codecs['rope']: got no observation",
    ):
        assert part in text


def test_saved_constants_load_back(constants: Constants, tmp_path: Path) -> None:
    path = tmp_path / "constants.safetensors"
    constants.save(path)
    assert "layers.3.k.scale" in load_file(path)
    loaded = Constants.load(path, required())
    assert set(loaded.values) == set(constants.values)
    for key, value in constants.values.items():
        assert loaded.values[key].dtype == np.float32
        np.testing.assert_array_equal(loaded.values[key], value)


def test_constants_that_nobody_needs_are_left_out(constants: Constants, tmp_path: Path) -> None:
    path = tmp_path / "constants.safetensors"
    constants.save(path)
    needed = {key: constant for key, constant in required().items() if key.tensor == "v"}
    assert set(Constants.load(path, needed).values) == set(needed)


def test_unusable_constants_are_all_refused_at_once(constants: Constants, tmp_path: Path) -> None:
    values = {key: value.copy() for key, value in constants.values.items()}
    del values[Key(0, "v", "global_scale")]
    values[Key(3, "v", "global_scale")][...] = 0.0
    values[Key(3, "k", "scale")] = np.ones((3,), np.float32)
    values[Key(7, "k", "scale")][1] = -1.0
    values[Key(7, "k", "center")][1, 5] = np.inf
    path = tmp_path / "constants.safetensors"
    Constants(values).save(path)
    with pytest.raises(SpecError) as refused:
        Constants.load(path, required())
    found = {
        problem.path.removeprefix(f"{path}: "): str(problem) for problem in refused.value.problems
    }
    assert found.keys() == {
        "layers.0.v.global_scale",
        "layers.3.v.global_scale",
        "layers.3.k.scale",
        "layers.7.k.scale",
        "layers.7.k.center",
    }
    assert "got nothing" in found["layers.0.v.global_scale"]
    assert "got shape [3], need shape [2]" in found["layers.3.k.scale"]
    assert "got -1.0, need positive scales" in found["layers.7.k.scale"]
    assert "got inf, need finite values" in found["layers.7.k.center"]


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(SpecError, match="a safetensors file of constants"):
        Constants.load(path, required())
    path.write_bytes(b"not a safetensors file at all")
    with pytest.raises(SpecError, match="a safetensors file of constants"):
        Constants.load(path, required())
    save_file({"layers.0.k.scale": np.ones((), np.float32)}, path)
    with pytest.raises(SpecError, match="from_checkpoint"):
        Constants.load(path, required())


def test_what_training_leaves_behind_can_be_observed() -> None:
    seen = {0: {name: x.requires_grad_() for name, x in observed()[0].items()}}
    expected = calibrate({0: observed()[0]}, codecs())
    for key, value in calibrate(seen, codecs()).values.items():
        assert np.array_equal(value, expected.values[key])


def test_scales_that_float32_cannot_hold_are_refused() -> None:
    seen = {0: {"v": torch.full((1, 2, 32), 1e-44)}}
    with pytest.raises(SpecError, match=r"observed: layers\.0\.v\.\w+: got 0\.0, need positive"):
        calibrate(seen, {"v": codecs()["v"]})
    with pytest.raises(SpecError, match="headroom: got inf"):
        calibrate(observed(), codecs(), headroom=float("inf"))
    with pytest.raises(SpecError, match="got inf, need finite values"):
        calibrate(observed(), codecs(), headroom=1e300)


def test_complex_constants_are_refused(constants: Constants, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    constants.save(path)
    arrays = load_file(path)
    arrays["layers.0.v.global_scale"] = arrays["layers.0.v.global_scale"].astype(np.complex64)
    save_file(arrays, path, metadata={"format": "kvfactory.constants.1"})
    with pytest.raises(SpecError, match="got complex64, need float32"):
        Constants.load(path, required())
