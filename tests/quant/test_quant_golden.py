"""The stored bytes, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch

GOLDEN = Path(__file__).parent.parent / "golden"
SCHEME_OF = {
    "fp4_block16": "fp4_block16",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e4m3_token_head": "fp8_e4m3_token_head",
    "fp8_e4m3_unit": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "index_key": "fp8_tile128",
    "int4_g128": "int4_g128",
    "int4_g32": "int4_g32",
    "int8_token_head": "int8_token_head",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}


def stored_bytes(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy()).unsqueeze(-1).view(torch.uint8)


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as found:
        return dict(found)


def test_every_golden_file_is_checked() -> None:
    names = {path.stem for path in GOLDEN.glob("*.npz")}
    assert names == {*SCHEME_OF, "mla_row_656"}


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
@pytest.mark.parametrize("name", SCHEME_OF)
def test_stored_bytes_are_the_golden_ones(name: str, device: str, coder) -> None:
    golden = load(name)
    x = torch.from_numpy(golden.pop("x")).to(device)
    constants = {
        key: torch.tensor(value, device=device) for key, value in golden.items() if value.ndim == 0
    }
    coded = coder(SCHEME_OF[name])(x, **constants)
    for part in coded.planes:
        want = stored_bytes(golden[part])
        differing = int((coded.bytes_of(part) != want).sum())
        assert differing == 0, f"{name}.{part}: {differing} of {want.numel()} bytes differ"
    assert set(coded.planes) == {key for key in golden if golden[key].ndim}


def test_mla_record_is_latent_scales_rope(coder) -> None:
    golden = load("mla_row_656")
    latent = coder("fp8_tile128")(torch.from_numpy(golden["latent"]))
    rope = coder("plain")(torch.from_numpy(golden["rope"]).bfloat16())
    rope_plane = rope.planes["data"].bfloat16().view(torch.uint8)
    planes = [latent.bytes_of("data"), latent.bytes_of("scale"), rope_plane]
    record = torch.cat([plane.flatten(1) for plane in planes], dim=1)
    assert record.shape == (48, 656)
    assert torch.equal(record, torch.from_numpy(golden["record"]))


E4M3_VALUES = np.array(
    [
        (-1) ** (c >> 7)
        * (
            (c & 7) / 8 * 2.0**-6
            if not c & 0x78
            else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3 & 15) - 7)
        )
        for c in range(256)
    ]
)
E4M3_VALUES[[0x7F, 0xFF]] = np.nan
E5M2_VALUES = np.arange(256, dtype=np.uint16).__lshift__(8).view(np.float16).astype(np.float64)
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def per_element(scale: np.ndarray, data: np.ndarray) -> np.ndarray:
    """``scale`` [..., blocks] or [...] spread over the elements of ``data`` [..., D]."""
    scale = scale if scale.ndim == data.ndim else scale[..., None]
    return np.repeat(scale, data.shape[-1] // scale.shape[-1], axis=-1).astype(np.float64)


def nibbles(data: np.ndarray) -> np.ndarray:
    return np.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], -1)


def by_the_rule(scheme: str, golden: dict[str, np.ndarray]) -> np.ndarray:
    """The decoded golden bytes from tables, in float64."""
    data, scale = golden["data"], golden["scale"]
    if scheme in {"fp8_e4m3", "fp8_e5m2"}:
        return (E4M3_VALUES if scheme == "fp8_e4m3" else E5M2_VALUES)[data] * scale
    if scheme.startswith("fp8"):
        return E4M3_VALUES[data] * per_element(scale, data)
    if scheme == "int8_token_head":
        return data * per_element(scale, data)
    if scheme == "mxfp8":
        return E4M3_VALUES[data] * 2.0 ** (per_element(scale, data) - 127)
    codes = nibbles(data)
    if scheme.startswith("int4"):
        return codes * per_element(scale, codes) + per_element(golden["zero"], codes)
    if scheme == "nvfp4":
        scale = E4M3_VALUES[scale]
        return E2M1_VALUES[codes] * per_element(scale, codes) * golden["global_scale"]
    return E2M1_VALUES[codes] * 2.0 ** (per_element(scale, codes) - 127)


@pytest.mark.parametrize("name", SCHEME_OF)
def test_decoding_the_golden_bytes_follows_the_rule(name: str, coder) -> None:
    golden = load(name)
    constants = {key: torch.tensor(value) for key, value in golden.items() if value.ndim == 0}
    got = coder(SCHEME_OF[name])(torch.from_numpy(golden["x"]), **constants).decoded()
    want = by_the_rule(SCHEME_OF[name], golden)
    spread = abs(want).max(-1, keepdims=True) if name.startswith("int4") else 0  # q s + z cancels
    assert (abs(got.double().numpy() - want) <= 1.2e-7 * (abs(want) + spread)).all()


def nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Codes of the nearest of the ascending ``values``, ties to the even code; saturating."""
    upper = np.searchsorted(values, x).clip(1, len(values) - 1)
    down, up = x - values[upper - 1], values[upper] - x
    return np.where((down < up) | ((down == up) & (upper % 2 == 1)), upper - 1, upper)


@pytest.mark.parametrize(
    ("name", "table", "largest"),
    [("fp8_e4m3", E4M3_VALUES, 0x7E), ("fp8_e5m2", E5M2_VALUES, 0x7B)],
)
def test_fp8_codes_are_nearest_with_ties_to_even(name: str, table, largest: int, coder) -> None:
    values = table[: largest + 1]
    middles = (values[1:] + values[:-1]) / 2
    around = np.concatenate([values, middles, [values[-1] * 1.01, 1e30]]).astype(np.float32)
    x = np.concatenate([around, np.nextafter(around, 0), np.nextafter(around, np.float32(1e38))])
    got = coder(name)(torch.from_numpy(x)[None, None]).bytes_of("data").flatten().numpy()
    np.testing.assert_array_equal(got, nearest(x.astype(np.float64), values))
    negative = coder(name)(torch.from_numpy(-x)[None, None]).bytes_of("data").flatten().numpy()
    np.testing.assert_array_equal(negative, got | 0x80)
