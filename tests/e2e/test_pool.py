"""The main job on real parts: two worker processes with vLLM, real weight files, a real Redis.

Nothing is simulated here; the workers are `rollq worker` processes, as a user starts them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from producer import Rollout, RolloutClient, SamplingParams
from producer.contract.errors import WeightsRejected
from producer.contract.keys import QueueKeys
from producer.server import start_embedded
from tests.tiny import make_llama
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

QUEUE = "e2e"
_RUNS = 16
LEASE_MS = 10_000
CHECKPOINT_TOKENS = 32
#: enough tokens for an idle machine to be in the middle of them when an update comes
LONG = 900
#: and of several updates, one worker after the other
LONGER = 1400
PROMPTS = [[1, 5 + i, 20 + i, 7] for i in range(32)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)


class Pool:
    """A server, a model, a client, and worker processes."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self.url = url
        self.model = make_llama(directory / "model")
        self.weights: dict[int, dict[str, Any]] = {0: _copy(self.model)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (directory / "weights").mkdir()
        self.client = RolloutClient(
            url, QUEUE, weights_dir=directory / "weights", limits={"lease_ms": LEASE_MS}
        )

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "producer.cli", "worker", str(self.directory / "model")]
        command += ["--redis", self.url, "--queue", QUEUE, "--name", name]
        command += ["--weights-dir", str(self.directory / "weights")]
        command += ["--checkpoint-tokens", str(CHECKPOINT_TOKENS)]
        command += ["--dtype", "float32", "--max-model-len", "2048"]
        with (self.directory / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            )

    def serving(self, *names: str) -> bool:
        for name in names:
            if self.processes[name].poll() is not None:
                log = (self.directory / f"{name}.log").read_text(errors="replace")
                pytest.fail(f"worker {name} ended:\n{log[-3000:]}")
        states = {w.name: w.state for w in self.client.status().workers}
        return all(states.get(name) in ("serving", "updating") for name in names)

    def publish(self, change: Callable[[Any], None] | None = None, policy: str = "requeue") -> int:
        if change is not None:
            self.model.load_state_dict(self.weights[0])
            change(self.model)
        version = self.client.publish_weights(self.model, force=True, policy=policy)
        self.weights[version] = _copy(self.model)
        return version

    def collect(self, ids: Sequence[str]) -> list[Rollout]:
        """The rollouts of these groups, in the order of `ids`."""
        by_id = {}
        for batch in self.client.batches(len(ids), timeout=300):
            by_id.update((g.id, g.rollouts) for g in batch)
        return [r for i in ids for r in by_id[i]]

    def run_under_updates(
        self,
        params: SamplingParams,
        change: Callable[[Any], None] | None,
        enough: Callable[[list[Rollout]], bool],
        policy: str = "requeue",
    ) -> list[Rollout]:
        """Rollouts of all prompts with publications in between; again, until `enough` of them
        met one: a machine that stalls may be through with all before it looks."""
        assert params.max_tokens is not None
        for _ in range(_RUNS):
            before = self.made()
            ids = self.client.submit(PROMPTS, params)
            for share in (0.1, 0.3, 0.5):
                at = before + int(share * len(ids) * params.n * params.max_tokens)
                wait_until(lambda at=at: self.made() >= at, f"{at} tokens were made", 300)
                self.client.wait_for_version(self.publish(change, policy), workers=2)
            rollouts = self.collect(ids)
            if enough(rollouts):
                return rollouts
        pytest.fail(f"in {_RUNS} runs too few samples were in flight when an update came")

    def made(self) -> int:
        """Response tokens that the pool ever stored."""
        return self.client.status().stats.get("tokens", 0)

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(300)
        self.client.close()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    directory = tmp_path_factory.mktemp("pool")
    # Not what is tested here, and a busy disk would stall all of it.
    with start_embedded(directory / "redis", appendonly=False) as server:
        pool = Pool(directory, server.url)
        try:
            pool.start("one")
            pool.start("two")
            wait_until(lambda: pool.serving("one", "two"), "both workers serve", 600)
            yield pool
        finally:
            pool.close()


def test_greedy_samples_interrupted_by_updates_equal_uninterrupted_ones(pool: Pool) -> None:
    pool.client.wait_for_version(pool.publish(), workers=2)
    plain = pool.collect(pool.client.submit(PROMPTS, GREEDY))
    assert [r.interruptions for r in plain] == [0] * len(PROMPTS)

    resumed = pool.run_under_updates(
        GREEDY, None, lambda rs: sum(r.interruptions for r in rs) >= len(PROMPTS)
    )

    for whole, parts in zip(plain, resumed, strict=True):
        assert parts.response_ids.tolist() == whole.response_ids.tolist()
        assert parts.finish_reason == whole.finish_reason == "length"


@pytest.mark.parametrize("policy", ["requeue", "keep"])
def test_each_token_carries_the_version_whose_weights_computed_it(pool: Pool, policy: str) -> None:
    """Every logprob is computed again by plain transformers, under the labelled version.

    Over samples of three versions and more, which with `requeue` were handed back each time,
    and with `keep` stayed in the engine.
    """

    def of_three_versions(rollouts: Sequence[Rollout]) -> list[Rollout]:
        attempts = 3 if policy == "requeue" else 1
        return [
            r for r in rollouts if len(set(r.versions.tolist())) >= 3 and r.attempts >= attempts
        ]

    start = pool.client.status().current
    pool.client.wait_for_version(start, workers=2)
    params = SamplingParams(temperature=1.0, max_tokens=LONGER, ignore_eos=True)
    rollouts = pool.run_under_updates(
        params, _shake, lambda rs: len(of_three_versions(rs)) > 0, policy
    )

    shifted: list[float] = []
    for r in rollouts:
        lengths = (r.response_ids, r.response_logprobs, r.response_mask, r.versions)
        assert [len(a) for a in lengths] == [LONGER] * 4
        assert (np.diff(r.versions) >= 0).all()
        assert r.versions[0] >= start
        assert sum(s.tokens for s in r.segments) == LONGER
        under = _recomputed(pool, r)
        assert _error(r, under, r.versions) < 3e-3
        if len(under) >= 3:
            assert policy == "requeue" or r.attempts == 1
            early = np.append(r.versions[1:], r.versions[-1])
            late = np.insert(r.versions[:-1], 0, r.versions[0])
            shifted.append(min(_error(r, under, labels) for labels in (early, late)))
    # The proof can fail: it does with the labels one token early or late. (Of one sample alone the
    # few tokens at its seams may by chance be as likely under both versions.)
    assert np.median(shifted) > 1e-2


def test_weights_of_another_model_are_refused_and_the_pool_goes_on(pool: Pool) -> None:
    """Before anything is paused: every worker says what is wrong, and generates on."""
    good = pool.client.status().current
    pool.client.wait_for_version(good, workers=2)
    ids = pool.client.submit(PROMPTS, GREEDY)
    head = "model.embed_tokens.weight"
    narrow = dict(pool.weights[0]) | {head: pool.weights[0][head][:, :32]}
    incomplete = {name: value for name, value in pool.weights[0].items() if name != head}

    for weights, words in (
        (narrow, f"wrong shape {head} of shape (60, 32) for (60, 64)"),
        (incomplete, f"missing {head}"),
    ):
        with pytest.raises(WeightsRejected) as caught:
            pool.client.publish_weights(weights, wait="all", timeout=300)
        path = pool.client.status().weights[f"{caught.value.version}:path"]
        said = f"{pool.directory / 'weights' / path} is not of {pool.directory / 'model'}: {words}"
        assert caught.value.reasons == {"one": said, "two": said}

    status = pool.client.status()
    assert (status.current, status.last_good) == (good, good)
    assert {w.version for w in status.workers} == {good}
    rollouts = pool.collect(ids)
    assert {r.finish_reason for r in rollouts} == {"length"}
    assert {v for r in rollouts for v in r.versions.tolist()} == {good}


def test_a_killed_worker_s_samples_go_on_elsewhere_from_their_last_checkpoint(pool: Pool) -> None:
    wait_until(lambda: pool.serving("one", "two"), "both workers serve", 300)
    params = SamplingParams(temperature=1.0, max_tokens=LONG, ignore_eos=True)
    ids = pool.client.submit(PROMPTS * 2, params)
    victim = pool.processes["two"]

    def held_by_victim() -> dict[str, int]:
        rollouts = [pool.client.peek(f"{i}/0") for i in ids]
        return {
            r.id: len(r.response_ids)
            for r in rollouts
            if r and r.state == "leased" and r.segments and r.segments[-1].worker == "two"
        }

    wait_until(held_by_victim, "the worker to be killed has stored tokens", 300)
    victim.send_signal(signal.SIGSTOP)
    held = held_by_victim()
    victim.kill()
    victim.wait()
    assert held

    rollouts = {r.id: r for r in pool.collect(ids)}
    assert len(rollouts) == len(ids)
    assert {r.finish_reason for r in rollouts.values()} == {"length"}
    assert all(len(r.response_ids) == LONG for r in rollouts.values())
    for sid, stored in held.items():
        r = rollouts[sid]
        assert r.crashes == 1
        assert r.segments[-1].worker == "one"
        by_victim = sum(s.tokens for s in r.segments if s.worker == "two")
        assert by_victim >= stored
    with_crash = {r.id for r in rollouts.values() if r.crashes}
    assert with_crash >= set(held)


def test_terminated_worker_hands_back_and_leaves(pool: Pool) -> None:
    """The last test here: it ends the pool."""
    params = SamplingParams(temperature=1.0, max_tokens=LONG, ignore_eos=True)
    ids = pool.client.submit(PROMPTS * 8, params)
    wait_until(lambda: pool.client.status().leased > 0, "samples are held", 300)
    one = pool.processes["one"]
    one.send_signal(signal.SIGTERM)
    assert one.wait(300) == 0

    status = pool.client.status()
    assert (status.leased, status.workers) == (0, ())
    assert status.ready == len(ids) - _closed(pool)
    assert pool.client.cancel(ids) == status.ready
    assert {r.finish_reason for r in pool.collect(ids)} <= {"cancelled", "length"}


def _closed(pool: Pool) -> int:
    import redis

    with redis.Redis.from_url(pool.url) as connection:
        return int(connection.xlen(QueueKeys(QUEUE)["results"]))


def _copy(model: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _shake(model: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))


def _recomputed(pool: Pool, rollout: Rollout) -> dict[int, NDArray[np.float32]]:
    """By teacher forcing: the logprob of every token under each of the rollout's versions."""
    import torch

    ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])
    first = len(rollout.prompt_ids) - 1
    under = {}
    for version in set(rollout.versions.tolist()):
        pool.model.load_state_dict(pool.weights[version])
        with torch.no_grad():
            logits = pool.model(torch.tensor(ids[None].astype(np.int64))).logits[0, first:-1]
        logprobs = torch.log_softmax(logits.float(), -1).numpy()
        under[version] = logprobs[np.arange(len(rollout.response_ids)), rollout.response_ids]
    pool.model.load_state_dict(pool.weights[max(pool.weights)])
    return under


def _error(
    rollout: Rollout, under: dict[int, NDArray[np.float32]], labels: NDArray[np.int32]
) -> float:
    """Largest difference to the logprobs of the versions that the labels say; of an unlikely
    token, whose float32 value is as much coarser, relative to its logprob."""
    expected = np.array([under[label][at] for at, label in enumerate(labels.tolist())])
    differences = np.abs(expected - rollout.response_logprobs)
    return float((differences / np.maximum(1, np.abs(expected))).max())
