"""What the benchmarks of ``move`` work on: pools of one group, slots as an engine gives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfactory.kernels import ErrorWords, TritonOps, kernel_ops
from kvfactory.planner import plan
from kvfactory.pools import GroupViews, group_views
from kvfactory.pools.constants import fill_defaults
from kvfactory.spec import Spec

HEADS, DIM, PAGE = 8, 128, 16


class Scene:
    """A pool of ``tokens`` tokens of 8 K/V heads x 128 in ``layers`` layers."""

    def __init__(self, layout: str, quant: str, tokens: int, layers: int = 4) -> None:
        torch.manual_seed(0)
        group = {
            "kind": "full",
            "layers": list(range(layers)),
            "q_heads": 32,
            "kv_heads": HEADS,
            "head_dim": DIM,
        }
        laid = plan(
            Spec.parse(
                {
                    "model": {"name": "bench", "num_layers": layers, "groups": {"full": group}},
                    "kv": {
                        "page_tokens": PAGE,
                        "quant": {"k": {"name": quant}, "v": {"name": quant}},
                        "layout": {"tokens": layout},
                    },
                    "workload": {"requests": 1, "tokens": tokens},
                }
            )
        )
        self.layers = layers
        arena = torch.zeros(laid.bytes, dtype=torch.uint8, device="cuda")
        self.views: GroupViews = group_views(laid.groups[0], arena)
        fill_defaults(self.views)
        made = kernel_ops(ErrorWords(["full"], arena.device))(self.views)
        assert isinstance(made, TritonOps)
        self.ops = made
        self.token_bytes = sum(
            plane.dtype.itemsize * plane[0, 0, 0].numel() for plane in self.views.planes.values()
        )


@dataclass(frozen=True)
class Entries:
    """Where ``tokens`` go: our slots, and the same for FlashInfer's append."""

    slots: Tensor
    batch_indices: Tensor
    positions: Tensor
    indices: Tensor
    indptr: Tensor
    last_page: Tensor


def entries(num_pages: int, tokens: int) -> Entries:
    """A prefill into shuffled pages, or up to 256 decodes, each in a page of its own."""
    if tokens <= 256:
        pages = torch.randperm(num_pages - 1)[:tokens] + 1
        offsets = torch.randint(0, PAGE, (tokens,))
        batch, positions, counts = torch.arange(tokens), offsets, torch.ones(tokens)
        last = offsets + 1
        slots = pages * PAGE + offsets
    else:
        pages = torch.randperm(num_pages - 1)[: tokens // PAGE] + 1
        positions = torch.arange(tokens)
        batch, counts = torch.zeros(tokens), torch.tensor([len(pages)])
        last = torch.tensor([PAGE])
        slots = pages[positions // PAGE] * PAGE + positions % PAGE
    indptr = torch.cat([torch.zeros(1), counts.cumsum(0)])
    ints = (x.int().cuda() for x in (batch, positions, pages, indptr, last))
    return Entries(slots.cuda(), *ints)


def rows(tokens: int) -> dict[str, Tensor]:
    """Fresh K and V, bfloat16 [tokens, heads, dim]."""
    return {
        name: torch.randn(tokens, HEADS, DIM, dtype=torch.bfloat16, device="cuda") for name in "kv"
    }


def copies(num_bytes: int, many: int) -> list[tuple[Tensor, Tensor]]:
    """``many`` pairs (destination, source) of half of ``num_bytes`` each: read + written."""
    half = max(16, num_bytes // 2)
    return [
        (
            torch.empty(half, dtype=torch.uint8, device="cuda"),
            torch.randint(0, 256, (half,), dtype=torch.uint8, device="cuda"),
        )
        for _ in range(many)
    ]
