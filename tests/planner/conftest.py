"""Fixtures of the planner tests."""

from __future__ import annotations

from typing import Any

import pytest
from planner_support import CONF, read_yaml


@pytest.fixture(scope="session")
def gemma() -> dict[str, Any]:
    """Gemma-3-27B: ten full layers, fifty-two with a window of 1,024."""
    return read_yaml(CONF / "model" / "gemma3_27b.yaml")
