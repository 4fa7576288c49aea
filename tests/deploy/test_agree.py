"""The files of deploy/ agree with the code and with each other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from producer.contract import metrics
from producer.contract.connection import DEFAULTS
from producer.contract.keys import NAMES, QueueKeys
from producer.contract.url import PASSWORD_FILE
from producer.exporter import metrics as exporter
from producer.rewards.allowed import MODULES
from tests.deploy.conftest import (
    DEPLOY,
    KUSTOMIZATIONS,
    ROOT,
    Manifest,
    container,
    environment,
    the,
    workloads,
)
from tests.deploy.test_acl import roles
from tests.deploy.test_checkers import dashboard_queries
from workers.cli import worker

Render = Callable[[str], list[Manifest]]

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
#: that are no options of a command
OTHER_VARIABLES = {PASSWORD_FILE, MODULES, "ROLLQ_REWARDS_URL"}
#: of the files themselves
OWN_VARIABLES = {"ROLLQ_ENV", "ROLLQ_TAG"}

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "Mi": 1 << 20, "Gi": 1 << 30}


def size(text: str) -> int:
    """Bytes of `4gb`, `6g` or `6Gi`."""
    found = re.fullmatch(r"(\d+)(Mi|Gi|[kmg]?)b?", text)
    assert found, f"{text} is no size"
    return int(found[1]) * UNITS[found[2]]


def config() -> dict[str, str]:
    lines = (DEPLOY / "redis" / "redis.conf").read_text().splitlines()
    pairs = (line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    return dict(pairs)


# names


def test_every_variable_is_one_that_the_code_reads() -> None:
    options = {
        p.envvar or f"ROLLQ_{str(p.name).upper()}"
        for command in (worker, exporter)
        for p in command.params
        if isinstance(p, click.Option)
    }
    files = [p for p in DEPLOY.rglob("*") if p.is_file() and "secrets" not in p.parts]
    assert len(files) > 25
    used = {
        (name, path.name)
        for path in files
        for name in re.findall(r"\bROLLQ_[A-Z_]+\b", path.read_text())
    }
    assert {(n, p) for n, p in used if n not in options | OTHER_VARIABLES | OWN_VARIABLES} == set()


def test_every_key_is_spelled_as_the_code_does() -> None:
    files = [*DEPLOY.rglob("*.y*ml"), DEPLOY / "OPERATIONS.md"]
    spelled = {
        found
        for path in files
        if "secrets" not in path.parts
        for found in re.findall(r"rollq:\{(\w+)\}:(\w+)", path.read_text())
    }
    assert {("default", "ready"), ("default", "leases")} <= spelled
    names = {name.rstrip(":") for name in NAMES.values()}
    assert {key for _, key in spelled} <= names


def test_every_metric_exists_with_its_labels() -> None:
    known = {m.name: m for m in (*metrics.WORKER, *metrics.POOL)}
    series = {s: m for s, m in known.items() if m.type != "histogram"} | {
        f"{m.name}_{end}": m
        for m in known.values()
        if m.type == "histogram"
        for end in ("bucket", "count", "sum")
    }
    rules = yaml.safe_load((DEPLOY / "monitoring" / "rules.yml").read_text())
    queries = dashboard_queries() + [r["expr"] for r in rules["groups"][0]["rules"]]
    target = {"instance", "le"}
    for query in queries:
        for name, selector in re.findall(r"\b(rollq_\w+)(?:\{([^}]*)\})?", query):
            assert name in series, f"{name} in {query}"
            labels = set(re.findall(r"(\w+)\s*=", selector))
            assert labels <= {*series[name].labels}, f"{name}{{{selector}}}"
        every = set().union(*({*series[n].labels} for n in re.findall(r"rollq_\w+", query)))
        for grouped in re.findall(r"(?:by|on|group_left) \(([^)]*)\)", query):
            assert set(re.findall(r"\w+", grouped)) <= every | target, query


def test_operations_has_each_alert() -> None:
    rules = yaml.safe_load((DEPLOY / "monitoring" / "rules.yml").read_text())
    headings = set(re.findall(r"^### (\w+)", (DEPLOY / "OPERATIONS.md").read_text(), re.MULTILINE))
    assert {r["alert"] for r in rules["groups"][0]["rules"]} == {
        h for h in headings if h.startswith("Rollq")
    }


# times


def drain_seconds(grace: float) -> float:
    """What `rollq worker` takes at most: a claim on its way has a third of the grace time."""
    return grace * 4 / 3


def graces(rendered: Render) -> dict[str, tuple[float, float]]:
    """Where -> seconds for a drain, seconds until a KILL."""
    found = {}
    for name in KUSTOMIZATIONS:
        for workload in workloads(rendered(name)):
            values = environment(rendered(name), workload)
            if "ROLLQ_GRACE_SECONDS" in values:
                found[f"{name}/{workload['metadata']['name']}"] = (
                    float(values["ROLLQ_GRACE_SECONDS"]),
                    workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
                )
    for name in ("worker-0", "worker-1", "worker-cpu"):
        found[name] = (
            float(SERVICES[name]["environment"]["ROLLQ_GRACE_SECONDS"]),
            float(SERVICES[name]["stop_grace_period"].removesuffix("s")),
        )
    unit = (DEPLOY / "systemd" / "rollq-worker@.service").read_text()
    sbatch = (DEPLOY / "slurm" / "worker.sbatch").read_text()
    found["systemd"] = (
        float(re.findall(r"ROLLQ_GRACE_SECONDS=(\d+)", unit)[0]),
        float(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]),
    )
    found["slurm"] = (
        float(re.findall(r"ROLLQ_GRACE_SECONDS:-(\d+)", sbatch)[0]),
        float(re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", sbatch, re.MULTILINE)[0]),
    )
    return found


def test_a_drain_fits_into_the_time_before_a_kill_and_leases_outlive_neither(
    rendered: Render,
) -> None:
    found = graces(rendered)
    assert len(found) == 13
    for where, (grace, kill) in found.items():
        assert drain_seconds(grace) + 20 <= kill, where  # and the engine's end
        assert DEFAULTS["lease_ms"] / 1000 < kill, where


def test_a_grader_may_end_before_it_is_killed(rendered: Render) -> None:
    pod = the(rendered("base"), "Deployment", "rollq-rewards")["spec"]["template"]["spec"]
    limit = DEFAULTS["grade_ms"] / 1000
    assert limit < pod["terminationGracePeriodSeconds"]
    assert limit < float(SERVICES["rewards"]["stop_grace_period"].removesuffix("s"))


def test_scaling_down_is_slower_than_a_start(rendered: Render) -> None:
    objects = rendered("overlays/keda")
    probe = container(the(objects, "Deployment", "rollq-worker"))["startupProbe"]
    budget = probe["periodSeconds"] * probe["failureThreshold"]
    spec = the(objects, "ScaledObject", "rollq-worker")["spec"]
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert budget == 45 * 60
    assert spec["cooldownPeriod"] > budget
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] > budget
    deployment = the(objects, "Deployment", "rollq-worker")["spec"]
    assert "replicas" not in deployment
    assert deployment["progressDeadlineSeconds"] > budget


# places


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_ports_volumes_users_and_selectors_fit(rendered: Render, name: str) -> None:
    objects = rendered(name)
    for workload in workloads(objects):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        selector = workload["spec"]["selector"]["matchLabels"]
        assert selector.items() <= labels.items()
        others = [w for w in workloads(objects) if w is not workload]
        for other in others:
            assert not selector.items() <= other["spec"]["template"]["metadata"]["labels"].items()
        pod = workload["spec"]["template"]["spec"]
        main = container(workload)
        assert {m["name"] for m in main["volumeMounts"]} <= {
            *(v["name"] for v in pod.get("volumes", [])),
            *(c["metadata"]["name"] for c in workload["spec"].get("volumeClaimTemplates", [])),
        }
        assert the(objects, "ServiceAccount", pod["serviceAccountName"])
        for volume in pod.get("volumes", []):
            if "secret" in volume:
                assert the(objects, "Secret", volume["secret"]["secretName"])
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert the(objects, "PersistentVolumeClaim", claim)
        assert main["securityContext"]["readOnlyRootFilesystem"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert re.fullmatch(r"[a-z-]+:\d+\.\d+[\w.-]*", main["image"]), "pinned by version"
        values = environment(objects, workload)
        annotations = workload["spec"]["template"]["metadata"].get("annotations", {})
        if port := values.get("ROLLQ_METRICS_PORT"):
            assert annotations["prometheus.io/port"] == port
            assert values["ROLLQ_METRICS_HOST"] == "0.0.0.0", (
                "kubelet and Prometheus come from outside"
            )
            assert main["ports"] == [{"name": "metrics", "containerPort": int(port)}]
        if url := values.get("ROLLQ_REDIS_URL"):
            assert "$" not in url
            role = re.match(r"\w+://(\w+)[:@]", url)
            assert role
            assert role[1] in roles()
            assert f"rollq-redis-{role[1]}" in json.dumps(workload), "its own password"


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_a_pod_has_one_disruption_budget(rendered: Render, name: str) -> None:
    """Kubernetes evicts no pod that has two."""
    objects = rendered(name)
    budgets = [
        o["spec"]["selector"]["matchLabels"] for o in objects if o["kind"] == "PodDisruptionBudget"
    ]
    for workload in workloads(objects):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        count = sum(b.items() <= labels.items() for b in budgets)
        assert count == (labels["app.kubernetes.io/component"] == "worker")


def test_prometheus_and_network_policies_know_the_ports(rendered: Render) -> None:
    scraped = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yml").read_text())
    pool, workers = scraped["scrape_configs"]
    assert pool["static_configs"] == [{"targets": ["exporter:9465"]}]
    (found,) = workers["dns_sd_configs"]
    assert {*found["names"]} == {n for n in SERVICES if n.startswith("worker")}
    for name in found["names"]:
        assert SERVICES[name]["environment"]["ROLLQ_METRICS_PORT"] == str(found["port"])
    assert SERVICES["exporter"]["environment"]["ROLLQ_METRICS_PORT"] == "9465"
    objects = rendered("base")
    (rule,) = the(objects, "NetworkPolicy", "rollq-metrics")["spec"]["ingress"]
    assert [p["port"] for p in rule["ports"]] == [found["port"], 9465]
    (rule,) = the(objects, "NetworkPolicy", "rollq-redis")["spec"]["ingress"]
    assert f":{rule['ports'][0]['port']}" in the_config(objects)["REDIS_ADDRESS"]
    prod = rendered("overlays/prod")
    port = the(prod, "NetworkPolicy", "rollq-rewards")["spec"]["egress"][1]["ports"][0]["port"]
    assert the_config(prod)["REDIS_ADDRESS"].endswith(f":{port}")


def the_config(objects: list[Manifest]) -> dict[str, str]:
    (found,) = [o for o in objects if o["kind"] == "ConfigMap" and "REDIS_SCHEME" in o["data"]]
    data: dict[str, str] = found["data"]
    return data


def test_every_secret_that_compose_mounts_is_made(deploy: Path) -> None:
    for name, secret in COMPOSE["secrets"].items():
        assert (deploy / secret["file"]).stat().st_mode & 0o777 == 0o644
        users = [s for s in SERVICES.values() if name in s.get("secrets", [])]
        assert users
        for service in users:
            values = service["environment"]
            assert values[PASSWORD_FILE] == f"/run/secrets/{name}"
            assert f"//{name}@" in values["ROLLQ_REDIS_URL"]
    assert (deploy / "redis" / "secrets").stat().st_mode & 0o777 == 0o700


def test_redis_has_room_to_rewrite_its_log(rendered: Render) -> None:
    full = size(config()["maxmemory"])
    assert size(SERVICES["redis"]["mem_limit"]) >= 1.5 * full
    for name in ("base", "overlays/dev"):
        workload = the(rendered(name), "StatefulSet", "rollq-redis")
        (claim,) = workload["spec"]["volumeClaimTemplates"]
        main = container(workload)
        arguments = main["args"]
        if "--maxmemory" in arguments:
            full = size(arguments[arguments.index("--maxmemory") + 1])
        assert size(main["resources"]["limits"]["memory"]) >= 1.5 * full
        assert size(claim["spec"]["resources"]["requests"]["storage"]) >= 3 * full


def test_graders_are_started_as_the_readme_says(rendered: Render) -> None:
    readme = (ROOT / "README.md").read_text()
    command = re.search(r"rq (worker -c \S+) \\\n +(--serializer \S+)", readme)
    assert command
    words = f"{command[1]} {command[2]}".split()
    assert container(the(rendered("base"), "Deployment", "rollq-rewards"))["args"] == words
    assert SERVICES["rewards"]["command"] == words


def test_gpus_and_ranks_are_equal_in_number(rendered: Render) -> None:
    for name in KUSTOMIZATIONS:
        main = container(the(rendered(name), "Deployment", "rollq-worker"))
        gpus = main["resources"]["limits"].get("nvidia.com/gpu", 0)
        ranks = [a.partition("=")[2] for a in main["args"] if "tensor-parallel-size" in a]
        assert (str(gpus), main["image"]) in (
            ("0", "rollq-worker-cpu:0.1.0"),
            (ranks[0] if ranks else "1", "rollq-worker:0.1.0"),
        )


def test_images_are_those_that_the_dockerfile_makes(rendered: Render) -> None:
    stages = re.findall(r"^FROM \S+ AS (\S+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    used = {s["image"].partition(":")[0] for s in SERVICES.values()}
    for name in KUSTOMIZATIONS:
        used |= {container(w)["image"].partition(":")[0] for w in workloads(rendered(name))}
    ours = {image.removeprefix("rollq-") for image in used if image.startswith("rollq-")}
    assert ours == {"worker", "worker-cpu", "tools"}
    assert ours <= {*stages}
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    for path in (DEPLOY / "compose.yaml", *(DEPLOY / "kustomize").rglob("kustomization.yaml")):
        tags = re.findall(r"(?:newTag: |ROLLQ_TAG:-)([\d.]+)", path.read_text())
        assert {*tags} <= {version[1]}, path


@pytest.mark.parametrize("name", ["overlays/keda", "overlays/prod-keda"])
def test_the_scaler_looks_where_the_workers_work(rendered: Render, name: str) -> None:
    """Case 34: TLS and the scaler's own user reach its configuration."""
    objects = rendered(name)
    spec = the(objects, "ScaledObject", "rollq-worker")["spec"]
    workload = the(objects, "Deployment", spec["scaleTargetRef"]["name"])
    values = environment(objects, workload)
    keys = QueueKeys(values["ROLLQ_QUEUE"])
    host, _, port = the_config(objects)["REDIS_ADDRESS"].partition(":")
    encrypted = the_config(objects)["REDIS_SCHEME"] == "rediss"
    assert encrypted == name.startswith("overlays/prod")
    for trigger, key in zip(spec["triggers"], ("ready", "leases"), strict=True):
        where = trigger["metadata"]
        # KEDA runs in another namespace, so it needs the whole name of a service here.
        within = "" if "." in host else ".rollq.svc"
        assert where["address"] == f"{host}{within}:{port}"
        assert where["listName"] == keys[key]
        assert where["enableTLS"] == str(encrypted).lower()
        assert where["username"] in roles()
        login = the(objects, "TriggerAuthentication", trigger["authenticationRef"]["name"])
        needed = {"password": f"rollq-redis-{where['username']}"}
        needed |= {"ca": "rollq-redis-ca"} if encrypted else {}
        references = login["spec"]["secretTargetRef"]
        assert {r["parameter"]: r["name"] for r in references} == needed
        for reference in references:
            assert reference["key"] in the(objects, "Secret", reference["name"])["data"]
