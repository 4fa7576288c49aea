"""What ends a worker in each place hands back what it holds: the image's entry point, the systemd
unit and the Slurm script, run with stand-ins that send the signals as the real ones do.

Each runs `rollq worker --engine sim`; another worker then finishes the samples.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from producer.server import EmbeddedServer, Prefer, start_embedded
from tests.deploy.conftest import DEPLOY, tool
from tests.integration.pool import QUEUE, ROOT, Pool, Process
from tests.servers import free_port, require_server
from tests.waiting import DEADLINE_S, async_wait_until, wait_until
from workers.engines.sim import SimEngine

#: slow enough never to end by themselves, and each token is stored at once
SIM = "token_rate=10,stream_interval=1"
ARGUMENTS = ["--engine", "sim", "--sim", SIM, "--checkpoint-tokens", "1"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """One kind: what is tried here are processes."""
    kind: Prefer = "path" if shutil.which("redis-server") else require_server("valkey")
    with start_embedded(tmp_path / "redis", prefer=kind) as server:
        yield server


@pytest.fixture
async def pool(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Pool]:
    (tmp_path / "pool").mkdir()
    pool = Pool(server.url, tmp_path / "pool", {})
    yield pool
    await pool.close()


class Started(Process):
    """A process with the environment that its keeper gives it, in a session of its own."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self._log = log
        with log.open("w") as file:
            self._popen = subprocess.Popen(
                command,
                cwd=ROOT,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def child(self) -> int:
        """The process that it started."""
        path = Path(f"/proc/{self._popen.pid}/task/{self._popen.pid}/children")
        return int(wait_until(path.read_text, "it started a process").split()[0])

    def send_group(self, number: signal.Signals) -> None:
        os.killpg(self._popen.pid, number)

    def close(self) -> None:
        if self.running:
            self.send_group(signal.SIGKILL)
            self._popen.wait()


@pytest.fixture
def started() -> Iterator[list[Started]]:
    processes: list[Started] = []
    yield processes
    for process in processes:
        process.close()


def worker_environment(pool: Pool, bin_directory: Path | None = None) -> dict[str, str]:
    path = [str(bin_directory or ""), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        "PATH": os.pathsep.join(filter(None, path)),
        "HOME": str(pool.directory),
        "ROLLQ_REDIS_URL": pool.url,
        "ROLLQ_QUEUE": QUEUE,
        "ROLLQ_WEIGHTS_DIR": str(pool.weights_dir),
        "PYTHONUNBUFFERED": "1",
    }


async def busy(pool: Pool, count: int = 4) -> None:
    """So many samples are with a worker, three tokens of each are stored, and one more waits."""
    pool.submit(count, max_tokens=1000)
    for sample in (f"g{i}/0" for i in range(count)):

        def stored(sample: str = sample) -> bool:
            rollout = pool.client.peek(sample)
            return rollout is not None and len(rollout.response_ids) >= 3

        await async_wait_until(stored, f"3 tokens of {sample} are stored")


async def handed_back(pool: Pool, count: int = 4) -> None:
    """Nothing is leased, every sample kept its tokens, and goes on with another worker."""
    status = pool.client.status()
    assert (status.ready, status.leased, status.workers) == (count, 0, ())
    assert status.stats["interrupted_drain"] == count
    await pool.start(SimEngine(), name="elsewhere")
    for group in await pool.groups(count):
        (rollout,) = group.rollouts
        first, second = rollout.segments
        assert (first.tokens >= 3, second.worker) == (True, "elsewhere")
        assert (rollout.crashes, rollout.interruptions) == (0, 1)


# the image


def entry_point(stage: str) -> list[str]:
    """ENTRYPOINT of a stage of the Dockerfile, or of the one that it is made from."""
    text = (DEPLOY / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM|\Z)", text, re.MULTILINE | re.DOTALL)
    bodies = {name: (base, body) for base, name, body in stages}
    base, body = bodies[stage]
    found = re.findall(r"^ENTRYPOINT (.*)$", body, re.MULTILINE)
    if not found:
        return entry_point(base)
    words: list[str] = json.loads(found[0])  # exec form, or this fails
    return words


def as_process_one(command: list[str]) -> list[str]:
    """In a pid namespace of its own, where an unhandled signal is ignored, as in a container."""
    command = [tool(command[0]), *command[1:]]
    for unshare in (["unshare"], ["unshare", "--user", "--map-root-user"]):
        enter = [*unshare, "--pid", "--fork", "--kill-child"]
        if subprocess.run([*enter, "true"], capture_output=True).returncode == 0:
            return [*enter, *command]
    pytest.skip("this machine lets nobody make a pid namespace")


def status(port: int, path: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE_S) as answer:
        code: int = answer.status
        return code


def probed() -> set[str]:
    """Paths that kubelet asks a worker for."""
    manifest = (DEPLOY / "kustomize" / "worker" / "worker.yaml").read_text()
    return {"/metrics", *re.findall(r"path: (/\w+)$", manifest, re.MULTILINE)}


@pytest.mark.parametrize("stage", ["worker", "worker-cpu"])
async def test_a_container_that_is_told_to_stop_hands_back(
    pool: Pool, started: list[Started], tmp_path: Path, stage: str
) -> None:
    """Case 35, with the image's own command line as process 1."""
    command = as_process_one([*entry_point(stage), "worker", *ARGUMENTS])
    port = free_port()
    environment = worker_environment(pool) | {"ROLLQ_METRICS_PORT": str(port)}
    started.append(Started(command, tmp_path / "worker.log", environment))
    await busy(pool)
    assert {p: await asyncio.to_thread(status, port, p) for p in probed()} == dict.fromkeys(
        probed(), 200
    )

    os.kill(started[0].child, signal.SIGTERM)

    assert started[0].ended() == 0, started[0].log()
    await handed_back(pool)


def test_a_container_that_still_waits_for_redis_stops_too(
    tmp_path: Path, started: list[Started]
) -> None:
    """It has nothing to hand back yet."""
    command = as_process_one([*entry_point("worker"), "worker", *ARGUMENTS])
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "ROLLQ_REDIS_URL": f"unix://{tmp_path}/nobody.sock",
    }
    started.append(Started(command, tmp_path / "worker.log", environment))
    wait_until(lambda: "Redis" in started[0].log(), "it says that it waits")

    os.kill(started[0].child, signal.SIGTERM)

    assert started[0].ended() == 0


# systemd


def unit() -> list[tuple[str, str]]:
    text = (DEPLOY / "systemd" / "rollq-worker@.service").read_text()
    lines = [line for line in text.splitlines() if line and line[0] not in "#["]
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


def as_systemd(instance: str, files: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment of the unit; `files` stand for EnvironmentFile's content."""
    settings = [(name, value.replace("%i", instance)) for name, value in unit()]
    environment: dict[str, str] = {}
    for name, value in settings:
        if name == "Environment":
            environment |= dict(word.split("=", 1) for word in shlex.split(value))
    environment |= files  # a file comes after Environment=
    (line,) = [value for name, value in settings if name == "ExecStart"]
    command = []
    for word in line.split():
        if word.startswith("${"):  # one argument, whatever is in it
            command.append(environment[word[2:-1]])
        elif word.startswith("$"):  # split at its spaces
            command += environment[word[1:]].split()
        else:
            command.append(word)
    return command, environment


async def test_systemd_stops_a_worker_that_hands_back(
    pool: Pool, started: list[Started], tmp_path: Path
) -> None:
    example = (DEPLOY / "systemd" / "worker.env").read_text().splitlines()
    files = dict(line.split("=", 1) for line in example if line and line[0] != "#")
    files |= {"FLAGS": " ".join(ARGUMENTS)} | worker_environment(pool)
    del files["ROLLQ_REDIS_PASSWORD_FILE"]
    command, environment = as_systemd("3", files)
    assert command[:3] == ["/opt/rollq/bin/rollq", "worker", "Qwen/Qwen3-8B"]
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["ROLLQ_METRICS_PORT"]) == ("3", "9473")
    command[0] = tool("rollq")
    started.append(Started(command, tmp_path / "worker.log", environment))
    await busy(pool)

    # KillMode=mixed: TERM to the main process, KILL to what is left of its group after the time.
    settings = dict(unit())
    assert (settings["KillMode"], settings.get("KillSignal", "SIGTERM")) == ("mixed", "SIGTERM")
    started[0].send(signal.SIGTERM)

    assert started[0].ended(float(settings["TimeoutStopSec"])) == 0, started[0].log()
    await handed_back(pool)


# Slurm


class Slurm:
    """Runs the script as slurmd does, with a `scontrol` that writes down what it is asked."""

    def __init__(self, pool: Pool, started: list[Started], directory: Path) -> None:
        self._requeued = directory / "requeued"
        bin_directory = directory / "bin"
        bin_directory.mkdir()
        (bin_directory / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {self._requeued}\n')
        (bin_directory / "scontrol").chmod(0o755)
        (bin_directory / "rollq").symlink_to(tool("rollq"))
        self._environment = worker_environment(pool, bin_directory)
        self._started = started
        self._log = directory / "slurm.log"

    def start(self, seconds_left: float) -> Started:
        script = DEPLOY / "slurm" / "worker.sbatch"
        environment = self._environment | {
            "SLURM_JOB_ID": "71",
            "SLURM_ARRAY_JOB_ID": "70",
            "SLURM_ARRAY_TASK_ID": "1",
            "SLURM_JOB_END_TIME": str(int(time.time() + seconds_left)),
        }
        self._started.append(Started(["bash", str(script), *ARGUMENTS], self._log, environment))
        return self._started[-1]

    def requeued(self) -> list[str]:
        return self._requeued.read_text().splitlines() if self._requeued.exists() else []


@pytest.fixture
def slurm(pool: Pool, started: list[Started], tmp_path: Path) -> Slurm:
    return Slurm(pool, started, tmp_path)


async def test_slurm_near_the_limit_drains_and_runs_the_task_again(
    pool: Pool, slurm: Slurm
) -> None:
    """`--signal=B:TERM@120`: to the shell alone; a second one must not cut the drain short."""
    job = slurm.start(seconds_left=120)
    await busy(pool)

    job.send(signal.SIGTERM)
    await async_wait_until(lambda: "drains" in job.log(), "its worker drains")
    job.send(signal.SIGTERM)

    assert job.ended() == 0, job.log()
    assert slurm.requeued() == ["requeue 70_1"]
    await handed_back(pool)


async def test_slurm_cancelled_drains_and_does_not_come_back(pool: Pool, slurm: Slurm) -> None:
    """`scancel` signals shell and worker together, long before the limit."""
    job = slurm.start(seconds_left=3000)
    await busy(pool)

    job.send_group(signal.SIGTERM)

    assert job.ended() == 0, job.log()
    assert slurm.requeued() == []
    await handed_back(pool)


async def test_slurm_keeps_the_exit_code_of_a_worker_that_failed(pool: Pool, slurm: Slurm) -> None:
    job = slurm.start(seconds_left=120)
    await busy(pool)

    os.kill(job.child, signal.SIGKILL)

    assert job.ended() == 128 + signal.SIGKILL
    assert slurm.requeued() == []
