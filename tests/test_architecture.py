"""The architecture, enforced: one-way imports, torch-free planning, small files, public names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "kvfactory"

# From the ground up: a module imports from its own floor or below, never from above.
FLOORS: list[set[str]] = [
    {"errors", "dtypes", "kinds"},
    {"registry"},
    {"spec"},
    {"layouts", "quant", "memory"},
    {"planning.cacheplan", "books"},
    {"planning.geometry", "planning.storage", "planning.drafts", "backends.contract"},
    {f"backends.flashinfer.{name}" for name in ("choose", "partials", "sizes")},
    {"planning"},
    {"sizing"},
    {"planner"},
    {"pools", "calibration"},
    {"steps"},
    {"kernels", "reference", "states"},
    {"backends"},
    {"cache"},
    {"builder"},
    {"verify", "report", "replay"},
    {"config", "huggingface"},
    {"composer"},
    {"actions"},
    {"cli"},
    {"__main__", "__init__"},
]
TORCH_FREE = 10  # floors below this one never import torch at module level


def _floor(module: str) -> int:
    """The floor of ``module`` (dotted, without the package), the most specific name first."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        for number, names in enumerate(FLOORS):
            if name in names:
                return number
    raise AssertionError(f"{module} stands on no floor: add it to FLOORS")


def _modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found.append((name, path))
    return found


def _imports(tree: ast.AST, top_only: bool) -> Iterator[str]:
    """Absolute names of imported modules, those under TYPE_CHECKING left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if top_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node.module or ""
        else:
            yield from _imports(node, top_only)


@pytest.mark.parametrize(("module", "path"), _modules(), ids=[name for name, _ in _modules()])
def test_imports_point_down(module: str, path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = _floor(module)
    for name in _imports(tree, top_only=False):
        if name.startswith("kvfactory."):
            target = name.removeprefix("kvfactory.")
            assert _floor(target) <= own, f"{module} imports {target} from above"


def _light(module: str) -> bool:
    """Whether ``module`` may be loaded by planning: lower floors, and what the cli looks at."""
    if module.startswith("quant.device"):  # device functions, imported by kernels only
        return False
    if module.startswith("backends.flashinfer."):  # but for the lower floors, after the build
        return _floor(module) < TORCH_FREE
    return _floor(module) < TORCH_FREE or module.startswith(("backends", "actions.plan", "cli"))


LIGHT = [(name, path) for name, path in _modules() if _light(name)]


@pytest.mark.parametrize(("module", "path"), LIGHT, ids=[name for name, _ in LIGHT])
def test_planning_modules_import_no_torch(module: str, path: Path) -> None:
    for name in _imports(ast.parse(path.read_text(encoding="utf-8")), top_only=True):
        assert name.split(".")[0] not in {"torch", "triton", "flashinfer", "transformers"}


def test_no_probing() -> None:
    """No hasattr, no three-argument getattr, no environment variables."""
    for module, path in _modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "hasattr", module
                probing = node.func.id == "getattr" and len(node.args) == 3
                assert not probing or module in PROBING, module
            if isinstance(node, ast.Attribute) and node.attr == "environ":
                assert module in ENVIRONMENT, module


PROBING = {
    "registry",
    "spec.validation",
    "spec.model",
}  # a package's __path__, a type's __name__, union tags
ENVIRONMENT: set[str] = set()


def _data_files() -> list[Path]:
    """Every YAML file that is shipped."""
    found = [*PACKAGE.rglob("*.yaml"), *(PACKAGE.parent / "conf").rglob("*.yaml")]
    assert found
    return found


def test_no_target() -> None:
    """No code is named by data: Hydra's key for that stands in no YAML file and in no string."""
    for module, path in _modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant):
                assert not TARGET.search(str(node.value)), module
    for path in _data_files():
        assert not TARGET.search(path.read_text(encoding="utf-8")), path


TARGET = re.compile(r"\b_target_\b")


def test_files_stay_small() -> None:
    long = {
        module: lines
        for module, path in _modules()
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert not long


def test_plan_runs_where_torch_is_missing() -> None:
    """A finder that refuses heavy imports stands in for a machine without them."""
    script = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "triton", "flashinfer", "transformers"}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import kvfactory
spec = kvfactory.compose("model=gemma3_27b", "kv=fp8_hnd", "device=h200", "memory.budget=64GiB")
plan = kvfactory.plan(spec)
print(plan.limits.admitted)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) > 0


def test_public_names() -> None:
    import kvfactory

    assert sorted(kvfactory.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert vars(kvfactory).get(name) is not None or kvfactory.__getattr__(name) is not None


PUBLIC = {
    "BooksError",
    "BuildError",
    "Cache",
    "CachePlan",
    "CapabilityError",
    "KVFactoryError",
    "OutOfPages",
    "PlanError",
    "Problem",
    "Spec",
    "SpecError",
    "build",
    "calibrate",
    "compose",
    "plan",
}
