"""Histories of whole caches use what histories of books use."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "books"))
