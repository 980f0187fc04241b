"""A kernel that divides as the codecs do, beside the hardware's correctly rounded division."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfactory.quant.device import division

LONG, SHORT, PART, HARDWARE = range(4)


@triton.jit
def divide(x_ptr, s_ptr, out_ptr, n, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """[n] quotients: by two corrections, by one, as parts of 16, by the hardware."""
    spot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = spot < n
    x = tl.load(x_ptr + spot, mask=inside, other=1.0)
    scale = tl.load(s_ptr + spot, mask=inside, other=1.0)
    minus, unit, inverse = division.divisor(scale, FORM != 0)
    if FORM == 0:
        found = division.quotient(x * minus, unit, inverse, False)
    elif FORM == 1:
        found = division.quotient(x * minus, unit, inverse, True)
    elif FORM == 2:
        found = division.part(x * minus, unit * 16.0, inverse * 0.0625) * 16.0
    else:
        found = tl.div_rn(x, scale)
    tl.store(out_ptr + spot, found, mask=inside)


def quotients(x: Tensor, scale: Tensor, form: int) -> Tensor:
    """float32 [n] of float32 ``x`` and ``scale`` [n] on a GPU."""
    out = torch.empty_like(x)
    grid = (triton.cdiv(len(x), 1024),)
    divide[grid](x, scale, out, len(x), form, 1024, enable_fp_fusion=False)
    return out


def side(found: Tensor, wanted: Tensor) -> Tensor:
    """Whether ``found`` is on the side of, or at, the number of 8 bits nearest to ``wanted``.

    Every code of eight bits or fewer, and every midpoint of codes, is a number of 8 bits.
    """
    low = 0xFFFF
    near = ((wanted.view(torch.int32) + (low >> 1)) & ~low).view(torch.float32)
    return (found - near).sign()


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


def hard_short_dividends() -> tuple[Tensor, Tensor]:
    """Every dividend of 11 bits over every divisor within 64 ulps of a number of 8 bits.

    One correction leaves less than 2^-20 of an ulp. That could only move a quotient across a number
    m of 8 bits, or off it, where the quotient is that close to half an ulp beside m: where
    |a 2^k - b (2 m + 1)| is a few units of a long divisor b. As m and 2^k are multiples of 2^16,
    b is then within a few units of one, too.
    """
    near = torch.arange(2**7, 2**8, device="cuda") * 2**16
    scale = (near[:, None] + torch.arange(-64, 65, device="cuda")).flatten()
    scale = scale[scale >= 2**23]
    x = torch.arange(2**10, 2**11, device="cuda") * 2**13
    return x.repeat(len(scale)).float(), scale.repeat_interleave(len(x)).float()


def hard_short_divisors() -> tuple[Tensor, Tensor]:
    """Dividends within 8 ulps of products of an 11-bit divisor and a number of 8 bits."""
    scale = torch.arange(2**10, 2**11, device="cuda")
    near = scale[:, None] * torch.arange(2**7, 2**8, device="cuda")
    ulps = torch.arange(-8, 9, device="cuda")
    size = 2 ** (23 - near.float().log2().floor()).long()
    x = (near * size)[..., None] + ulps
    scale = (scale[:, None] * size)[..., None].expand_as(x)
    return x.flatten().float(), scale.flatten().float() * 2.0**7
