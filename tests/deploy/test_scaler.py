"""Case 34: the numbers that KEDA gets from a live queue, and what it makes of them.

`ask` sends what KEDA's `redis` trigger sends (an EVAL that looks at the key's type, then counts),
as the user `scaler`; `replicas` is its arithmetic for `scalingModifiers`, as its documentation
and the horizontal pod autoscaler's have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import redis

from producer.server import EmbeddedServer
from tests.deploy.conftest import Manifest, the
from tests.deploy.test_acl import pool, server, url_of  # noqa: F401 - fixtures
from tests.integration.pool import QUEUE, Pool
from tests.integration.stepper import StepEngine

COUNT = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'zset' then return redis.call('ZCARD', KEYS[1]) end
return redis.call('LLEN', KEYS[1])
"""


@pytest.fixture
def spec(rendered: Callable[[str], list[Manifest]]) -> Manifest:
    found: Manifest = the(rendered("overlays/keda"), "ScaledObject", "rollq-worker")["spec"]
    return found


def ask(server: EmbeddedServer, spec: Manifest) -> dict[str, int]:  # noqa: F811
    """Trigger -> its number, over a connection made as KEDA makes it."""
    numbers = {}
    for trigger in spec["triggers"]:
        where = trigger["metadata"]
        key = where["listName"].replace("{default}", f"{{{QUEUE}}}")
        with redis.Redis.from_url(url_of(server, where["username"])) as client:
            assert client.ping()
            numbers[trigger["name"]] = int(client.eval(COUNT, 1, key))
    return numbers


def replicas(spec: Manifest, numbers: dict[str, int], now: int) -> int:
    """Workers that are wanted when the times to wait are over."""
    modifiers: dict[str, Any] = spec["advanced"]["scalingModifiers"]
    value = sum(numbers[name.strip()] for name in modifiers["formula"].split("+"))
    if value <= int(modifiers["activationTarget"]):
        return int(spec["minReplicaCount"])
    if now == 0:  # KEDA starts one, then hands over to the autoscaler
        return max(1, spec["minReplicaCount"])
    wanted = math.ceil(value / int(modifiers["target"]))
    return min(max(wanted, 1, spec["minReplicaCount"]), int(spec["maxReplicaCount"]))


async def test_what_workers_hold_keeps_them_and_what_waits_starts_them(
    server: EmbeddedServer,  # noqa: F811
    pool: Pool,  # noqa: F811
    spec: Manifest,
) -> None:
    assert ask(server, spec) == {"waiting": 0, "leased": 0}
    assert replicas(spec, ask(server, spec), now=1) == 0

    pool.submit(1)
    assert ask(server, spec) == {"waiting": 1, "leased": 0}
    assert replicas(spec, ask(server, spec), now=0) == 1

    engine = StepEngine(lambda request: 3)
    await pool.start(engine, name="a")
    pool.client.submit([[1, 2, 3]] * 2, ids=["more", "still-more"])
    await pool.in_engine(engine, 3)
    assert ask(server, spec) == {"waiting": 0, "leased": 3}
    assert replicas(spec, ask(server, spec), now=1) == 1

    engine.plan = lambda request: None
    engine.allow(10_000)
    await pool.groups(3)
    assert ask(server, spec) == {"waiting": 0, "leased": 0}


def test_workers_follow_the_load_up_to_the_limit(spec: Manifest) -> None:
    each, most = int(spec["advanced"]["scalingModifiers"]["target"]), spec["maxReplicaCount"]
    assert replicas(spec, {"waiting": each, "leased": 1}, now=1) == 2
    assert replicas(spec, {"waiting": 0, "leased": 3 * each}, now=3) == 3
    assert replicas(spec, {"waiting": 1_000_000, "leased": 0}, now=3) == most
    for trigger in spec["triggers"]:
        assert trigger["metadata"]["listLength"] == str(each)


def test_a_redis_that_is_away_takes_no_worker_away(spec: Manifest) -> None:
    """KEDA then multiplies the fallback with `target`; with 0 replicas it would scale to zero."""
    fallback = spec["fallback"]
    assert fallback["behavior"] == "currentReplicasIfHigher"
    assert fallback["replicas"] >= 1
    modifiers = spec["advanced"]["scalingModifiers"]
    assert modifiers["metricType"] == "AverageValue"
    assert int(modifiers["target"]) > 0
    assert "idleReplicaCount" not in spec


def test_one_worker_goes_at_a_time(
    spec: Manifest, rendered: Callable[[str], list[Manifest]]
) -> None:
    """Each drains; so what goes is handed back before the next one is told."""
    down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    (policy,) = down["policies"]
    pod = the(rendered("overlays/keda"), "Deployment", "rollq-worker")["spec"]["template"]["spec"]
    assert (policy["type"], policy["value"]) == ("Pods", 1)
    assert policy["periodSeconds"] > pod["terminationGracePeriodSeconds"]
