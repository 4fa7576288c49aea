"""What the tests of deploy/ share: a copy as an operator has it, the tools, what they render."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.waiting import DEADLINE_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = ("dev", "prod", "keda", "prod-keda", "tensor-parallel", "multi-queue")
KUSTOMIZATIONS = ("base", *(f"overlays/{name}" for name in OVERLAYS))

Manifest = dict[str, Any]


def tool(name: str) -> str:
    """Path of a checker, of this environment first; without it the test is skipped."""
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def checked(*command: str | Path) -> str:
    """Run a checker; what it found is the failure."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def deploy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """deploy/ after the steps that its files ask an operator for."""
    copy = tmp_path_factory.mktemp("checkout") / "deploy"
    shutil.copytree(DEPLOY, copy, ignore=shutil.ignore_patterns("secrets"))
    subprocess.run([copy / "redis" / "new-passwords.sh"], check=True)
    (copy / "kustomize" / "overlays" / "prod" / "ca.crt").write_text("a certificate\n")
    return copy


@pytest.fixture(scope="session")
def rendered(deploy: Path) -> Callable[[str], list[Manifest]]:
    """The objects of a kustomization, as `kubectl apply -k` would send them."""

    @cache
    def render(name: str) -> list[Manifest]:
        return list(
            yaml.safe_load_all(checked(tool("kubectl"), "kustomize", deploy / "kustomize" / name))
        )

    return render


def the(objects: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def workloads(objects: list[Manifest]) -> Iterator[Manifest]:
    yield from (o for o in objects if o["kind"] in ("Deployment", "StatefulSet"))


def container(workload: Manifest) -> Manifest:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    found: Manifest = only
    return found


def environment(objects: list[Manifest], workload: Manifest) -> dict[str, str]:
    """A container's environment as kubelet makes it: `envFrom` first, `$(NAME)` filled in."""
    values: dict[str, str] = {}
    for source in container(workload).get("envFrom", []):
        values |= the(objects, "ConfigMap", source["configMapRef"]["name"])["data"]
    for entry in container(workload).get("env", []):
        value = entry.get("value", f"<{entry['name']}>")
        for name, known in values.items():
            value = value.replace(f"$({name})", known)
        values[entry["name"]] = value
    return values
