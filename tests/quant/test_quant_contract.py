"""What every registered scheme owes, built-in or not: a new scheme is tested by being there."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from same_bytes import same_bytes
from torch import Tensor

from kvfactory.errors import SpecError
from kvfactory.quant import SCHEMES, Logical, resolve_codec
from kvfactory.quant.codec import ROLES
from kvfactory.quant.numerics import torch_dtype

NAMES = SCHEMES.names()
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROWS = [(), (1,), (0,), (5,), (2, 3)]


def tensors(name: str) -> list[Logical]:
    """A tensor of every role that the scheme serves."""
    found = []
    for role in sorted(SCHEMES.get(name, "").roles):
        if role == "state":
            found += [
                Logical("recurrent", role, (("head", 2), ("key", 3), ("value", 8)), "float32"),
                Logical("recurrent", role, (("head", 2), ("value", 8), ("key", 3)), "bfloat16"),
                Logical("conv", role, (("channel", 6), ("tap", 3)), "bfloat16"),
            ]
        else:
            found.append(Logical(role, role, (("head", 2), ("dim", 128)), "bfloat16"))
    return found


def option_values(name: str) -> list[dict[str, object]]:
    """The default and every single option away from it."""
    found: list[dict[str, object]] = [{}]
    for key, schema in SCHEMES.get(name, "").options.model_json_schema()["properties"].items():
        values = schema.get("enum", [True, False])
        found += [{key: value} for value in values if value != schema["default"]]
    return found


CASES = [
    pytest.param(
        name, options, tensor, id=f"{name}-{options or 'default'}-{tensor.role}-{tensor.name}"
    )
    for name in NAMES
    for options in (option_values(name) if SCHEMES.get(name, "").options.model_fields else [{}])
    for tensor in tensors(name)
]


def random(tensor: Logical, rows: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(len(rows))
    shape = (*rows, *(extent for _, extent in tensor.axes))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def constants_of(codec, tensor: Logical) -> dict[str, Tensor]:
    """Constants off their defaults, so that forgetting one is seen."""
    found = {}
    for known in codec.constants(tensor):
        shape = [extent for _, extent in known.axes]
        found[known.name] = 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(7))
    return found


@pytest.mark.parametrize(("name", "options", "tensor"), CASES)
def test_encode_returns_the_declared_planes(name: str, options, tensor: Logical) -> None:
    codec = resolve_codec(name, options, "quant")
    if codec.problems(tensor, "quant"):
        assert options.get("center")
        return
    constants = constants_of(codec, tensor)
    for rows in ROWS:
        x = random(tensor, rows)
        planes = codec.encode(tensor, x, constants)
        declared = codec.planes(tensor)
        assert [plane.part for plane in declared] == list(planes)
        assert declared[0].part == "data"
        for plane in declared:
            assert planes[plane.part].dtype == torch_dtype(plane.dtype), plane
            assert planes[plane.part].shape == (*rows, *(extent for _, extent in plane.axes)), plane
        for dtype in ("float32", "bfloat16", "float16"):
            decoded = codec.decode(tensor, planes, constants, dtype)
            assert decoded.dtype == torch_dtype(dtype)
            assert decoded.shape == x.shape
            limit = 3 * (SCHEMES.get(name, "").relative_rms_error or 1.0)
            assert x.numel() == 0 or (decoded - x).norm() <= limit * x.norm()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_inputs_of_any_type_and_stride_stay_unchanged(name: str, dtype: torch.dtype) -> None:
    center = bool(SCHEMES.get(name, "").roles & {"k", "v"})
    codec = resolve_codec(name, {"center": True} if center else {}, "quant")
    for tensor in tensors(name):
        constants = constants_of(codec, tensor)
        x = random(tensor, (4,), dtype)
        strided = torch.empty((*x.shape, 2), dtype=dtype)[..., 0].copy_(x)
        assert not strided.is_contiguous()
        before = strided.clone()
        got = codec.encode(tensor, strided, constants)
        want = codec.encode(tensor, x.float(), constants)
        assert torch.equal(strided, before)
        assert all(same_bytes(got[part], want[part]) for part in want)
        kept = {part: plane.clone() for part, plane in got.items()}
        codec.decode(tensor, got, constants, "float32")
        assert all(same_bytes(got[part], kept[part]) for part in kept)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(
    order=st.permutations(range(6)),
    exponents=st.lists(st.integers(-20, 20), min_size=6, max_size=6),
)
def test_rows_do_not_see_each_other(name: str, order: list[int], exponents: list[int]) -> None:
    codec = resolve_codec(name, {}, "quant")
    for tensor in tensors(name):
        constants = constants_of(codec, tensor)
        x = random(tensor, (6,))
        x = x * torch.tensor([2.0**e for e in exponents]).view(6, *[1] * len(tensor.axes))
        together = codec.encode(tensor, x[order], constants)
        for row, source in enumerate(order):
            alone = codec.encode(tensor, x[source : source + 1], constants)
            for part in alone:
                assert same_bytes(together[part][row : row + 1], alone[part])


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_shape_is_refused(name: str) -> None:
    codec = resolve_codec(name, {}, "quant")
    for tensor in tensors(name):
        wrong = random(tensor, (4,)).transpose(-1, -2)
        with pytest.raises(SpecError, match=rf"{tensor.name}: got shape .*, need \[rows\.\.\.,"):
            codec.encode(tensor, wrong, constants_of(codec, tensor))


@pytest.mark.parametrize("name", NAMES)
def test_schemes_describe_themselves(name: str) -> None:
    scheme = SCHEMES.get(name, "quant")
    assert scheme.summary
    assert scheme.source
    assert scheme.roles
    assert scheme.roles <= ROLES
    assert resolve_codec(name, {}, "quant").name == name
    if SCHEMES.origin(name) == "built-in":
        assert ("center" in scheme.options.model_fields) == bool(scheme.roles & {"k", "v"})


@pytest.mark.parametrize(
    ("name", "dim", "need", "fix"),
    [
        ("mxfp8", 80, "a multiple of 32 (mxfp8 scales blocks of 32)", "kv.quant.k=fp8_e4m3"),
        ("mxfp4", 80, "a multiple of 32 (mxfp4 scales blocks of 32)", "kv.quant.k=fp8_e4m3"),
        ("nvfp4", 100, "a multiple of 16 (nvfp4 scales blocks of 16)", "kv.quant.k=fp8_e4m3"),
        ("fp4_block16", 100, "a multiple of 16 (fp4_block16 scales blocks of 16)", "kv.quant.k="),
        ("fp8_tile128", 192, "a multiple of 128 (fp8_tile128 scales tiles of 128)", "kv.quant.k="),
        ("int4_g32", 80, "a multiple of 32 (int4_g32 scales groups of 32)", "kv.quant.k="),
        ("int4_g128", 64, "a multiple of 128 (int4_g128 scales groups of 128)", "kv.quant.k="),
    ],
)
def test_a_dim_that_blocks_do_not_fill_is_a_problem(
    name: str, dim: int, need: str, fix: str
) -> None:
    tensor = Logical("k", "k", (("head", 8), ("dim", dim)), "bfloat16")
    (problem,) = resolve_codec(name, {}, "quant").problems(tensor, "kv.quant.k")
    assert (problem.path, problem.got, problem.need) == ("kv.quant.k", f"dim {dim}", need)
    assert problem.fix.startswith(fix)
    instead = problem.fix.removeprefix("kv.quant.k=")
    assert resolve_codec(instead, {}, "quant").problems(tensor, "kv.quant.k") == ()


@pytest.mark.parametrize("name", [name for name in NAMES if "k" in SCHEMES.get(name, "").roles])
def test_center_serves_k_and_v_only(name: str) -> None:
    codec = resolve_codec(name, {"center": True}, "quant")
    for tensor in tensors(name):
        problems = codec.problems(tensor, "quant")
        assert bool(problems) == (tensor.role not in {"k", "v"})
        assert all(found.fix == f"quant={name}" for found in problems)


def test_planning_leaves_torch_alone() -> None:
    program = """
import sys
from kvfactory.quant import SCHEMES, Logical, resolve_codec
tensor = Logical("k", "k", (("head", 8), ("dim", 128)), "bfloat16")
for name in SCHEMES.names():
    codec = resolve_codec(name, {}, "quant")
    assert codec.planes(tensor) and not codec.problems(tensor, "quant"), name
    codec.constants(tensor)
assert not {"torch", "triton", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
