"""Linear recurrences over a state S [head, key, value], as one rule with and without the delta.

    S <- exp(log_decay) * S              per head, or per (head, key)
    u  = v, or beta * (v - k S)          the delta rule removes what k already recalls
    S <- S + k u^T
    o  = q S

Mamba-1, Mamba-2, gated delta, Kimi delta and lightning attention are this rule with different
``Drive``s; see ``drives``. ``scan`` goes token by token and is the definition; ``chunk`` computes
the same in blocks of tokens: the decays between any two tokens of a block, one triangular solve for
u, one update of the state (Yang et al., Gated Delta Networks, arXiv:2412.06464).

Arithmetic is float32 (float64 for float64 drives). States are stored with their axes in any order;
``axes`` names it, and results come back in it. Nothing is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_TOKENS = 16

AXES = ("head", "key", "value")


@dataclass(frozen=True)
class Drive:
    """What drives the recurrence over n tokens; leading dims, if any, are batch.

    ``q``, ``k`` [..., n, head, key], ``v`` [..., n, head, value], ``log_decay`` [..., n, head, key]
    or [..., n, head, 1], never positive, ``beta`` [..., n, head] or None for no delta rule.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Tokens n."""
        return self.v.shape[-3]

    def to(self, dtype: torch.dtype) -> Drive:
        """The drive in ``dtype``."""
        return Drive(
            q=self.q.to(dtype),
            k=self.k.to(dtype),
            v=self.v.to(dtype),
            log_decay=self.log_decay.to(dtype),
            beta=None if self.beta is None else self.beta.to(dtype),
        )

    def part(self, start: int, stop: int) -> Drive:
        """Tokens ``start:stop``."""

        def cut(x: Tensor, dim: int) -> Tensor:
            return x.narrow(dim, start, stop - start)

        beta = None if self.beta is None else cut(self.beta, -2)
        return Drive(
            q=cut(self.q, -3),
            k=cut(self.k, -3),
            v=cut(self.v, -3),
            log_decay=cut(self.log_decay, -3),
            beta=beta,
        )


def scan(state: Tensor, axes: tuple[str, ...], drive: Drive) -> tuple[Tensor, Tensor]:
    """n tokens one by one: output [..., n, head, value] and the state after them.

    Args:
        state: [..., *axes], any float type.
        axes: a permutation of head, key and value, or channel and state for Mamba-1.
        drive: of the n tokens.
    """
    return _run(state, axes, drive, _sequential)


def chunk(state: Tensor, axes: tuple[str, ...], drive: Drive) -> tuple[Tensor, Tensor]:
    """n tokens in blocks: what ``scan`` returns, up to rounding."""
    return _run(state, axes, drive, _blocked)


Core = Callable[[Tensor, Drive], tuple[Tensor, Tensor]]


def _run(state: Tensor, axes: tuple[str, ...], drive: Drive, core: Core) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(drive.v.dtype, torch.float32)
    order = _order(axes, state.dim())
    s = state.to(dtype)
    if len(axes) == 2:
        s = s.unsqueeze(-1)
    out, s = core(s.permute(order), drive.to(dtype))
    s = s.permute([order.index(dim) for dim in range(len(order))])
    return out, s.squeeze(-1) if len(axes) == 2 else s


def _order(axes: tuple[str, ...], dims: int) -> list[int]:
    """The permutation that brings a stored state to [..., head, key, value]."""
    known = {"channel": "head", "state": "key"}
    names = [known.get(axis, axis) for axis in axes]
    if len(axes) == 2:
        names.append("value")
        dims += 1
    assert sorted(names) == sorted(AXES), f"axes {axes} of a recurrent state"
    batch = list(range(dims - 3))
    return batch + [dims - 3 + names.index(axis) for axis in AXES]


def _sequential(s: Tensor, drive: Drive) -> tuple[Tensor, Tensor]:
    outs = []
    for token in range(drive.tokens):
        q, k, v, log_decay = (
            x.select(-3, token) for x in (drive.q, drive.k, drive.v, drive.log_decay)
        )
        s = s * log_decay.exp()[..., None]
        if drive.beta is not None:
            recalled = torch.einsum("...hk,...hkv->...hv", k, s)
            v = (v - recalled) * drive.beta.select(-2, token)[..., None]
        s = s + k[..., None] * v[..., None, :]
        outs.append(torch.einsum("...hk,...hkv->...hv", q, s))
    return (torch.stack(outs, -3) if outs else torch.zeros_like(drive.v)), s


def _blocked(s: Tensor, drive: Drive) -> tuple[Tensor, Tensor]:
    outs = []
    for start in range(0, drive.tokens, BLOCK_TOKENS):
        out, s = _block(s, drive.part(start, min(start + BLOCK_TOKENS, drive.tokens)))
        outs.append(out)
    return (torch.cat(outs, -3) if outs else torch.zeros_like(drive.v)), s


def _block(s: Tensor, drive: Drive) -> tuple[Tensor, Tensor]:
    """One block. Legend: i, j tokens of it, h head, k key, v value; dims are [..., h, i, k]."""
    q, k, u, log_decay = (x.transpose(-3, -2) for x in (drive.q, drive.k, drive.v, drive.log_decay))
    total = log_decay.cumsum(-2)
    since = total[..., :, None, :] - total[..., None, :, :]
    # Before exp: a future token's decay would overflow, and inf * 0 is not 0.
    later = torch.ones(drive.tokens, drive.tokens, dtype=torch.bool, device=s.device).triu(1)
    between = since.masked_fill(later[..., None], -torch.inf).exp()
    if drive.beta is not None:
        beta = drive.beta.transpose(-2, -1)[..., None]
        u = beta * (u - torch.einsum("...ik,...kv->...iv", k * total.exp(), s))
        overlap = beta * _between(k, k, between).tril(-1)
        one = torch.eye(drive.tokens, dtype=s.dtype, device=s.device)
        u = torch.linalg.solve_triangular(one + overlap, u, upper=False, unitriangular=True)
    out = torch.einsum("...ik,...kv->...iv", q * total.exp(), s) + _between(q, k, between) @ u
    to_end = (total[..., -1:, :] - total).exp()
    s = s * total[..., -1, :].exp()[..., None] + (k * to_end).transpose(-2, -1) @ u
    return out.transpose(-3, -2), s


def _between(left: Tensor, right: Tensor, between: Tensor) -> Tensor:
    """left_i . (decay from j to i * right_j), [..., h, i, j]."""
    if between.shape[-1] == 1:
        return (left @ right.transpose(-2, -1)) * between[..., 0]
    return torch.einsum("...ik,...jk,...ijk->...ij", left, right, between)
