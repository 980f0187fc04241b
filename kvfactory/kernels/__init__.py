"""Triton kernels that move a pool's bytes, one launch each, whatever the layout and format."""

from kvfactory.kernels.errorwords import ErrorWords
from kvfactory.kernels.fused import FusedWrites
from kvfactory.kernels.ops import TritonOps, kernel_ops
from kvfactory.kernels.warm import warm_up

__all__ = ["ErrorWords", "FusedWrites", "TritonOps", "kernel_ops", "warm_up"]
