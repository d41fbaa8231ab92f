"""Import directions of the design: who may import whom, checked on the syntax tree of every module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("lptctl", "engine", "plotting", "rdma_tests")
# Inside the engine a module may import its own layer and those to the left.
ENGINE_LAYERS = ("formats", "kernels", "lowp", "recipes", "trainer", "train")
TORCH_FREE = ("engine.strict", "engine.config", "engine.recipes.table")


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.append((name.removesuffix(".__init__"), path))
    return found


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; the project uses absolute ones"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def under(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def layer(name: str) -> int | None:
    parts = name.split(".")
    if parts[0] != "engine" or len(parts) < 2 or under(name, TORCH_FREE) or name == "engine.recipes":
        return None
    return ENGINE_LAYERS.index(parts[1]) if parts[1] in ENGINE_LAYERS else None


@pytest.mark.parametrize(("name", "path"), modules(), ids=[name for name, _ in modules()])
def test_module_imports_only_what_the_design_allows(name: str, path: Path) -> None:
    used = imports(path)
    forbidden: set[str] = set()
    top = name.split(".")[0]
    if top == "lptctl":
        forbidden = {
            u
            for u in used
            if under(u, ("torch", "rdma_tests"))
            or (under(u, ("engine",)) and u not in ("engine", "engine.recipes") and not under(u, TORCH_FREE[1:]))
        }
    elif top == "engine":
        forbidden = {u for u in used if under(u, ("lptctl", "plotting", "rdma_tests"))}
    elif top == "plotting":
        forbidden = {u for u in used if under(u, ("torch", "engine", "lptctl", "rdma_tests"))}
    elif top == "rdma_tests":
        forbidden = {u for u in used if under(u, ("lptctl", "engine", "plotting"))}
    assert not forbidden, f"{name} imports {sorted(forbidden)}"

    own = layer(name)
    if own is not None:
        above = {u for u in used if (layer(u) or 0) > own}
        assert not above, f"{name} imports from a later layer: {sorted(above)}"
    if under(name, ("engine.models",)):
        assert not {u for u in used if under(u, ("engine.lowp", "engine.formats", "engine.recipes"))}
    if under(name, TORCH_FREE):
        assert not {u for u in used if under(u, ("torch", "numpy"))}, f"{name} must stay torch-free"


def test_every_package_is_found() -> None:
    names = {name.split(".")[0] for name, _ in modules()}
    assert {"lptctl", "engine", "plotting"} <= names


def test_heavy_libraries_load_lazily_in_the_control_plane() -> None:
    for name, path in modules():
        if name.startswith("lptctl"):
            heavy = {
                u for u in imports(path, top_level_only=True) if under(u, ("plotting", "pandas", "matplotlib", "scipy"))
            }
            assert not heavy, f"{name} imports {sorted(heavy)} at module level"
