"""The engine without the pool: what `rollq bench engine` compares with.

`generate` drives the `AsyncLLM` of a started `VllmEngine` as one would who has no pool: all
prompts are given to vLLM at once, with the very parameters that the adapter sends, and tokens
and logprobs stay as vLLM gives them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from producer.contract.errors import EngineDead
from producer.contract.sampling import SamplingParams
from workers.engines.vllm import VllmEngine
from workers.engines.vllm_text import vllm_params


async def generate(
    engine: VllmEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> int:
    """Complete each prompt under its own parameters; returns how many tokens came.

    Raises:
        EngineDead: a request did not end as asked for.
    """
    from vllm.inputs import tokens_input

    llm = engine.llm

    async def one(prompt: Sequence[int], asked: SamplingParams) -> int:
        tokens, logprobs = [], []
        name = f"bare-{secrets.token_hex(8)}"
        async for output in llm.generate(tokens_input(list(prompt)), vllm_params(asked), name):
            [completion] = output.outputs
            tokens += completion.token_ids
            logprobs += completion.logprobs.logprobs
        if len(tokens) != asked.max_tokens or len(logprobs) != len(tokens):
            raise EngineDead(f"{len(tokens)} tokens of {asked.max_tokens} came without the pool")
        return len(tokens)

    return sum(await asyncio.gather(*map(one, prompts, params)))
