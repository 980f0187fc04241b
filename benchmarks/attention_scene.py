"""A cache on the GPU with random contents, sequences of any length in it, and FlashInfer bound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvfactory.backends import AttentionRunner, Resources
from kvfactory.backends.flashinfer import FlashInferBackend
from kvfactory.backends.flashinfer.bind import bind
from kvfactory.backends.flashinfer.calls import Library
from kvfactory.backends.flashinfer.library import installed
from kvfactory.backends.flashinfer.runner import Runner
from kvfactory.books import Books
from kvfactory.books.shape import books_shape
from kvfactory.cache import Cache
from kvfactory.cache.parts import Parts
from kvfactory.kernels import ErrorWords, kernel_ops
from kvfactory.kernels.index import IndexBuild
from kvfactory.planner import plan
from kvfactory.pools import Pool
from kvfactory.spec import Spec
from kvfactory.steps.buffers import StepBuffers

Q_HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
CHUNK = 32768
LIBRARY: list[Library] = []


class Scene:
    """One group of ``layers`` layers; ``sm`` below 90 takes the kernels of older cards."""

    def __init__(
        self,
        requests: int,
        tokens: int,
        layers: int,
        quant: str = "plain",
        accuracy: str = "exact",
        sm: int = 90,
        q_heads: int = Q_HEADS,
    ) -> None:
        torch.manual_seed(0)
        self.layers, self.quant, self.q_heads = layers, quant, q_heads
        laid = plan(Spec.parse(self._spec(requests, tokens, accuracy, sm)))
        arena = torch.zeros(laid.bytes, dtype=torch.uint8, device="cuda")
        ops = kernel_ops(ErrorWords(["full"], arena.device))
        self.pool = Pool(laid.groups[0], arena, ops)
        self._randomize()
        self.buffers = StepBuffers(laid, arena, IndexBuild(laid, arena))
        runners = self._runners(laid, arena)
        runner = runners["full"]
        assert isinstance(runner, Runner)
        self.runner = runner
        self.cache = Cache(
            Parts(
                plan=laid,
                arena=arena,
                books=Books(books_shape(laid)),
                pools={"full": self.pool},
                runners=runners,
                buffers=self.buffers,
            )
        )

    def _spec(self, requests: int, tokens: int, accuracy: str, sm: int) -> dict[str, Any]:
        group = {
            "kind": "full",
            "layers": list(range(self.layers)),
            "q_heads": self.q_heads,
            "kv_heads": KV_HEADS,
            "head_dim": DIM,
        }
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        return {
            "model": {"name": "bench", "num_layers": self.layers, "groups": {"full": group}},
            "kv": {"page_tokens": PAGE, "quant": {"k": self.quant, "v": self.quant}},
            "device": {"name": "gpu", "type": "cuda", "sm": sm, "num_sms": sms},
            "backend": {"name": "flashinfer", "accuracy": accuracy},
            "engine": {"prefill_chunk_tokens": CHUNK},
            "workload": {"requests": requests, "tokens": tokens},
        }

    def _runners(self, laid: Any, arena: Tensor) -> Mapping[str, AttentionRunner]:
        if not LIBRARY:
            LIBRARY.append(installed())
        spaces = {w.use: arena[w.offset : w.offset + w.num_bytes] for w in laid.workspaces}
        served = FlashInferBackend().served(laid.groups, laid.spec)
        return bind(served, Resources(laid, {"full": self.pool}, spaces), LIBRARY[0])

    def _randomize(self) -> None:
        for index in range(self.layers):
            for view in self.pool.views(index).values():
                for part in view.split(4096):  # type: ignore[no-untyped-call]
                    part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.bfloat16))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def filled(self, count: int, tokens: int) -> list[Any]:
        """``count`` sequences of ``tokens`` tokens, whose values are whatever the pages hold."""
        sequences = self.cache.open(count)
        at_once = max(1, CHUNK // max(tokens, 1))
        for first in range(0, count, at_once):
            some = sequences[first : first + at_once]
            for start in range(0, tokens, CHUNK):
                step = self.cache.extend(some, min(CHUNK, tokens - start))
                self.cache.commit(step)
        return sequences

    def kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, [pages, slots, heads, dim]."""
        views = self.pool.views(layer)
        return views["k"], views["v"]

    def free(self) -> None:
        """Give the memory back to the next scene."""
        del self.cache, self.pool, self.buffers, self.runner
        torch.cuda.empty_cache()
