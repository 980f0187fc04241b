"""Bad input and what stderr must say of it: one line, ``path: got ..., need ...; try ...``."""

from __future__ import annotations

from typing import NamedTuple


class Bad(NamedTuple):
    """Overrides, and what the line about ``path`` must contain in each of its parts."""

    arguments: str
    path: str
    got: str
    need: str
    fix: str = ""

    def answered(self, said: str) -> bool:
        """Whether a line of ``said`` answers."""
        head = f"{self.path}: got "
        lines = [line for line in said.splitlines() if line.startswith(head)]
        return any(self._fits(line.removeprefix(head)) for line in lines)

    def _fits(self, line: str) -> bool:
        got, _, rest = line.partition(", need ")
        need, _, fix = rest.partition("; try ")
        return self.got in got and self.need in need and self.fix in fix
