"""Prompts that came as text: tokenized by the first worker, then fixed for the group.

The chat template is applied once; every later attempt, and every other member of the group,
sends the very same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from producer.contract.codec import pack_ids, unpack_ids
from producer.contract.connection import split
from producer.contract.errors import InvalidSample
from workers.held import Held, Outcome
from workers.state import WorkerState


async def settle_prompts(state: WorkerState, samples: Sequence[tuple[Held, Any]]) -> None:
    """Give each sample the prompt ids that count for its group."""
    items = []
    settled = {h.id: h for h, _ in samples}
    encoded: dict[str, bytes] = {}
    for held, prompt in samples:
        group = held.claim.group_id
        try:
            if group not in encoded:
                ids = await state.engine.encode(prompt)
                if not len(ids):
                    raise InvalidSample("the prompt has no tokens")
                encoded[group] = pack_ids(ids)
        except InvalidSample as error:
            held.outcome = Outcome("fail", str(error))
            continue
        data = encoded[group]
        items.append((held.id, held.claim.lease_token, len(data) // 4, data))
    for piece in split(items):
        for item, data in zip(piece, await state.queue.call("prompt", piece), strict=True):
            held = settled[str(item[0])]
            if data:
                held.prompt_ids = unpack_ids(data, f"prompt of {held.id}")
            else:
                state.lose(held)
