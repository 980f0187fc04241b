"""Causal depthwise convolutions with a window of past inputs as their state."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv(
    window: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
    window_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output [..., n, channel] of ``x``, and the window after it, like ``window``.

    One token or many: the last taps - 1 inputs are all that the next call needs. As in Mamba
    (arXiv:2312.00752); arithmetic is float32, or float64 for float64 inputs.

    Args:
        window: the inputs before ``x``, oldest first, [..., channel, taps - 1], or
            [..., taps - 1, channel] with ``window_first``; zeros for a fresh state.
        x: [..., n, channel].
        weight: [channel, taps], the last tap for the newest input.
        bias: [channel].
        silu: whether the output passes through x * sigmoid(x).
        window_first: which axis of ``window`` counts inputs.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    past = window if window_first else window.transpose(-2, -1)
    inputs = torch.cat([past.to(dtype), x.to(dtype)], -2)
    tokens, taps = x.shape[-2], weight.shape[-1]
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    for tap in range(taps):
        out = out + inputs.narrow(-2, tap, tokens) * weight[:, tap].to(dtype)
    if bias is not None:
        out = out + bias.to(dtype)
    if silu:
        out = torch.nn.functional.silu(out)
    kept = inputs.narrow(-2, tokens, taps - 1)
    return out, kept if window_first else kept.transpose(-2, -1)
