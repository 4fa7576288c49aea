"""What a trainer gets at a time: closed groups, taken together and acked together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

from producer.contract.messages import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Sequence[RolloutGroup]):
    """Closed groups taken together. `ack` says that they will not be needed again."""

    groups: tuple[RolloutGroup, ...]
    _ack: Callable[[Sequence[RolloutGroup]], int]

    @property
    def rollouts(self) -> list[Rollout]:
        """All members of all groups, in order."""
        return [r for g in self.groups for r in g.rollouts]

    def ack(self) -> int:
        """Delete the groups from the queue; returns how many were still this consumer's."""
        return self._ack(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    @overload
    def __getitem__(self, index: int) -> RolloutGroup: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RolloutGroup]: ...
    def __getitem__(self, index: int | slice) -> RolloutGroup | Sequence[RolloutGroup]:
        return self.groups[index]
