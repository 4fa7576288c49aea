"""AsyncRolloutClient: the twin of `RolloutClient` for an event loop.

Each method names the operation that both clients share; `producer.bridge` says how the loop and
the thread that does the work meet.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from producer.batch import AsyncBatch, Batch
from producer.bridge import Bridge, pieces
from producer.client import RolloutClient
from producer.contract.messages import Rollout, RolloutGroup
from producer.contract.sampling import SamplingParams
from producer.contract.states import StalenessPolicy, UpdatePolicy
from producer.progress import Progress
from producer.prompts import Prompt
from producer.publish import Workers
from producer.status import Status
from producer.steps import Steps

F = TypeVar("F", bound=Callable[..., Any])


class _Client(RolloutClient):
    _block_ms = 100  # while a read waits in the thread, other calls wait for it


def _twin(method: F) -> F:
    """A method that does, awaited, what the blocking client's does."""
    method.__doc__ = getattr(RolloutClient, method.__name__).__doc__
    return method


class AsyncRolloutClient:
    """`RolloutClient` for an event loop: the same methods, awaited, and `async for` over its
    iterators. See there for arguments and errors.

    It connects in `async with`, or with its first call. To be used by one event loop; any
    number of its tasks may call it at once. `submit` takes an asynchronous iterable, too.
    """

    def __init__(
        self,
        url: str | None = None,
        queue: str = "default",
        *,
        consumer: str = "0",
        weights_dir: str | os.PathLike[str] | None = None,
        patience: float = 60.0,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        self._thread = Bridge(
            lambda: _Client(
                url,
                queue,
                consumer=consumer,
                weights_dir=weights_dir,
                patience=patience,
                limits=limits,
            )
        )

    async def __aenter__(self) -> Self:
        try:
            await self._thread.call(lambda client: None)
        except BaseException:
            self._thread.close_soon()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self.close()

    @_twin
    async def close(self) -> None:
        await self._thread.close()

    # submit

    @_twin
    async def submit(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt] | str,
        sampling_params: SamplingParams | None = None,
        *,
        ids: Iterable[str] | None = None,
        metadata: Iterable[Any] | None = None,
        max_staleness: int | None = None,
        staleness_policy: StalenessPolicy | str = StalenessPolicy.ALLOW,
        allow_restart: bool = False,
        reward: str | None = None,
        block: bool = True,
        progress: Progress = False,
    ) -> list[str]:
        options: dict[str, Any] = {
            "max_staleness": max_staleness,
            "staleness_policy": staleness_policy,
            "allow_restart": allow_restart,
            "reward": reward,
            "block": block,
            "progress": self._in_loop(progress),
        }

        def steps(piece: Any, first: int) -> Callable[[RolloutClient], Steps[list[str]]]:
            own = options | {"ids": ids, "metadata": metadata, "first": first}
            return lambda c: c.operations.submit(piece, sampling_params, **own)

        if not isinstance(prompts, AsyncIterable):
            return await self._thread.finish(steps(prompts, 0))
        # One entry a prompt: each piece goes on where the one before it stopped.
        ids = ids if ids is None or isinstance(ids, str) else iter(ids)
        metadata = None if metadata is None else iter(metadata)
        enqueued: list[str] = []
        async with aclosing(pieces(prompts)) as parts:
            async for piece in parts:
                enqueued += await self._thread.finish(steps(piece, len(enqueued)))
        return enqueued

    @_twin
    async def generate(
        self,
        prompts: Iterable[Prompt] | str,
        sampling_params: SamplingParams | None = None,
        *,
        ids: Iterable[str] | None = None,
        metadata: Iterable[Any] | None = None,
        max_staleness: int | None = None,
        staleness_policy: StalenessPolicy | str = StalenessPolicy.ALLOW,
        allow_restart: bool = False,
        reward: str | None = None,
        timeout: float | None = None,
        progress: Progress = True,
    ) -> AsyncBatch:
        options: dict[str, Any] = {
            "ids": ids,
            "metadata": metadata,
            "max_staleness": max_staleness,
            "staleness_policy": staleness_policy,
            "allow_restart": allow_restart,
            "reward": reward,
            "timeout": timeout,
            "progress": self._in_loop(progress),
        }
        batch = await self._thread.finish(
            lambda c: c.operations.generate(prompts, sampling_params, **options)
        )
        # Not awaited: a cancellation from here on could not give the groups back.
        self._thread.later(batch.ack)
        return self._batch(batch)

    # results

    @_twin
    def batches(
        self,
        groups: int = 64,
        *,
        ack: Literal["auto", "manual"] = "auto",
        timeout: float | None = None,
        follow: bool = False,
    ) -> AsyncIterator[AsyncBatch]:
        return self._thread.items(
            lambda c: c.operations.batches(groups, ack=ack, timeout=timeout, follow=follow),
            self._batch,
        )

    @_twin
    async def batch(
        self, groups: int = 64, *, timeout: float | None = None, follow: bool = False
    ) -> AsyncBatch:
        batch = await self._thread.finish(
            lambda c: c.operations.batch(groups, timeout=timeout, follow=follow)
        )
        return self._batch(batch)

    @_twin
    def rollouts(
        self, *, timeout: float | None = None, follow: bool = False
    ) -> AsyncIterator[Rollout]:
        return self._thread.items(
            lambda c: c.operations.rollouts(timeout=timeout, follow=follow), _as_it_is
        )

    @_twin
    async def ack(self, groups: Sequence[RolloutGroup]) -> int:
        return await self._thread.call(lambda c: c.ack(groups))

    @_twin
    async def adopt(self, consumer: str, *, idle: float = 600.0, force: bool = False) -> int:
        return await self._thread.call(lambda c: c.adopt(consumer, idle=idle, force=force))

    # samples

    @_twin
    async def peek(self, sample_id: str) -> Rollout | None:
        return await self._thread.call(lambda c: c.peek(sample_id))

    @_twin
    def partials(
        self, ids: Iterable[str] | None = None, *, every: float = 0.5
    ) -> AsyncIterator[Rollout]:
        return self._thread.items(lambda c: c.operations.partials(ids, every=every), _as_it_is)

    @_twin
    async def cancel(
        self,
        ids: Iterable[str] | None = None,
        reason: str = "cancelled by the trainer",
        *,
        where: Callable[[Rollout], bool] | None = None,
        older_than: float | None = None,
    ) -> int:
        return await self._thread.finish(
            lambda c: c.operations.cancel(ids, reason, where=where, older_than=older_than)
        )

    # weights

    @_twin
    async def publish_weights(
        self,
        weights: Any,
        *,
        step: int = 0,
        policy: UpdatePolicy | str = UpdatePolicy.REQUEUE,
        deadline_s: float = 60.0,
        max_updating: float | None = None,
        force: bool = False,
        wait: Workers | None = None,
        timeout: float = 600.0,
    ) -> int:
        options: dict[str, Any] = {
            "force": force,
            "wait": wait,
            "timeout": timeout,
            "step": step,
            "policy": policy,
            "deadline_s": deadline_s,
            "max_updating": max_updating,
        }
        return await self._thread.finish(
            lambda c: c.operations.publish(c.weights_dir, weights, **options)
        )

    @_twin
    async def wait_for_version(
        self, version: int, *, workers: int = 1, timeout: float = 60.0
    ) -> None:
        await self._thread.finish(
            lambda c: c.operations.wait_for_version(version, workers=workers, timeout=timeout)
        )

    # watching

    @_twin
    async def status(self) -> Status:
        return await self._thread.call(lambda c: c.status())

    @_twin
    async def config(self) -> dict[str, str]:
        return await self._thread.call(lambda c: c.config())

    # between the loop and the thread

    def _batch(self, batch: Batch) -> AsyncBatch:
        return AsyncBatch(batch.groups, batch.version, self.ack)

    def _in_loop(self, progress: Progress) -> Progress:
        """A function that is called in the event loop, whoever calls it."""
        if not callable(progress):
            return progress
        loop = asyncio.get_running_loop()
        return lambda done, total: _ignore(loop.call_soon_threadsafe(progress, done, total))


def _as_it_is(item: Rollout) -> Rollout:
    return item


def _ignore(value: object) -> None:
    """For a function that may return nothing."""
