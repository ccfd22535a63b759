"""Each layer imports only from those below it, each room only through its doors."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

VOCABULARY = (
    "address errors redaction text quantities tokens settings retention cache_options config layout"
    " keys shards digest backend frame trace otel request traced_request"
    " sampling_params prometheus user_cache pace overlap explain weak"
)
LAYERS = (
    *("cli", "server", "bench simulate", "operations", "integrations", "testing", "engine"),
    "events",
    "connector",
    *("backends", "transfer", "cache", "kernels", VOCABULARY),
)
"""From the top down; packages of one row do not import each other, but for the vocabulary."""

HEIGHT = {name: -row for row, names in enumerate(LAYERS) for name in names.split()}
FACADE = HEIGHT["engine"]
"""``kvconnect`` itself hands out the engine, so only what stands above that may import from it."""

APART = {("engine", "backends"), ("transfer", "cache")}
"""Layers that must not know each other although one stands above the other."""

STORE = "backends.url backends.lanes backends.entries backends.quotas"
CONTRACT = "connector.scheduler connector.worker connector.data connector.stream"
TRANSFER = "transfer.transport transfer.pull transfer.reads transfer.regions transfer.local"
DOORS = {
    "backends.guard": "backends.url backends.lanes kernels.quantized_payload",
    "backends.host": STORE,
    "backends.memory": f"{STORE} backends.host",
    "backends.nixl": f"{STORE} backends.host transfer",
    "backends.disk": f"{STORE} backends.disk.files",
    "backends.disk.files": "backends.lanes backends.disk.errors",
    "backends.redis": STORE,
    "backends.s3": STORE,
    "backends.tiered": "backends.url backends.lanes backends.guard backends.registry",
    "connector.ranks": "connector.data",
    "connector.runtime": f"{CONTRACT} connector.ranks.communicator cache.resource_manager",
    "connector.disagg": f"{CONTRACT} connector.disagg.fetch connector.io.lookup transfer",
    "connector.disagg.fetch": (
        f"{CONTRACT} connector.disagg.messages connector.io.lookup transfer"
    ),
    "connector.io": "connector.data backends kernels",
    "connector.pair": f"{CONTRACT} connector.io connector.disagg kernels",
    "connector.offload": "connector.pair",
    "transfer.tcp": f"{TRANSFER} transfer.acceptor transfer.seal transfer.secret",
    "transfer.nixl": TRANSFER,
    "cache.tree": "",
    "cache.memory": "kernels",
    "cache.pool": "cache.tree cache.memory",
    "cache.sequence": "cache.tree cache.memory cache.pool cache.resource_manager",
    "cache.admission": "cache.tree cache.memory cache.pool cache.sequence",
    "kernels.blocks": "",
    "kernels.host": "kernels.blocks",
    "kernels.cuda.compile": "",
    "kernels.cuda": "kernels.blocks kernels.cuda.compile",
    "digest": "",
    "events": "cache.pool.events",
    "engine.checkpoint": "engine.model engine.request.tokenizer",
    "transfer.control": "transfer.acceptor transfer.seal transfer.secret",
    "transfer.leases": "transfer.control.messages transfer.control.keyed transfer.control.endpoint",
    "engine.model": "kernels cache.resource_manager",
    "engine.request": "engine.model engine.sampling.drafts",
    "engine.ranks": "engine.model engine.checkpoint engine.attachment connector cache",
    "integrations.core": "connector kernels backends",
    "integrations.transformers": (
        "integrations.core engine.model engine.checkpoint.hub_cache engine.attachment"
        " engine.at_exit connector kernels"
    ),
    "integrations.sglang": "integrations.core engine.at_exit connector kernels",
    "integrations.trtllm": "integrations.core engine.at_exit connector kernels",
    "integrations.trtllm_shim": "engine connector cache",
    "integrations.vllm": "integrations.core connector kernels",
    "integrations.vllm_tier": (
        "integrations.core integrations.vllm.identity integrations.vllm.callers "
        "integrations.vllm.weights connector backends kernels"
    ),
    "engine.sampling": "",
    "operations": (
        "backends.entries backends.guard backends.main_loop backends.registry backends.url digest"
        " connector.io.identity engine.checkpoint.hub_cache engine.llm engine.request"
    ),
    "server": "engine.llm engine.request operations server.http server.openai server.page",
    "server.http": "server.admission server.errors server.settings",
    "server.openai": "engine.llm engine.request",
    "server.page": (
        "engine.checkpoint.hub_cache engine.request operations server.admission server.errors"
        " server.http server.settings"
    ),
    "server.route": (
        "events server.admission server.errors server.http server.openai.kv_transfer"
        " server.settings"
        " server.trust"
    ),
}
"""What each room may import besides itself and the vocabulary; a package stands for all in it."""


@cache
def import_lines(source: str) -> list[ast.Import | ast.ImportFrom]:
    return [
        one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Import | ast.ImportFrom)
    ]


def imported(source: str) -> Iterator[str]:
    """Every module that `source` imports anywhere, also inside functions."""
    for node in import_lines(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
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


def room_of(name: str) -> str | None:
    """The innermost room of `DOORS` that the module `name` (without ``kvconnect.``) is in."""
    while name and name not in DOORS:
        name = name.rpartition(".")[0]
    return name or None


def closed_doors(name: str, targets: Iterator[str] | set[str]) -> list[str]:
    """What of `targets` the module `name` must not import, all without ``kvconnect.``."""
    room = room_of(name)
    if room is None:
        return []
    open_to = [room, *DOORS[room].split(), *VOCABULARY.split()]
    return [
        target
        for target in sorted(targets)
        if room_of(target) != room
        and not any(target == door or target.startswith(f"{door}.") for door in open_to[1:])
    ]


@cache
def graph(repository: Path) -> Mapping[str, set[str]]:
    """For each module those that it imports, also in functions and for types; no ``kvconnect.``."""
    sources = {
        ".".join(path.relative_to(repository).with_suffix("").parts).removeprefix(
            "kvconnect."
        ): path
        for _, path in modules(repository)
    }
    names = {name.removesuffix(".__init__"): path for name, path in sources.items()}
    found: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for target in imported_names(path.read_text(encoding="utf-8")):
            whole = target.removeprefix("kvconnect.")
            module = whole if whole in names else whole.rpartition(".")[0]
            if module in names and module != name:
                found[name].add(module)
    return found


def imported_names(source: str) -> Iterator[str]:
    """Every module or name of one that `source` imports, whole."""
    for node in import_lines(source):
        inside = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        yield from (f"{inside}{alias.name}" for alias in node.names)


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; none if there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


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


def test_rooms_import_only_through_their_doors(repository: Path):
    wrong = {
        name: found
        for name, targets in graph(repository).items()
        if (found := closed_doors(name, targets))
    }
    assert not wrong


def test_no_modules_import_each_other(repository: Path):
    assert not circle(graph(repository))


def test_every_door_leads_to_a_room_that_is_there(repository: Path):
    names = set(graph(repository)) | {"kernels"}
    assert set(DOORS) <= names
    assert {door for doors in DOORS.values() for door in doors.split()} <= names


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("backends.disk.save", "backends.redis.save"),
        ("backends.s3.find", "backends.guard.calls"),
        ("backends.guard.store", "backends.disk.store"),
        ("connector.pair.worker", "connector.runtime.manager"),
        ("connector.io.load", "connector.pair.messages"),
        ("connector.runtime.ledger", "connector.pair.messages"),
        ("cache.tree.segment", "cache.pool.block_pool"),
        ("kernels.blocks.work", "kernels.cuda.launch"),
        ("kernels.cuda.compile.sources", "kernels.cuda.launch"),
    ],
)
def test_a_closed_door_is_found(name, target):
    assert closed_doors(name, {target, "errors", f"{room_of(name)}.other"}) == [target]


def test_a_circle_is_found():
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
    assert not circle({"a": {"b"}, "b": set()})


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
