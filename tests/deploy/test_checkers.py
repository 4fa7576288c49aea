"""Every file of deploy/ passes the checker that is made for its kind."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy.conftest import DEPLOY, KUSTOMIZATIONS, Manifest, checked, tool

KEDA = json.loads((Path(__file__).parent / "keda.schema.json").read_text())
#: the oldest version still supported somewhere, and the newest that the checker knows
KUBERNETES = ("1.30", kubernetes_validate.latest_version())

YAML_FILES = sorted(
    p for p in (*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")) if "secrets" not in p.parts
)
SHELL_FILES = (DEPLOY / "slurm" / "worker.sbatch", DEPLOY / "redis" / "new-passwords.sh")


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_kubernetes_takes_every_object(
    rendered: Callable[[str], list[Manifest]], name: str, kubernetes: str
) -> None:
    objects = rendered(name)
    for found in objects:
        if found["apiVersion"].startswith("keda.sh/"):
            jsonschema.validate(found, KEDA)
        else:  # raises on an unknown kind, too
            kubernetes_validate.validate(found, kubernetes, strict=True)
    assert ("ScaledObject" in {o["kind"] for o in objects}) == ("keda" in name)


def test_compose_file_is_one() -> None:
    checked(
        *(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"),
        DEPLOY / "compose.yaml",
    )


def test_yaml_is_tidy() -> None:
    rules = {
        "extends": "default",
        "rules": {
            "line-length": "disable",
            "document-start": "disable",
            "braces": "disable",
            "truthy": {"check-keys": False},
            "comments-indentation": "disable",
        },
    }
    checked(sys.executable, "-m", "yamllint", "--strict", "-d", json.dumps(rules), *YAML_FILES)


@pytest.mark.parametrize("path", SHELL_FILES, ids=lambda p: p.name)
def test_shell_scripts(path: Path) -> None:
    checked(tool("shellcheck"), path)


def test_dockerfile() -> None:
    checked(tool("hadolint"), DEPLOY / "Dockerfile")


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a program in place of the one that an operator installs."""
    unit = tmp_path / "rollq-worker@.service"
    text = (DEPLOY / "systemd" / unit.name).read_text()
    unit.write_text(text.replace("/opt/rollq/bin/rollq", "/bin/true"))
    assert checked(tool("systemd-analyze"), "verify", unit) == ""


def test_prometheus_takes_rules_and_configuration() -> None:
    checked(tool("promtool"), "check", "rules", DEPLOY / "monitoring" / "rules.yml")
    checked(tool("promtool"), "check", "config", DEPLOY / "monitoring" / "prometheus.yml")


def test_alerts_fire_when_they_should_and_not_else(tmp_path: Path) -> None:
    text = (Path(__file__).parent / "alerts.yml").read_text()
    cases = tmp_path / "alerts.yml"
    cases.write_text(f"rule_files: [{DEPLOY / 'monitoring' / 'rules.yml'}]\n{text}")
    checked(tool("promtool"), "test", "rules", cases)
    tested = {r["alertname"] for t in yaml.safe_load(text)["tests"] for r in t["alert_rule_test"]}
    rules = yaml.safe_load((DEPLOY / "monitoring" / "rules.yml").read_text())
    assert tested == {r["alert"] for r in rules["groups"][0]["rules"]}


def test_prometheus_takes_each_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [q.replace("$queue", "default") for q in dashboard_queries()]
    rules = tmp_path / "queries.yml"
    rules.write_text(
        json.dumps(
            {
                "groups": [
                    {
                        "name": "q",
                        "rules": [
                            {"record": "q:q", "expr": q, "labels": {"n": str(n)}}
                            for n, q in enumerate(queries)
                        ],
                    }
                ]
            }
        )
    )
    assert f"{len(queries)} rules found" in checked(tool("promtool"), "check", "rules", rules)


def dashboard_queries() -> list[str]:
    board = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text())
    queries = [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    queries += [a["expr"] for a in board["annotations"]["list"]]
    assert len(queries) > 20
    assert all(re.search("rollq_", q) for q in queries)
    return queries
