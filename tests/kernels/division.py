"""A kernel that divides as the codecs do, beside the hardware's correctly rounded division."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfactory.quant.device import division


@triton.jit
def divide(x_ptr, s_ptr, out_ptr, n, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """[2, n] quotients: the codecs' (FORM 0), the hardware's (FORM 1)."""
    spot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = spot < n
    x = tl.load(x_ptr + spot, mask=inside, other=1.0)
    scale = tl.load(s_ptr + spot, mask=inside, other=1.0)
    if FORM == 0:
        minus, unit, inverse = division.divisor(scale, False)
        found = division.quotient(x * minus, unit, inverse, False)
    else:
        found = tl.div_rn(x, scale)
    tl.store(out_ptr + spot, found, mask=inside)


def quotients(x: Tensor, scale: Tensor) -> Tensor:
    """float32 [2, n] of float32 ``x`` and ``scale`` [n] on a GPU."""
    out = torch.empty(2, len(x), device=x.device)
    for form in range(2):
        grid = (triton.cdiv(len(x), 1024),)
        divide[grid](x, scale, out[form], len(x), form, 1024, enable_fp_fusion=False)
    return out


def pairs(number: int, n: int) -> tuple[Tensor, Tensor]:
    """Dividends and divisors in which roundings are close calls.

    0: all divisors of one binade, 1: bfloat16 values over scales made from them, 2: mantissas just
    below the next power of two, 3: small and large divisors.
    """

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (n,), device="cuda").float()

    x = whole(2**23, 2**24) * 2.0 ** torch.randint(-6, 3, (n,), device="cuda")
    if number == 0:
        return x, (torch.arange(n, device="cuda") % 2**23 + 2**23).float()
    if number == 1:
        by = torch.tensor([448.0, 127.0, 2688.0], device="cuda")[
            torch.randint(3, (n,), device="cuda")
        ]
        return whole(128, 256) * 2.0 ** torch.randint(-8, 1, (n,), device="cuda"), whole(
            128, 256
        ) / by
    if number == 2:
        return 2.0**24 - whole(1, 4096), 2.0**24 - whole(1, 64)
    power = 2.0 ** torch.randint(-120, 90, (n,), device="cuda").float()
    return x * power, whole(2**23, 2**24) * power
