"""The shape of the code: who may import whom, who may spell a key, what is never used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("producer", "workers")

#: The modules of the engine adapter, the only ones that know vLLM.
VLLM_MODULES = "workers/engines/vllm"
CONTRACT_NEEDS = {"redis", "hiredis", "msgpack", "numpy"}
#: what a module of the contract imports when it is first needed, and not before
CONTRACT_MAY_NEED = {
    "producer/contract/rewards.py": {"rq"},
    "producer/contract/exposition.py": {"prometheus_client"},
}
UNSAFE = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
WALKS_ALL_KEYS = {"keys", "scan", "scan_iter"}
HEAVY = {"torch", "vllm", "transformers", "matplotlib", "rq", "prometheus_client"}
TOP_LEVEL = {
    *("producer", "workers", "tests", "deploy", ".ci"),
    *("pyproject.toml", "Makefile", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore"),
    *(".dockerignore", ".gitattributes", ".editorconfig", ".pre-commit-config.yaml"),
}


def git_files() -> list[str]:
    """Tracked files, and new ones that are not ignored."""
    return subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()


@cache
def sources(*folders: str) -> dict[str, ast.Module]:
    """Path -> syntax tree of every module under these folders."""
    found = {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_bytes())
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    assert found
    return found


def imports(path: str, tree: ast.Module) -> Iterator[str]:
    """Full names of all that a module imports, at any depth; `a.b` for `from a import b`."""
    package = path.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            parts = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*parts, alias.name]) for alias in node.names)


def importers(predicate_of: str, *folders: str) -> list[str]:
    """`path: name` for each import of the package `predicate_of` or of what is in it."""
    return [
        f"{path}: {name}"
        for path, tree in sources(*folders).items()
        for name in imports(path, tree)
        if f"{name}.".startswith(f"{predicate_of}.")
    ]


def test_the_producer_never_imports_the_workers() -> None:
    assert importers("workers", "producer") == []


def test_the_workers_take_only_the_contract_of_the_producer() -> None:
    taken = importers("producer", "workers")

    assert [line for line in taken if ": producer.contract." not in line] == []
    assert taken, "the walk finds imports"


def test_the_contract_needs_redis_hiredis_msgpack_numpy_and_nothing_else() -> None:
    # torch within a method that makes tensors: that it is not loaded is another test's matter.
    allowed = CONTRACT_NEEDS | sys.stdlib_module_names | {"torch"}
    strange = [
        f"{path}: {name}"
        for path, tree in sources("producer/contract").items()
        for name in imports(path, tree)
        if name.partition(".")[0] not in allowed | CONTRACT_MAY_NEED.get(path, set())
        and not name.startswith("producer.contract.")
    ]

    assert strange == []


def test_only_the_engine_adapter_imports_vllm() -> None:
    outside = [line for line in importers("vllm", *CODE) if not line.startswith(VLLM_MODULES)]

    assert outside == []
    assert {path.parent for path in (ROOT / "workers").rglob("vllm*.py")} <= {
        ROOT / "workers/engines"
    }


def test_only_one_module_spells_key_names() -> None:
    spelled = {
        f"{path}:{node.lineno}"
        for path, tree in sources(*CODE).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str | bytes)
        and node.value[:6] in ("rollq:", b"rollq:")
    }

    assert {line.partition(":")[0] for line in spelled} == {"producer/contract/keys.py"}, spelled


def test_no_lua_script_spells_a_key() -> None:
    spelled = [
        f"{path.name}: {line.strip()}"
        for path in sorted((ROOT / "producer/contract/lua").glob("*.lua"))
        for line in path.read_text().splitlines()
        if "rollq:" in line.partition("--")[0]
    ]

    assert spelled == []


@pytest.mark.parametrize("module", sorted(UNSAFE))
def test_nothing_pickles(module: str) -> None:
    assert importers(module, *CODE) == []


def test_nothing_walks_all_keys() -> None:
    called = [
        f"{path}:{node.lineno}"
        for path, tree in sources(*CODE).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and walks_all_keys(node)
    ]
    in_lua = [
        path.name
        for path in sorted((ROOT / "producer/contract/lua").glob("*.lua"))
        for quote in "'\""
        for command in ("KEYS", "SCAN")
        if f"call({quote}{command}{quote}" in path.read_text().upper().replace("CALL(", "call(")
    ]

    assert called == []
    assert in_lua == []


def walks_all_keys(call: ast.Call) -> bool:
    """A client's `scan()`, `keys("x")` or `execute_command("KEYS")`; a dict's `keys()` is none."""
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str | bytes):
        word = first.value if isinstance(first.value, str) else first.value.decode("latin-1")
        if word.upper() in ("KEYS", "SCAN"):
            return True
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in WALKS_ALL_KEYS:
        return False
    return call.func.attr != "keys" or bool(call.args or call.keywords)


@pytest.mark.parametrize("module", ["producer", "producer.cli", "producer.server", "workers"])
def test_importing_it_loads_nothing_heavy(module: str) -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", f"import sys, {module}; print(*sys.modules, sep='\\n')"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()

    assert module in loaded
    assert HEAVY & set(loaded) == set()


def test_nothing_else_lies_at_the_top() -> None:
    top = {name.partition("/")[0] for name in git_files()}

    assert top - TOP_LEVEL == set()
    assert {"producer", "workers", "tests"} <= top
