"""What ``device: auto`` means: this machine, as torch or the CUDA driver describes it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_GRANULE_BYTES = 2**21
_TIMEOUT_S = 10.0

# Run in a child, which may hang or die alone: a parent with an open driver could not be forked.
# nvidia-smi knows no number of multiprocessors, the driver does.
_ASK_DRIVER = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
def ask(name, *args):
    out = ctypes.c_int()
    assert getattr(cuda, name)(ctypes.byref(out), *args) == 0, name
    return out.value
assert cuda.cuInit(0) == 0
device = ask("cuDeviceGet", 0)
name = ctypes.create_string_buffer(256)
memory = ctypes.c_size_t()
assert cuda.cuDeviceGetName(name, 256, device) == 0
assert cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device) == 0
sms, major, minor = (ask("cuDeviceGetAttribute", a, device) for a in (16, 75, 76))
print(json.dumps([name.value.decode(), major * 10 + minor, sms, memory.value]))
"""


def resolve(device: Mapping[str, Any], found: Mapping[str, Any] | None) -> dict[str, Any]:
    """A device of type ``auto`` made concrete: what was ``found``, else this machine's CPU.

    Other keys given beside ``auto`` win over what was found.
    """
    given = {key: value for key, value in device.items() if key not in ("name", "type")}
    return {**(found or ask_cpu()), **given}


def ask_torch() -> dict[str, Any] | None:
    """The current CUDA device of torch, None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    sm = found.major * 10 + found.minor
    return _cuda(found.name, sm, found.multi_processor_count, found.total_memory)


def ask_driver() -> dict[str, Any] | None:
    """The first CUDA device that the driver shows, None without one; torch is not imported."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    command = [sys.executable, "-I", "-S", "-c", _ASK_DRIVER]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return _cuda(*json.loads(answer.stdout))


def ask_cpu() -> dict[str, Any]:
    """This machine's processor and its memory."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "name": "cpu",
        "type": "cpu",
        "sm": 0,
        "num_sms": 0,
        "memory_bytes": memory_bytes,
        "granule_bytes": _GRANULE_BYTES,
    }


def _cuda(name: str, sm: int, num_sms: int, memory_bytes: int) -> dict[str, Any]:
    return {
        "name": re.sub(r"[^A-Za-z0-9_.+-]+", "-", name),
        "type": "cuda",
        "sm": sm,
        "num_sms": num_sms,
        "memory_bytes": memory_bytes,
        "granule_bytes": _GRANULE_BYTES,
    }
