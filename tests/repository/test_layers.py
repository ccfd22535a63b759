"""Each layer imports only from those below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

VOCABULARY = "errors tokens config layout keys digest backend frame trace request prometheus"
LAYERS = (
    *("cli server", "bench simulate", "integrations", "testing", "engine", "connector"),
    *("backends", "transfer", "cache", "kernels", VOCABULARY),
)
"""From the top down; packages of one row do not import each other, but for the vocabulary."""

HEIGHT = {name: -row for row, names in enumerate(LAYERS) for name in names.split()}
FACADE = HEIGHT["engine"]
"""``kvconnect`` itself hands out the engine, so only what stands above that may import from it."""

APART = {("engine", "backends"), ("transfer", "cache")}
"""Layers that must not know each other although one stands above the other."""


def imported(source: str) -> Iterator[str]:
    """Every module that `source` imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "kvconnect":
                yield from (f"kvconnect.{alias.name}" for alias in node.names)
            elif node.module is not None:
                yield node.module


def violations(layer: str, source: str) -> list[str]:
    """What a module of `layer` imports and must not."""
    found = []
    for name in imported(source):
        top, _, rest = name.partition(".")
        if top in {"backends", "kernels"}:
            found.append(f"{name}: import it as kvconnect.{name}")
        if top != "kvconnect":
            continue
        target = rest.partition(".")[0]
        same = target == layer or (target in VOCABULARY.split() and layer in VOCABULARY.split())
        if (layer, target) in APART:
            found.append(f"{layer} must not know {name}")
        elif not same and HEIGHT.get(target, FACADE) >= HEIGHT[layer]:
            found.append(f"{layer} is not above {name}")
    return found


def modules(repository: Path) -> Iterator[tuple[str, Path]]:
    """Every module of the package and its layer."""
    for folder in ("kvconnect", "backends", "kernels"):
        for path in sorted((repository / folder).rglob("*.py")):
            parts = path.relative_to(repository).with_suffix("").parts
            if parts[0] == "kvconnect":
                parts = parts[1:]
            if parts[0] not in {"__init__", "__main__"}:
                yield parts[0], path


def test_every_module_belongs_to_a_layer(repository: Path):
    assert {layer for layer, _ in modules(repository)} <= set(HEIGHT)


def test_layers_import_only_downwards(repository: Path):
    wrong = {
        str(path.relative_to(repository)): found
        for layer, path in modules(repository)
        if (found := violations(layer, path.read_text(encoding="utf-8")))
    }
    assert not wrong


def test_the_package_itself_imports_only_the_vocabulary_when_it_is_imported(repository: Path):
    tree = ast.parse((repository / "kvconnect/__init__.py").read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    ours = {node.module for node in top if node.module.startswith("kvconnect")}
    assert ours <= {f"kvconnect.{name}" for name in VOCABULARY.split()}


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("cache", "from kvconnect.connector.data import RequestData"),
        ("cache", "def f():\n    import kvconnect.engine.llm"),
        ("errors", "from kvconnect.cache.tree import Tree"),
        ("engine", "from kvconnect.backends.disk.store import DiskBackend"),
        ("engine", "from kvconnect import LLM"),
        ("connector", "from kvconnect import engine"),
        ("bench", "from kvconnect.simulate import x"),
        ("connector", "import backends.memory"),
    ],
)
def test_an_import_upwards_or_sideways_is_found(layer, source):
    assert len(violations(layer, source)) == 1


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("connector", "from kvconnect.backends.registry import open_backend"),
        ("cli", "from kvconnect import LLM"),
        ("config", "from kvconnect.errors import nearest"),
        ("cache", "import torch, kvconnect.kernels.copy"),
    ],
)
def test_an_import_downwards_is_fine(layer, source):
    assert not violations(layer, source)
