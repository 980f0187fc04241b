"""Warm-up: everything is compiled before an engine's loop, in threads."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from kvfactory.kernels.launch import Kernel

MOST_THREADS = 16


def warm_up(kernels: Iterable[Kernel]) -> None:
    """Compile and load ``kernels`` on the current device.

    Compilers run side by side: much of their work is outside of Python. Loading is for one thread,
    that which has the device's context.
    """
    wanted = list(kernels)
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        list(pool.map(Kernel.compile, wanted))
    for kernel in wanted:
        kernel.warm()
