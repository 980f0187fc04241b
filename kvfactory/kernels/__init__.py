"""Triton kernels that move a pool's bytes, one launch each, whatever the layout and format."""

from kvfactory.kernels.errors import ErrorWords
from kvfactory.kernels.ops import TritonOps, kernel_ops

__all__ = ["ErrorWords", "TritonOps", "kernel_ops"]
