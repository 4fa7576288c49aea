"""The trainer of `rollq bench partial`: the same work under one policy, through the public client.

A sample has its length by `max_tokens`, and EOS is ignored: so the work is the same whatever the
policy, the engine and the interruptions are.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from producer.aio import AsyncRolloutClient
from producer.contract.connection import Queue
from producer.contract.messages import Job, Rollout
from producer.contract.sampling import SamplingParams
from producer.outbox import Outbox
from producer.prompts import make_jobs
from producer.steps import finish

#: of an update; `rollq bench partial --help` says what becomes of the samples in flight
POLICIES = ("wait", "finish", "restart", "keep", "requeue")
#: distributions of response lengths; see `draw_lengths`
SHAPES = ("lognormal", "reasoning")

#: seconds for one batch; the pool's state is told when it is exceeded
_BATCH_SECONDS = 600.0
#: for `finish`: longer than any sample takes
_DEADLINE_SECONDS = 3600.0


def draw_lengths(
    shape: str, count: int, longest: int, block: int, seed: int = 0
) -> NDArray[np.int64]:
    """Response lengths, int64 [count], at most `longest`.

    Every `block` of them is a stratified sample, so that a short run has the distribution's mean
    at any time. `lognormal`: median 0.11 of the longest, sigma 1, cut. `reasoning`: 60% short
    answers, 35% with a heavy tail, and 5% that never end and are cut.
    """
    rng = np.random.default_rng(seed)
    blocks = -(-count // block)
    strata = np.stack([rng.permutation(block) for _ in range(blocks)])
    uniform = ((strata + rng.random(strata.shape)) / block).ravel()[:count]
    table = np.sort(_sample(shape, rng, 1 << 16))
    lengths = table[(uniform * len(table)).astype(np.int64)] * longest
    return np.clip(np.rint(lengths).astype(np.int64), 1, longest)


def _sample(shape: str, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    if shape == "lognormal":
        return np.minimum(rng.lognormal(np.log(0.11), 1.0, count), 1.0)
    kind = rng.choice(3, count, p=[0.6, 0.35, 0.05])
    short = rng.lognormal(np.log(0.05), 0.5, count)
    long = rng.lognormal(np.log(0.22), 0.8, count)
    shares: NDArray[np.float64] = np.choose(kind, [short, long, np.ones(count)])
    return np.minimum(shares, 1.0)


@dataclass(frozen=True, slots=True)
class Work:
    """What a trainer does; `slots` is how many samples the pool generates at once.

    It takes `batch` samples a step, trains for `train_seconds`, and publishes every
    `update_every` steps.
    """

    lengths: NDArray[np.int64]
    prompt: int
    batch: int
    update_every: int
    slots: int
    train_seconds: float

    @property
    def steps(self) -> int:
        return len(self.lengths) // self.batch

    def stock(self, policy: str, step: int) -> int:
        """How many samples are to be submitted when so many steps are done."""
        update = self.batch * self.update_every
        if policy == "wait":
            ahead = (step // self.update_every + 1) * update
        else:
            ahead = step * self.batch + self.slots + update
        return min(ahead, self.steps * self.batch)


@dataclass(slots=True)
class Told:
    """What came of it; times in seconds, tokens as the engine counts them.

    Attributes:
        seconds, waited: in all, and for batches.
        delivered: lengths in the order of delivery.
        gaps: versions between each delivered token and the batch that it came in.
        prefilled: tokens computed again to go on after an interruption.
        wasted: tokens made and thrown away.
    """

    seconds: float = 0.0
    waited: float = 0.0
    updates: int = 0
    wasted: int = 0
    prefilled: int = 0
    delivered: list[int] = field(default_factory=list)
    gaps: list[NDArray[np.int64]] = field(default_factory=list)


async def work_off(
    client: AsyncRolloutClient, queue: Queue, work: Work, policy: str, weights: Path
) -> Told:
    """All of the work. `weights`: a directory that is published again and again.

    Raises:
        AssertionError: a sample is not as long as it was to be, or was handed back for no reason.
    """
    told = Told()
    wasted = (await client.status()).stats.get("wasted_tokens", 0)
    jobs = [job_at(work, policy, at) for at in range(len(work.lengths))]
    outbox, submitted = Outbox(queue), 0

    async def submit(step: int) -> None:
        """In one call, which `client.submit` has for samples of one length only."""
        nonlocal submitted
        new = jobs[submitted : work.stock(policy, step)]
        await asyncio.to_thread(finish, outbox.enqueue(new, None))
        submitted += len(new)

    started = time.monotonic()
    await submit(0)
    for step in range(1, work.steps + 1):
        asked = time.monotonic()
        batch = await client.batch(work.batch, timeout=_BATCH_SECONDS)
        told.waited += time.monotonic() - asked
        told.seconds = time.monotonic() - started
        trained = time.monotonic() + work.train_seconds
        await batch.ack()
        _note(told, work, policy, batch.rollouts, batch.version)
        if policy != "wait":
            await submit(step)
        await asyncio.sleep(trained - time.monotonic())
        if step % work.update_every == 0 and step < work.steps:
            await publish(client, policy, weights, step)
            told.updates += 1
            await submit(step)
    told.wasted = (await client.status()).stats.get("wasted_tokens", 0) - wasted
    return told


def job_at(work: Work, policy: str, at: int) -> Job:
    """The sample number `at`."""
    params = SamplingParams(
        max_tokens=int(work.lengths[at]),
        ignore_eos=True,
        # Without a seed, of which vLLM 0.32 on a CPU dies when it computes a prefix in parts.
        # A penalty's state cannot be handed over, which is what makes a sample start again.
        presence_penalty=1e-6 if policy == "restart" else 0.0,
    )
    prompt = np.arange(work.prompt) % 16 + 5
    [job] = make_jobs([prompt], params, metadata=[at], allow_restart=policy == "restart")
    return job


async def publish(client: AsyncRolloutClient, policy: str, weights: Path, step: int) -> None:
    """An update under this policy of the bench."""
    if policy == "wait":
        # Nothing is in flight: all load at once, and nothing is begun under the old weights.
        await client.publish_weights(weights, step=step, force=True, max_updating=1.0, wait="all")
        return
    how = policy if policy in ("keep", "finish") else "requeue"
    await client.publish_weights(
        weights, step=step, force=True, policy=how, deadline_s=_DEADLINE_SECONDS
    )


def _note(told: Told, work: Work, policy: str, rollouts: list[Rollout], version: int) -> None:
    for r in rollouts:
        if len(r.response_ids) != work.lengths[r.metadata] or r.finish_reason != "length":
            raise AssertionError(f"{r} should be of {work.lengths[r.metadata]} tokens")
        if r.interruptions and policy not in ("restart", "requeue"):
            raise AssertionError(f"{r} was handed back under the policy {policy}")
        told.gaps.append(version - r.versions.astype(np.int64))
        if policy == "keep":
            # vLLM computes what it had cached again under the new weights.
            seams = np.flatnonzero(np.diff(r.versions)) + 1
            told.prefilled += int((seams + len(r.prompt_ids)).sum())
        elif policy == "restart":
            told.prefilled += r.interruptions * len(r.prompt_ids)
        else:
            told.prefilled += r.recomputed_tokens
    told.delivered += [len(r.response_ids) for r in rollouts]
