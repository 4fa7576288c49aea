"""What a trainer gets at a time: closed groups, taken together and acked together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from producer.contract.messages import Rollout, RolloutGroup
from producer.tensors import Side, pad


@dataclass(frozen=True, slots=True, eq=False)
class _Groups(Sequence[RolloutGroup]):
    """Attributes:
    groups: in the order in which they closed, or that was asked for.
    version: the pool's newest weight version when they were taken.
    """

    groups: tuple[RolloutGroup, ...]
    version: int

    @property
    def rollouts(self) -> list[Rollout]:
        """All members of all groups, in order."""
        return [r for g in self.groups for r in g.rollouts]

    def to_padded(
        self,
        *,
        pad_token_id: int,
        side: Side = "left",
        version: int | None = None,
        to: Literal["numpy", "torch"] = "numpy",
    ) -> dict[str, Any]:
        """All rollouts as padded arrays; see `producer.tensors.pad` for names and shapes.

        Args:
            pad_token_id: fills `prompt_ids`, `response_ids` and `input_ids`.
            side: of the padding of prompts; responses are padded on the right.
            version: that staleness is counted from; by default the batch's own.
            to: numpy arrays, or torch tensors on the CPU.

        Raises:
            InvalidSample: the batch is empty.
        """
        version = self.version if version is None else version
        return pad(self.rollouts, pad_token_id=pad_token_id, side=side, version=version, to=to)

    def __len__(self) -> int:
        return len(self.groups)

    @overload
    def __getitem__(self, index: int) -> RolloutGroup: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RolloutGroup]: ...
    def __getitem__(self, index: int | slice) -> RolloutGroup | Sequence[RolloutGroup]:
        return self.groups[index]


@dataclass(frozen=True, slots=True, eq=False)
class Batch(_Groups):
    """Closed groups taken together. `ack` says that they will not be needed again."""

    _ack: Callable[[Sequence[RolloutGroup]], int]

    def ack(self) -> int:
        """Delete the groups from the queue; returns how many were still this consumer's."""
        return self._ack(self.groups)


@dataclass(frozen=True, slots=True, eq=False)
class AsyncBatch(_Groups):
    """A `Batch` of the asyncio client."""

    _ack: Callable[[Sequence[RolloutGroup]], Awaitable[int]]

    async def ack(self) -> int:
        """Delete the groups from the queue; returns how many were still this consumer's."""
        return await self._ack(self.groups)
