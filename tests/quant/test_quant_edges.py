"""Values that break number formats: zeros, NaN, infinities, subnormals, exact powers, ties."""

import math

import pytest
import torch
from torch import Tensor

from kvfactory.quant import SCHEMES, e2m1, e8m0
from kvfactory.quant.numerics import INPUT_MAX, divide

NAMES = [name for name in SCHEMES.names() if name != "plain"]
GROUP = {
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_tile128": 128,
    "int4_g32": 32,
    "int4_g128": 128,
    "mxfp8": 32,
    "mxfp4": 32,
    "fp4_block16": 16,
    "nvfp4": 16,
}
"""Elements that share a scale; the whole row of 256 where not named."""

NAN_SCALE = {
    "float32": [0x00, 0x00, 0xC0, 0x7F],
    "float16": [0x00, 0x7E],
    "float8_e4m3fn": [0x7F],
    "float8_e8m0fnu": [0xFF],
}


def rows() -> Tensor:
    return torch.randn(3, 2, 256, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("nan", [math.nan, -math.nan])
@pytest.mark.parametrize("name", NAMES)
def test_nan_poisons_its_scale_group_only(name: str, nan: float, coder) -> None:
    x = rows()
    clean = coder(name)(x)
    x[1, 0, 37] = math.copysign(nan, nan)
    coded = coder(name)(x)
    group = GROUP.get(name, 256)
    first = 37 // group * group
    poisoned = torch.zeros(x.shape, dtype=torch.bool)
    poisoned[1, 0, first : first + group] = True

    decoded = coded.decoded().reshape(x.shape)
    assert decoded[poisoned].isnan().all()
    assert torch.equal(decoded[~poisoned], clean.decoded().reshape(x.shape)[~poisoned])

    for plane in coded.codec.planes(coded.tensor):
        spread = coded.planes[plane.part].numel() / x.numel()
        stored = coded.bytes_of(plane.part)
        count = round(poisoned.sum().item() * spread)
        if plane.part != "data":
            want = torch.tensor(NAN_SCALE[plane.dtype], dtype=torch.uint8)
        else:
            want = torch.tensor([0x7F if plane.dtype.startswith("float8") else 0]).byte()
        changed = (stored != clean.bytes_of(plane.part)).any(-1)
        assert (stored[changed] == want).all(), plane
        assert int((stored == want).all(-1).sum()) >= count
        if plane.part != "data":
            assert int(changed.sum()) == count


@pytest.mark.parametrize("name", NAMES)
def test_infinities_are_stored_as_the_largest_input(name: str, coder) -> None:
    x = rows()
    x[0, 1, 5], x[2, 0, 200] = math.inf, -math.inf
    infinite = coder(name)(x)
    finite = coder(name)(x.clamp(-INPUT_MAX, INPUT_MAX))
    for part in infinite.planes:
        assert torch.equal(infinite.bytes_of(part), finite.bytes_of(part))
    assert infinite.decoded().isfinite().all()


def test_float64_beyond_float32_is_clamped(coder) -> None:
    x = torch.full((1, 1, 128), 1e300, dtype=torch.float64)
    assert coder("fp8_e4m3_token_head")(x).decoded().isfinite().all()


@pytest.mark.parametrize("tiny", [0.0, 1e-45, 3e-44, 1e-40, 1.2e-38])
@pytest.mark.parametrize("name", NAMES)
def test_zero_and_subnormal_rows_decode_to_almost_nothing(name: str, tiny: float, coder) -> None:
    x = rows().sign() * tiny
    x[..., ::3] = 0.0
    decoded = coder(name)(x).decoded().reshape(x.shape)
    assert decoded.isfinite().all()
    assert (decoded - x).abs().max() <= 2 * tiny


def test_zero_rows_have_the_stated_scales(coder) -> None:
    x = torch.zeros(1, 1, 128)
    stated = {"mxfp8": 19, "mxfp4": 25, "fp4_block16": 94, "nvfp4": 0}
    for name, scale in stated.items():
        coded = coder(name)(x)
        assert coded.bytes_of("scale").unique().tolist() == [scale], name
        assert coded.bytes_of("data").unique().tolist() == [0], name
    for name in ("fp8_e4m3_token_head", "int8_token_head", "int4_g32", "int4_g128"):
        assert coder(name)(x).planes["scale"].unique().tolist() == [1.0], name
    tile = coder("fp8_tile128")(x).planes["scale"]
    assert tile.unique().tolist() == [torch.tensor(1e-4).div(448.0).item()]


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp4_block16"])
def test_negative_zero(name: str, coder) -> None:
    x = torch.full((1, 1, 32), -0.0)
    x[..., ::16] = 6.0
    codes = coder(name)(x).bytes_of("data").flatten()
    assert codes[1].item() == {"mxfp4": 0x88, "nvfp4": 0x88, "fp4_block16": 0x00}[name]
    assert codes[0].item() & 0x0F == 7


def test_nvfp4_codes_are_zero_where_the_scale_is(coder) -> None:
    x = torch.tensor([-1e-6, 1e-6]).repeat(16)[None, None]
    coded = coder("nvfp4")(x)
    assert not coded.bytes_of("scale").any()
    assert not coded.bytes_of("data").any()


def test_int4_clamps_to_float16(coder) -> None:
    x = torch.linspace(-1e6, 1e6, 128)[None, None]
    coded = coder("int4_g128")(x)
    assert coded.planes["zero"].item() == -65504.0
    assert coded.planes["scale"].item() == torch.tensor(65504 / 7.5).half().item()
    assert coded.decoded().isfinite().all()


def test_e8m0_rounds_up_exactly_around_every_power() -> None:
    exponents = torch.arange(-126, 127, dtype=torch.float64)
    power = (2.0**exponents).float()
    above = power.nextafter(torch.tensor(math.inf))
    below = power.nextafter(torch.tensor(0.0))
    biased = (exponents + 127).int()
    assert torch.equal(e8m0.round_up(power).int(), biased)
    assert torch.equal(e8m0.round_up(above).int(), biased + 1)
    assert torch.equal(e8m0.round_up(below).int()[1:], biased[1:])


def test_e8m0_powers_are_exact_for_every_byte() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    powers = e8m0.powers(codes)
    assert [math.frexp(value) for value in powers[:255].tolist()] == [
        (0.5, code - 126) for code in range(255)
    ]
    assert powers[255].isnan()


def test_e2m1_decodes_every_code_and_rounds_it_back() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = e2m1.values(codes)
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert values.signbit().tolist() == [False] * 8 + [True] * 8
    assert torch.equal(e2m1.round_even(values), codes)
    assert torch.equal(e2m1.round_away(values)[values != 0], codes[values != 0])


def test_e2m1_ties() -> None:
    ties = torch.tensor(e2m1.MIDPOINTS)
    assert e2m1.round_even(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert e2m1.round_away(ties).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert e2m1.round_even(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]
    assert e2m1.round_even(torch.tensor([1e30, -math.inf])).tolist() == [7, 15]


def test_division_is_correctly_rounded() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(5))
    exact = (x.double() / 448).float()
    assert torch.equal(divide(x, 448.0), exact)
    assert not torch.equal(x * (1 / torch.tensor(448.0)), exact)


def test_static_scale_per_head(coder) -> None:
    x = rows()
    scale = torch.tensor([0.25, 3.0])
    per_head = coder("fp8_e4m3", {"scale": "head"})(x, scale=scale)
    for head in range(2):
        single = coder("fp8_e4m3")(x[:, head : head + 1], scale=scale[head])
        assert torch.equal(per_head.bytes_of("data")[:, head], single.bytes_of("data")[:, 0])
        assert torch.equal(per_head.decoded()[:, head], single.decoded()[:, 0])


def test_state_scales_run_along_value_wherever_it_stands(coder) -> None:
    state = torch.randn(5, 4, 8, 16, generator=torch.Generator().manual_seed(9))
    last = coder("state_int8")(state, coder.state(state))
    moved = state.transpose(-1, -2)
    middle = coder("state_int8")(moved, coder.state(moved, "head value key"))
    assert last.planes["scale"].shape == (5, 4, 8)
    assert torch.equal(last.planes["scale"], middle.planes["scale"])
    assert torch.equal(last.planes["data"], middle.planes["data"].transpose(-1, -2))
    want = state.abs().amax(-1) / 127
    assert torch.equal(last.planes["scale"], want)


def test_state_scale_is_rounded_to_the_states_type_before_dividing(coder) -> None:
    state = torch.randn(5, 4, 8, 16, generator=torch.Generator().manual_seed(9)).bfloat16()
    coded = coder("state_int8")(state, coder.state(state, dtype="bfloat16"))
    scale = (state.float().abs().amax(-1) / 127).bfloat16()
    assert torch.equal(coded.planes["scale"], scale)
    codes = (state.float() / scale.float()[..., None]).round().clamp(-127, 127)
    assert torch.equal(coded.planes["data"], codes.to(torch.int8))


def test_convolution_state_stays_plain(coder) -> None:
    x = torch.randn(2, 6, 3)
    coder_of_state = coder("state_int8")
    tensor = coder.state(torch.empty(1, 1, 6, 3), "unused channel tap")
    tensor = type(tensor)("conv", "state", tensor.axes[1:], "bfloat16")
    coded = coder_of_state(x, tensor)
    assert list(coded.planes) == ["data"]
    assert torch.equal(coded.planes["data"], x.bfloat16())


def test_plain_keeps_nan_and_infinity(coder) -> None:
    x = torch.tensor([1.0, math.inf, -math.inf, math.nan])[None, None]
    decoded = coder("plain")(x).decoded()
    assert torch.equal(decoded.isnan(), x.isnan())
    assert torch.equal(decoded[..., :3], x[..., :3])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_the_gpu_stores_and_reads_the_same_bytes(name: str, coder) -> None:
    x = rows() * 2.0 ** (torch.arange(256) // 4 - 40)
    x[0, 0, 0], x[1, 0, 37], x[2, 1, 9] = math.inf, math.nan, 1e-42
    here, there = coder(name)(x), coder(name)(x.cuda())
    for part in here.planes:
        assert torch.equal(here.bytes_of(part), there.bytes_of(part)), part
    for dtype in ("float32", "bfloat16"):
        want, got = here.decoded(dtype), there.decoded(dtype).cpu()
        assert torch.equal(got.nan_to_num(nan=7e7), want.nan_to_num(nan=7e7))
