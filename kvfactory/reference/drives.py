"""How each family drives the common recurrence: gates, decays and shared heads.

Projections, activations (softplus, sigmoid), L2 norms and output gates are the model's; what comes
here is what its recurrence sees. Leading dims are batch; ``n`` tokens. Key heads fewer than value
heads are shared by consecutive value heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfactory.reference.recurrence import Drive


def mamba1(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Drive:
    """Selective scan (Gu and Dao, arXiv:2312.00752); state axes channel, state.

    The output [..., n, channel, 1] lacks the skip term D * x.

    Args:
        x: input after the convolution, [..., n, channel].
        dt: step size, positive, [..., n, channel].
        a: negative, [channel, state].
        b: [..., n, state].
        c: [..., n, state].
    """
    channels = x.shape[-1]
    shared = (*b.shape[:-1], channels, b.shape[-1])
    return Drive(
        q=c.unsqueeze(-2).expand(shared),
        k=b.unsqueeze(-2).expand(shared),
        v=(dt * x).unsqueeze(-1),
        log_decay=dt.unsqueeze(-1) * a,
    )


def mamba2(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Drive:
    """State space duality (Dao and Gu, arXiv:2405.21060); state axes head, value, key.

    The output lacks the skip term D * x.

    Args:
        x: [..., n, head, value].
        dt: step size, positive, [..., n, head].
        a: negative, [head].
        b: [..., n, group, key]; consecutive heads share a group.
        c: [..., n, group, key].
    """
    heads = x.shape[-2]
    return Drive(
        q=_shared(c, heads),
        k=_shared(b, heads),
        v=dt.unsqueeze(-1) * x,
        log_decay=(dt * a).unsqueeze(-1),
    )


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, scale: float
) -> Drive:
    """Gated delta rule (Yang et al., arXiv:2412.06464), of Qwen3-Next; state head, key, value.

    Args:
        q: [..., n, key_head, key].
        k: [..., n, key_head, key], unit length.
        v: [..., n, head, value].
        log_decay: not positive, [..., n, head].
        beta: [..., n, head].
        scale: of q, usually key ** -0.5.
    """
    heads = v.shape[-2]
    return Drive(_shared(q, heads) * scale, _shared(k, heads), v, log_decay.unsqueeze(-1), beta)


def kimi_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, scale: float
) -> Drive:
    """Kimi delta attention (Kimi Linear, arXiv:2510.26692): a decay per key channel.

    Args:
        q: [..., n, key_head, key].
        k: [..., n, key_head, key], unit length.
        v: [..., n, head, value].
        log_decay: not positive, [..., n, head, key].
        beta: [..., n, head].
        scale: of q, usually key ** -0.5.
    """
    heads = v.shape[-2]
    return Drive(_shared(q, heads) * scale, _shared(k, heads), v, log_decay, beta)


def lightning(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, scale: float = 1.0) -> Drive:
    """Lightning attention (Qin et al., arXiv:2401.04658), of MiniMax-01; state head, key, value.

    Args:
        q: [..., n, head, key].
        k: [..., n, head, key].
        v: [..., n, head, value].
        slope: not negative, [head]: every token decays the state by exp(-slope).
        scale: of q.
    """
    log_decay = -slope.unsqueeze(-1).expand(*v.shape[:-1], 1)
    return Drive(q * scale, k, v, log_decay)


def _shared(x: Tensor, heads: int) -> Tensor:
    """``x`` [..., group, key] with every group repeated for its heads: [..., head, key]."""
    return torch.repeat_interleave(x, heads // x.shape[-2], -2)
