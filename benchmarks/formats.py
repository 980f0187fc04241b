"""Attention-output error of every number format, measured through the cache.

``python -m benchmarks.formats`` prints a Markdown table: K drawn from N(0,1), t(3), with eight
outlier channels (x16) and with eight offset channels (+-16 constant); V from N(0,1). ``center``
columns use constants calibrated on other rows of the same distribution. The error is
||out - ref|| / ||ref|| against dense float32 attention over the unquantized K and V, with logits
scaled to N(0,1). It takes about three minutes on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kvfactory
from kvfactory.calibration import Constants
from kvfactory.planning.cacheplan import Attention
from kvfactory.quant import SCHEMES, resolve_codec
from kvfactory.quant.center import CenterOptions
from kvfactory.reference import dense_attention, visible_keys
from kvfactory.spec import Spec

HEADS, Q_HEADS, DIM, TOKENS = 8, 32, 128, 2048


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


def _student(*shape: int) -> Tensor:
    return torch.distributions.StudentT(3.0).sample(shape)


def _outliers(*shape: int) -> Tensor:
    x = torch.randn(*shape)
    x[..., :: shape[-1] // 8] *= 16.0
    return x


def _offsets(*shape: int) -> Tensor:
    x = torch.randn(*shape)
    signs = torch.tensor([1.0, -1.0]).repeat(4)
    x[..., :: shape[-1] // 8] += 16.0 * signs
    return x


KEYS: dict[str, Callable[..., Tensor]] = {
    "N(0,1)": _normal,
    "t(3)": _student,
    "outliers": _outliers,
    "offsets": _offsets,
}


def error(scheme: str, draw: Callable[..., Tensor], center: bool) -> float:
    """The error of one format on one distribution of keys."""
    torch.manual_seed(0)
    options = {"center": True} if center else {}
    quant = {name: {"name": scheme, "options": options} for name in ("k", "v")}
    group = {"kind": "full", "layers": "0", "q_heads": Q_HEADS, "kv_heads": HEADS, "head_dim": DIM}
    model = {"name": "one layer", "num_layers": 1, "groups": {"full": group}}
    load = {"requests": 1, "tokens": TOKENS}
    spec = Spec.parse({"model": model, "kv": {"quant": quant}, "workload": load})
    cache = kvfactory.build(kvfactory.plan(spec))
    pool, _ = cache.pool(0)
    pool.set_constants(_calibrated(scheme, options, draw).values)
    k, v = draw(TOKENS, HEADS, DIM), torch.randn(TOKENS, HEADS, DIM)
    spread = (k - k.mean(0)).square().mean().sqrt()
    q = torch.randn(TOKENS, Q_HEADS, DIM) / spread
    step = cache.extend(cache.open(1), [TOKENS])
    out = cache.attend(0, q, k, v, step)
    work = cache.plan.groups[0].work
    assert isinstance(work, Attention)
    positions = torch.arange(TOKENS)
    want = dense_attention(q, k, v, visible_keys(work, positions, positions), work)
    return float((out - want).norm() / want.norm())


def _calibrated(scheme: str, options: dict[str, Any], draw: Callable[..., Tensor]) -> Constants:
    codec = resolve_codec(scheme, options, "benchmark")
    observed = {0: {"k": draw(4096, HEADS, DIM), "v": torch.randn(4096, HEADS, DIM)}}
    return kvfactory.calibrate(observed, {"k": codec, "v": codec})


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| format | " + " | ".join(f"{name} | center" for name in KEYS) + " |")
    print("|---" * (1 + 2 * len(KEYS)) + "|")
    for name in SCHEMES.names():
        scheme = SCHEMES.get(name, "format")
        if not {"k", "v"} <= scheme.roles:
            continue
        centered = issubclass(scheme.options, CenterOptions)
        cells = []
        for draw in KEYS.values():
            cells.append(f"{error(name, draw, False):.4f}")
            cells.append(f"{error(name, draw, True):.4f}" if centered else "")
        print(f"| `{name}` | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
