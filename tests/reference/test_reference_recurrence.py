"""Recurrences: step by step, in blocks and by the papers' formulas, in every order of axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvfactory.reference import (
    Drive,
    causal_conv,
    chunk,
    gated_delta,
    kimi_delta,
    lightning,
    mamba1,
    mamba2,
    scan,
)

TOKENS = 37
Case = tuple[Drive, tuple[str, ...], Tensor, Callable[[], Tensor]]


def case_mamba1() -> Case:
    channels, states = 5, 3
    x, b, c = (torch.randn(TOKENS, n).double() for n in (channels, states, states))
    dt, a = torch.rand(TOKENS, channels).double(), -torch.rand(channels, states).double()
    start = torch.randn(channels, states).double()

    def naive() -> Tensor:
        h, out = start.clone(), torch.zeros(TOKENS, channels, 1).double()
        for t, ch in itertools.product(range(TOKENS), range(channels)):
            for n in range(states):
                decay = math.exp(dt[t, ch] * a[ch, n])
                h[ch, n] = decay * h[ch, n] + dt[t, ch] * b[t, n] * x[t, ch]
            out[t, ch, 0] = c[t] @ h[ch]
        return out

    return mamba1(x, dt, a, b, c), ("channel", "state"), start, naive


def case_mamba2() -> Case:
    heads, groups, value, key = 4, 2, 3, 5
    x, dt = torch.randn(TOKENS, heads, value).double(), torch.rand(TOKENS, heads).double()
    b, c = (torch.randn(TOKENS, groups, key).double() for _ in range(2))
    a, start = -torch.rand(heads).double() * 8, torch.randn(heads, value, key).double()

    def naive() -> Tensor:
        h, out = start.clone(), torch.zeros(TOKENS, heads, value).double()
        for t, head in itertools.product(range(TOKENS), range(heads)):
            group = head // (heads // groups)
            decay = math.exp(dt[t, head] * a[head])
            h[head] = decay * h[head] + dt[t, head] * torch.outer(x[t, head], b[t, group])
            out[t, head] = h[head] @ c[t, group]
        return out

    return mamba2(x, dt, a, b, c), ("head", "value", "key"), start, naive


def delta(per_channel: bool) -> Case:
    heads, key_heads, value, key = 4, 2, 6, 3
    q, k = (torch.randn(TOKENS, key_heads, key).double() for _ in range(2))
    k = torch.nn.functional.normalize(k, dim=-1)
    v, beta = torch.randn(TOKENS, heads, value).double(), torch.rand(TOKENS, heads).double()
    gate = -3 * torch.rand(TOKENS, heads, *((key,) if per_channel else ())).double()
    start = torch.randn(heads, key, value).double()

    def naive() -> Tensor:
        s, out = start.clone(), torch.zeros(TOKENS, heads, value).double()
        eye = torch.eye(key).double()
        for t, head in itertools.product(range(TOKENS), range(heads)):
            row = k[t, head // 2]
            decayed = torch.diag(gate[t, head].exp().expand(key)) @ s[head]
            forget = eye - beta[t, head] * torch.outer(row, row)
            s[head] = forget @ decayed + beta[t, head] * torch.outer(row, v[t, head])
            out[t, head] = 0.7 * q[t, head // 2] @ s[head]
        return out

    make = kimi_delta if per_channel else gated_delta
    return make(q, k, v, gate, beta, 0.7), ("head", "key", "value"), start, naive


def case_lightning() -> Case:
    heads, value, key = 3, 4, 5
    q, k = (torch.randn(TOKENS, heads, key).double() for _ in range(2))
    v, slope = torch.randn(TOKENS, heads, value).double(), torch.rand(heads).double()
    start = torch.randn(heads, key, value).double()

    def naive() -> Tensor:
        s, out = start.clone(), torch.zeros(TOKENS, heads, value).double()
        for t, head in itertools.product(range(TOKENS), range(heads)):
            s[head] = math.exp(-slope[head]) * s[head] + torch.outer(k[t, head], v[t, head])
            out[t, head] = q[t, head] @ s[head]
        return out

    return lightning(q, k, v, slope), ("head", "key", "value"), start, naive


CASES: dict[str, Callable[[], Case]] = {
    "mamba1": case_mamba1,
    "mamba2": case_mamba2,
    "gdn": lambda: delta(per_channel=False),
    "kda": lambda: delta(per_channel=True),
    "lightning": case_lightning,
}


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    made: Case = CASES[request.param]()
    return made


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_scan_and_chunk_equal_the_formula(case: Case) -> None:
    drive, axes, start, naive = case
    want = naive()
    out, end = scan(start, axes, drive)
    close(out, want)
    blocked, blocked_end = chunk(start, axes, drive)
    close(blocked, want)
    close(blocked_end, end)


def test_steps_equal_scan_and_any_split_of_chunks(case: Case) -> None:
    drive, axes, start, _ = case
    want, end = scan(start, axes, drive)
    state, outs = start, []
    for token in range(TOKENS):
        out, state = scan(state, axes, drive.part(token, token + 1))
        outs.append(out)
    close(torch.cat(outs, -3), want)
    close(state, end)
    state, outs = start, []
    for low, high in itertools.pairwise((0, 1, 17, 17, 33, TOKENS)):
        out, state = chunk(state, axes, drive.part(low, high))
        outs.append(out)
    close(torch.cat(outs, -3), want)
    close(state, end)


def test_any_order_of_axes(case: Case) -> None:
    drive, axes, start, _ = case
    want, end = scan(start, axes, drive)
    for order in itertools.permutations(range(len(axes))):
        names = tuple(axes[dim] for dim in order)
        for run in (scan, chunk):
            out, state = run(start.permute(order), names, drive)
            close(out, want)
            close(state, end.permute(order))


def test_batches_and_types(case: Case) -> None:
    """A batch of two with half-precision states: arithmetic and results are float32."""
    drive, axes, start, _ = case
    twice = Drive(
        *(torch.stack([x, x.flip(-3)]).float() for x in (drive.q, drive.k, drive.v)),
        torch.stack([drive.log_decay] * 2).float(),
        None if drive.beta is None else torch.stack([drive.beta] * 2).float(),
    )
    states = torch.stack([start, start + 1]).bfloat16()
    out, end = scan(states, axes, twice)
    assert (out.dtype, end.dtype) == (torch.float32, torch.float32)
    blocked, blocked_end = chunk(states, axes, twice)
    torch.testing.assert_close(blocked, out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(blocked_end, end, rtol=1e-4, atol=1e-4)
    alone, _ = scan(states[0], axes, drive.to(torch.float32))
    torch.testing.assert_close(out[0], alone)


def test_the_state_is_not_changed(case: Case) -> None:
    drive, axes, start, _ = case
    before = start.clone()
    for run in (scan, chunk):
        run(start, axes, drive)
    assert torch.equal(start, before)


def test_strong_decay_stays_finite() -> None:
    """Decays of exp(-200) a token: their inverse would overflow."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(20, 2, 4) for _ in range(3))
    drive = kimi_delta(q, k, v, torch.full((20, 2, 4), -200.0), torch.rand(20, 2), 1.0)
    out, end = chunk(torch.randn(2, 4, 4), ("head", "key", "value"), drive)
    want, want_end = scan(torch.zeros(2, 4, 4), ("head", "key", "value"), drive)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(end, want_end)


# ---- convolutions ----------------------------------------------------------------------------


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_conv_equals_loops(taps: int, bias: bool, silu: bool) -> None:
    torch.manual_seed(0)
    window, x = torch.randn(2, 3, taps - 1).double(), torch.randn(2, 6, 3).double()
    weight = torch.randn(3, taps).double()
    added = torch.randn(3).double() if bias else None
    out, after = causal_conv(window, x, weight, added, silu=silu)
    full = torch.cat([window.transpose(1, 2), x], 1)
    for b, t, c in itertools.product(range(2), range(6), range(3)):
        want = sum(float(full[b, t + i, c] * weight[c, i]) for i in range(taps))
        want += float(added[c]) if added is not None else 0.0
        want = want / (1 + math.exp(-want)) if silu else want
        assert math.isclose(float(out[b, t, c]), want, rel_tol=1e-9, abs_tol=1e-12)
    assert torch.equal(after, full[:, 6:].transpose(1, 2))


@pytest.mark.parametrize("window_first", [False, True])
def test_conv_splits_anywhere(window_first: bool) -> None:
    torch.manual_seed(0)
    window, x, weight = torch.randn(3, 5), torch.randn(9, 5), torch.randn(5, 4)
    window = window if window_first else window.T

    def run(past: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        return causal_conv(past, new, weight, window_first=window_first)

    want, end = run(window, x)
    outs = []
    for low, high in itertools.pairwise((0, 1, 3, 3, 8, 9)):
        out, window = run(window, x[low:high])
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs), want)
    assert torch.equal(window, end)
