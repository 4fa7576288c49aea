"""Fetching before the pause: by a process of its own, while the engine generates."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from producer import WeightsRejected
from producer.contract import digest
from producer.contract.errors import WeightsError
from producer.contract.manifest import MANIFEST, Manifest
from tests.integration.contract import Driver, heartbeat
from tests.integration.pool import Pool
from tests.integration.stepper import StepEngine, attempts
from tests.waiting import DEADLINE_S, async_wait_until, wait_until
from workers import fetch

Harm = Callable[[Path], object]


def readers() -> list[psutil.Process]:
    """The processes that read weights for this one."""
    found = []
    for child in psutil.Process().children():
        try:
            if digest.__file__ in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


async def reading(*before: int) -> psutil.Process:
    """A process that reads, and is none of those before."""

    def one() -> psutil.Process | None:
        return next((r for r in readers() if r.pid not in before), None)

    found = await async_wait_until(one, "a process reads")
    assert found is not None
    return found


def large(pool: Pool, size: int) -> Path:
    """Weights, all zeros, that take a second for each GB to be read; and no space."""
    path, _ = pool.write()
    file = pool.weights_dir / path / "model.safetensors"
    os.truncate(file, 0)
    os.truncate(file, size)
    wanted = digest.file_digest(file) if size < _ENDLESS else "0" * 32
    Manifest({file.name: (size, wanted)}).write(file.parent)
    return file.parent


_ENDLESS = 1 << 40


# the process


async def test_the_engine_generates_while_files_are_read(pool: Pool) -> None:
    """And nobody is held up: the reading gives way, and ends for a newer version."""
    engine = StepEngine(lambda r: 3)
    worker = await pool.start(engine)
    pool.submit()
    await pool.made(3)

    pool.client.publish_weights(large(pool, _ENDLESS))
    reader = await reading()
    await async_wait_until(lambda: reader.nice() > psutil.Process().nice(), "it gives way")
    engine.allow(2)
    await pool.made(5)
    assert (worker.state.phase, engine.paused) == ("serving", [])
    engine.plan = lambda r: None
    reader.suspend()  # it cannot end by itself now
    version = pool.publish()
    await pool.serving(version, worker)
    rollout = await pool.one()

    assert not reader.is_running()
    assert engine.loads == [version]
    assert [(s.version, s.tokens) for s in rollout.segments] == [(0, 5), (2, 3)]


async def test_publications_faster_than_the_files_can_be_read_do_not_stop_the_pool(
    pool: Pool,
) -> None:
    """One that was begun in place of another is read to its end and loaded."""
    engine = StepEngine()
    worker = await pool.start(engine)
    second = large(pool, 1 << 27)
    pool.client.publish_weights(large(pool, _ENDLESS))
    first = await reading()
    pool.client.publish_weights(second)
    reader = await reading(first.pid)
    reader.suspend()
    pool.publish()
    await async_wait_until(lambda: worker.state.current == 3, "it knows of the third")

    assert not first.is_running()
    assert reader.is_running()
    reader.resume()
    await pool.serving(3, worker)
    assert engine.loads == [2, 3]


async def test_small_files_need_no_process(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await pool.start(StepEngine())
    monkeypatch.setattr(digest, "__file__", "/nowhere")

    await pool.update(worker)


async def test_the_process_ends_with_its_worker(pool: Pool) -> None:
    worker = await pool.start(StepEngine())
    pool.client.publish_weights(large(pool, _ENDLESS))
    reader = await reading()

    assert await worker.drain() == 0

    await async_wait_until(lambda: not reader.is_running(), "it has ended")


@pytest.mark.parametrize("moment", ["as it starts", "as it reads"])
async def test_whoever_ends_a_reading_in_a_hurry_waits_for_its_process(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A worker that ends cancels its tasks again and again; nothing of the process is left."""
    started = asyncio.Event()
    processes: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def starts(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        started.set()
        processes.append(await start(*command, **options))
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", starts)
    worker = await pool.start(StepEngine())
    (updating,) = [t for t in worker.worker._tasks if "Updater.run" in repr(t)]
    pool.client.publish_weights(large(pool, _ENDLESS))
    await started.wait()
    if moment == "as it reads":
        await reading()

    while not updating.done():
        updating.cancel()
        await asyncio.sleep(0)

    assert updating.cancelled()
    assert [t for t in asyncio.all_tasks() if "/fetch.py" in repr(t)] == []
    assert all(process.returncode is not None for process in processes)
    processes.clear()
    gc.collect()  # what was left open says so, which is an error here


@contextmanager
def reader_of(*paths: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process, once it runs."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", digest.__file__, *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        mine = psutil.Process().nice()
        wait_until(lambda: psutil.Process(child.pid).nice() > mine, "it runs")
        yield child


def test_the_process_ends_with_a_killed_parent(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with reader_of(tmp_path / "pipe") as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(DEADLINE_S) == 1


def test_the_process_goes_on_after_a_ctrl_c(tmp_path: Path) -> None:
    """It goes to the whole process group; the worker decides."""
    os.mkfifo(tmp_path / "pipe")
    with reader_of(tmp_path / "pipe") as child:
        child.send_signal(signal.SIGINT)
        os.close(os.open(tmp_path / "pipe", os.O_WRONLY))
        assert child.wait(DEADLINE_S) == 0
        assert child.stdout is not None
        assert json.loads(child.stdout.read()) == [digest.file_digest(Path(os.devnull))]


def test_the_process_says_each_file_s_digest_or_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"weights")
    paths = [tmp_path / "a", tmp_path / "none", tmp_path]

    with subprocess.Popen(
        [sys.executable, "-I", "-S", digest.__file__, *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        said = json.loads(child.stdout.read())

    assert said == [
        digest.file_digest(tmp_path / "a"),
        {"errno": 2, "error": "No such file or directory"},
        {"errno": 21, "error": "Is a directory"},
    ]


def test_the_process_loads_nothing_but_the_standard_library() -> None:
    """So that it is there at once, beside a busy engine."""
    code = f"import runpy, sys; runpy.run_path({digest.__file__!r}); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()

    assert {name.partition(".")[0] for name in loaded} <= sys.stdlib_module_names | {"__main__"}


# what the user sees of files that are not as they should be


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def change(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(b"x" * len(file.read_bytes()))


def vanish(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


def without_its_files(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def no_manifest(directory: Path) -> None:
    (directory / MANIFEST).write_text("{")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (truncate, "{file} has 8 bytes, its manifest says 9"),
        (change, "{file} does not have the digest of its manifest"),
        (vanish, "{directory}/rollq-manifest.json cannot be read: No such file or directory"),
        (without_its_files, "{file} cannot be read: No such file or directory"),
        (
            no_manifest,
            "{directory}/rollq-manifest.json is not a manifest: Expecting property name enclosed"
            " in double quotes: line 1 column 2 (char 1)",
        ),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
@pytest.mark.parametrize("small", [fetch._SMALL, 0], ids=["by a thread", "by a process"])
async def test_files_that_are_not_as_published_are_named(
    pool: Pool, harm: Harm, words: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the engine is touched: it goes on, and the publisher is told."""
    monkeypatch.setattr(fetch, "_SMALL", small)
    engine = StepEngine(attempts(3))
    worker = await pool.start(engine, name="a", fetch_seconds=0)
    pool.submit()
    await pool.made(3)
    path, _ = pool.write()
    directory = pool.weights_dir / path
    said = words.format(directory=directory, file=directory / "model.safetensors")
    manifest = Manifest.read(directory)
    harm(directory)

    with pytest.raises(WeightsRejected) as caught:
        await publish(pool, path, manifest)

    assert str(caught.value) == f"version 1 could not be loaded, the pool serves 0: a: {said}"
    assert caught.value.reasons == {"a": said}
    assert worker.state.last_error == f"version 1: {said}"
    assert engine.paused == []
    status = pool.client.status()
    assert (status.current, status.last_good, status.weights["1:state"]) == (0, 0, "bad")
    assert worker.state.updates_failed == 1
    engine.allow(5)
    assert (await pool.one()).versions.tolist() == [0] * 8


async def publish(pool: Pool, path: str, manifest: Manifest) -> None:
    """A directory as it is, of which this manifest was true; wait for what becomes of it."""
    pool.client._publisher.send(
        pool.weights_dir,
        {
            "digest": manifest.digest,
            "path": path,
            "step": 0,
            "policy": "requeue",
            "deadline_ms": 0,
            "max_updating": "50%",
        },
        False,
    )
    await asyncio.to_thread(pool.client.wait_for_version, 1)


async def test_weights_of_another_model_are_refused_before_the_pause(pool: Pool) -> None:
    """What vLLM says of missing tensors and other shapes is tested on vLLM."""
    engine = StepEngine(attempts(3))

    def check(directory: Path) -> None:
        raise WeightsError(f"{directory} is not of step: missing lm_head.weight")

    engine.check = check  # type: ignore[method-assign]
    worker = await pool.start(engine, name="a")
    pool.submit()
    await pool.made(3)
    with pytest.raises(WeightsRejected, match=r"a: .* is not of step: missing lm_head\.weight$"):
        await asyncio.to_thread(pool.publish, wait="all")

    assert (engine.paused, worker.state.version) == ([], 0)
    engine.allow(5)
    await pool.one()


async def test_a_directory_that_vanishes_as_it_is_loaded_ends_the_worker(
    pool: Pool, driver: Driver
) -> None:
    """Its engine may hold half of it; the sample goes on elsewhere, blamed for nothing."""
    driver.send(heartbeat("another"))
    engine = StepEngine(attempts(3))
    engine.load_gate.clear()
    worker = await pool.start(engine, name="a")
    pool.submit()
    await pool.made(3)
    engine.fail_loads = {1: "cannot read model.safetensors: No such file or directory"}
    pool.publish()
    await async_wait_until(lambda: worker.state.phase == "updating", "it loads")
    engine.load_gate.set()

    assert await worker.ended() == 1
    words = "loading version 1 failed: cannot read model.safetensors: No such file or directory"
    assert worker.state.failure == words
    driver.queue.call("leave", worker="another")
    pool.client.cancel(["g0"])
    assert (await pool.one()).crashes == 0


# what a worker says of its updates


async def test_a_worker_says_how_long_each_part_of_an_update_took(
    pool: Pool, driver: Driver
) -> None:
    engine = StepEngine()
    worker = await pool.start(engine, name="a")
    before = driver.redis.hgetall(driver.keys.worker("a"))
    assert b"update_idle_ms" not in before
    engine.load_gate.clear()
    pool.publish()
    await async_wait_until(lambda: worker.state.phase == "updating", "it loads")
    engine.load_gate.set()
    await pool.serving(1, worker)
    await pool.update(worker)

    def fields() -> dict[str, int]:
        found = driver.redis.hgetall(driver.keys.worker("a"))
        return {k.decode(): int(v) for k, v in found.items() if k.startswith(b"update")}

    await async_wait_until(lambda: fields().get("updates") == 2, "it says so")
    said = fields()
    parts = [f"update_{part}_ms" for part in ("pause", "load", "reset", "resume")]
    assert set(said) == {"updates", "updates_failed", "update_idle_ms", "update_close_ms", *parts}
    assert abs(said["update_idle_ms"] - sum(said[part] for part in parts)) <= 2
    assert (said["updates"], said["updates_failed"]) == (2, 0)


async def test_a_read_that_never_ends_does_not_keep_the_process() -> None:
    assert await fetch._in_thread(lambda: threading.current_thread().daemon)
    with pytest.raises(WeightsError, match="torn"):
        await fetch._in_thread(_torn)


def _torn() -> None:
    raise WeightsError("torn")
