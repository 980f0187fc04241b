"""What all tests share."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # tensors here are tiny; a second thread only waits


@pytest.fixture(autouse=True)
def _equal_numbers() -> None:
    """Every test draws the same random numbers, whatever ran before it."""
    torch.manual_seed(0)
