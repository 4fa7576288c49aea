"""Claiming: as many ready samples as there is room for, read so far as they were made."""

from __future__ import annotations

import secrets
import time

import numpy as np
from numpy.typing import NDArray

from producer.contract.codec import unpack_ids
from producer.contract.errors import EngineError, InvalidPayload, InvalidSample
from producer.contract.messages import Chunk, Claim, read_job
from producer.contract.sampling import SamplingParams
from workers import resume
from workers.held import Held, Outcome
from workers.prompt import settle_prompts
from workers.state import WorkerState

#: share of the KV cache that claims may fill; the rest absorbs longer samples
_KV_SHARE = 0.9
#: samples held at once that were in one crash: few enough to find a poison one among them soon,
#: many enough that a whole worker's samples are not made one by one after it died
_SUSPECTS = 32
#: how long other workers are left their share; longer than an idle one waits between claims
_SHARE_SECONDS = 1.0


_NOT_READ = SamplingParams()
_NO_IDS: NDArray[np.int32] = np.empty(0, np.int32)

#: prompt, parameters and prompt ids
_Group = tuple[object, SamplingParams, NDArray[np.int32]]


class Claimer:
    """Claims for one worker. What it returns is in `state.held`, so its leases are renewed."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._left_since: float | None = None

    @property
    def slots(self) -> int:
        """How many more samples the worker may hold."""
        state = self._state
        most = state.settings.max_samples or state.engine.info.max_num_seqs
        return min(most, state.engine.info.max_num_seqs) - len(state.held)

    def room(self) -> int:
        """KV cache tokens that are not spoken for; also asked from another thread."""
        state = self._state
        reserve = state.settings.reserve_tokens
        used = sum(
            len(h.prompt_ids) + h.made + min(max(0, h.budget - h.made), reserve)
            for h in state.held.copy().values()
        )
        return int(_KV_SHARE * state.engine.info.kv_cache_tokens) - used

    async def claim(self) -> list[Held]:
        """Samples ready to be generated, or already with an outcome; none if nothing waits."""
        state = self._state
        limit, room = self.slots, self.room()
        crashes = [0, *(h.claim.crashes for h in state.held.values())]
        if max(crashes) > 1:
            return []  # one that was in several crashes is tried with nothing new beside it
        if limit <= 0 or (state.held and room <= 0):
            return []
        current, last_good, headers, waiting, jobs = await state.queue.call(
            "claim",
            worker=state.settings.name,
            request=secrets.token_hex(8),
            version=state.version,
            limit=limit,
            held=len(state.held),
            share=int(not self._others_leave_them()),
            suspects=_SUSPECTS - sum(crashes),
            alone=int(not any(crashes)),
            room=max(0, room),
            reserve=state.settings.reserve_tokens,
        )
        state.notice(current, last_good)
        if headers or not waiting:
            self._left_since = None
        elif self._left_since is None:
            self._left_since = time.monotonic()
        held = [self._hold(claim) for claim in Claim.from_reply(headers, jobs)]
        texts = await self._read_stored(held)
        try:
            await settle_prompts(state, [(h, texts[h.id]) for h in held if h.id in texts])
        except EngineError as error:
            state.give_up(f"the engine died: {error}")
            for h in held:
                h.outcome = h.outcome or Outcome("release", "failure")
        for h in held:
            self._set_budget(h)
        return [h for h in held if not h.lost]

    def _others_leave_them(self) -> bool:
        """Samples wait that are the share of workers which do not come for them."""
        since = self._left_since
        return since is not None and time.monotonic() - since > _SHARE_SECONDS

    def _hold(self, claim: Claim) -> Held:
        held = Held(
            claim=claim,
            params=_NOT_READ,
            prompt_ids=_NO_IDS,
            worker=self._state.settings.name,
            logprobs_mode=self._state.engine.info.logprobs_mode,
        )
        if (earlier := self._state.held.get(claim.id)) and earlier.outcome is None:
            self._state.lose(earlier)
        self._state.held[claim.id] = held
        return held

    async def _read_stored(self, held: list[Held]) -> dict[str, object]:
        """Decode jobs and the chunks of earlier attempts; returns prompts that are text."""
        queue = self._state.queue
        partial = [h for h in held if h.claim.tokens]

        async def read() -> list[list[bytes]]:
            async with queue.redis.pipeline(transaction=False) as pipe:
                for h in partial:
                    pipe.lrange(queue.keys.chunks(h.id), 0, -1)
                replies: list[list[bytes]] = await pipe.execute()
                return replies

        stored = dict(zip((h.id for h in partial), await queue.retrying(read), strict=True))
        read_groups: dict[str, _Group | str] = {}
        texts: dict[str, object] = {}
        for h in held:
            group = read_groups.get(h.claim.group_id)
            if group is None:
                group = read_groups[h.claim.group_id] = _read_group(h.claim)
            try:
                if isinstance(group, str):
                    raise InvalidPayload(group)
                prompt, h.params, h.prompt_ids = group
                for data in stored.get(h.id, ()):
                    h.add_stored(Chunk.from_wire(data, h.id), data)
            except InvalidPayload as error:
                h.outcome = Outcome("fail", str(error))
                continue
            if not len(h.prompt_ids) and not prompt:
                h.outcome = Outcome("fail", "the prompt is empty")
            elif not len(h.prompt_ids):
                texts[h.id] = prompt
        return texts

    def _set_budget(self, held: Held) -> None:
        if held.outcome is not None:
            return
        length = self._state.engine.info.max_model_len
        try:
            held.budget = resume.budget(held.params, len(held.prompt_ids), length)
        except InvalidSample as error:
            held.outcome = Outcome("fail", str(error))


def _read_group(claim: Claim) -> _Group | str:
    """What the claims of a group have in common, or why it cannot be read."""
    try:
        prompt, params, _ = read_job(claim.job, claim.group_id)
        return prompt, params, unpack_ids(claim.prompt_ids, f"prompt of {claim.group_id}")
    except (InvalidPayload, InvalidSample) as error:
        return str(error)
