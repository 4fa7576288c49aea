"""vLLM's `AsyncLLM` as an `Engine`.

How it keeps the promises of `protocol.py`:

- `add` returns when the request is on its way to the core, on the same ordered channel as
  the pause that follows it.
- Outputs are deltas of `checkpoint_tokens`, and vLLM flushes what it holds back with the
  output that ends a request. It states the versions of the tokens only in that output;
  before, they are read from its output processor, and `start` fails on a vLLM without them.
- A request that goes on with a response is given the detokenizer that read all of it
  (`vllm_text.py`), so vLLM itself stops at strings that began before.
- A load is done when the engine has said the new version itself. After a failed one the
  engine is `dead`: its weights may be half new, and only `abort` and `shutdown` still work.
"""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from producer.contract.errors import (
    EngineDead,
    EngineError,
    InvalidSample,
    WeightLoadError,
    WeightsError,
)
from producer.contract.sampling import SamplingParams
from workers.engines.protocol import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    PauseMode,
    Response,
    Stop,
)
from workers.engines.vllm_setup import (
    WEIGHT_TRANSFER_BACKEND,
    check_plugin,
    descendants,
    end_processes,
    engine_args_from_cli,
    leave_out_statistics,
    register_weight_transfer,
    set_environment,
    step_counter,
)
from workers.engines.vllm_stream import VllmStream, abort
from workers.engines.vllm_text import VllmTexts, vllm_params

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs

__all__ = ["VllmEngine", "engine_args_from_cli", "register_weight_transfer"]

#: What a child of the engine may take to end before it is killed.
_EXIT_SECONDS = 5.0
#: How often a start that is to be given up is looked at.
_LOOK_SECONDS = 0.2

T = TypeVar("T")


class VllmEngine:
    """Implements `workers.engines.protocol.Engine` on `AsyncLLM`.

    `checkpoint_tokens` is how many tokens of a request come in one output.
    """

    def __init__(self, engine_args: AsyncEngineArgs, *, checkpoint_tokens: int = 16) -> None:
        self._args = copy.copy(engine_args)
        self._args.stream_interval = checkpoint_tokens
        self._llm: Any = None
        self._tokenizer: Any = None
        self._texts: Any = None
        self._info: EngineInfo | None = None
        self._dead: str | None = None
        self._stepping = asyncio.Event()
        self._steps = 0
        self._starting: asyncio.Future[Any] | None = None
        self._before: set[Any] = set()
        self._children: list[Any] = []
        # One thread: a tokenizer may not be used by two at once.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDead("the engine was not started")
        return self._info

    @property
    def llm(self) -> Any:
        """The `AsyncLLM` that was started; for what goes past this adapter."""
        self._check_alive()
        return self._llm

    @property
    def dead(self) -> str | None:
        if self._dead is None and self._llm is not None and self._llm.errored:
            self._dead = "vLLM's engine core has ended; its log says why"
        return self._dead

    @property
    def progress(self) -> int:
        return self._steps

    async def start(self) -> None:
        check_plugin()
        set_environment()
        self._before = set(multiprocessing.active_children())
        # In a thread: this takes a minute or more, and the loop keeps the worker's pulse.
        self._starting = asyncio.ensure_future(asyncio.to_thread(self._create))
        try:
            self._llm = await asyncio.shield(self._starting)
            self._children = self._new_children()
            await self._llm.update_weight_version("0")
            self._describe()
            self._stepping.set()
            await self._warm_up()
        except Exception as error:
            await self.shutdown()
            raise EngineError(f"vLLM did not start {self._args.model}: {error}") from error

    def _describe(self) -> None:
        self._tokenizer = self._llm.tokenizer
        self._texts = VllmTexts(self._llm)
        config = self._llm.vllm_config
        cache = config.cache_config
        self._info = EngineInfo(
            model=config.model_config.model,
            max_model_len=config.model_config.max_model_len,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            kv_cache_tokens=cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size,
            vocab_size=config.model_config.get_vocab_size(),
            logprobs_mode=str(config.model_config.logprobs_mode),
        )

    async def _warm_up(self) -> None:
        """The first request compiles, and shows that partial outputs have their versions."""
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        request = EngineRequest("warm-up", np.zeros(1, np.int32), params)
        async for output in await self.add(request):
            if any(version != 0 for version, _ in output.versions):
                raise EngineError(f"its first tokens are of version {output.versions}, not of 0")

    def _new_children(self) -> list[Any]:
        return descendants(set(multiprocessing.active_children()) - self._before)

    def _create(self) -> Any:
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        register_weight_transfer()
        self._args.weight_transfer_config = WeightTransferConfig(backend=WEIGHT_TRANSFER_BACKEND)
        llm = AsyncLLM.from_engine_args(self._args, stat_loggers=[step_counter(self._count_step)])
        if self._args.disable_log_stats:
            leave_out_statistics(llm)
        return llm

    def _count_step(self) -> None:
        self._steps += 1

    async def add(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self._check_alive()
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        self._check_request(request)
        params = vllm_params(request.params)
        if request.done and request.params.stop:
            read = await self._in_thread(partial(self._texts.read, request))
            self._texts.resumed[request.request_id] = read
        try:
            # vLLM 0.32 would queue it, 0.33 refuses it.
            await self._stepping.wait()
            self._check_alive()
            queue = await self._llm.add_request(
                request.request_id, tokens_input(request.prompt_ids.tolist()), params
            )
        except asyncio.CancelledError:
            await self.abort([request.request_id])
            raise
        except EngineDeadError as error:
            raise EngineDead(f"vLLM's engine core is gone: {self.dead}") from error
        except (VLLMClientError, ValueError, TypeError) as error:
            raise InvalidSample(f"vLLM refuses the request: {error}") from error
        finally:
            unused = self._texts.resumed.pop(request.request_id, None)
        if unused is not None:
            await self.abort([request.request_id])
            raise EngineError(
                "this vLLM does not take over the text before an interruption: use a version "
                "that rollq supports"
            )
        return VllmStream(self._llm, queue)

    async def abort(self, request_ids: Sequence[str]) -> None:
        if self._llm is not None:
            await abort(self._llm, list(request_ids), internal=False)

    async def pause(self, mode: PauseMode) -> None:
        self._check_alive()
        self._stepping.clear()
        # A load may follow, so the cache goes in either mode; `keep` computes it again.
        await self._call(self._llm.pause_generation(mode=mode, clear_cache=True))

    async def resume(self) -> None:
        self._check_alive()
        await self._call(self._llm.resume_generation())
        self._stepping.set()

    def check(self, directory: Path) -> None:
        from workers.engines import vllm_weights as files

        config = self._llm.vllm_config
        tied = bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False))
        try:
            got = files.tensor_shapes(files.safetensors_files(directory))
            wanted = files.tensor_shapes(files.started_with(config))
            files.check_tensors(got, wanted, tied=tied)
        except ValueError as error:
            raise WeightsError(f"{directory} is not of {self.info.model}: {error}") from error

    async def load(self, directory: Path, version: int) -> float:
        self._check_alive()
        if self._stepping.is_set():
            raise WeightLoadError(f"cannot load {directory} while stepping: pause first")
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._llm
        try:
            await llm.start_weight_update()
            await llm.update_weights(
                WeightTransferUpdateRequest(update_info={"directory": str(directory)})
            )
            await llm.finish_weight_update(str(version))
            loaded = time.monotonic()
            await llm.reset_prefix_cache(reset_running_requests=True)
            seen = await llm.get_weight_version()
            if seen != str(version):
                raise WeightLoadError(f"the engine says that it is at {seen!r}")
        except Exception as error:
            self._stepping.set()
            self._dead = f"version {version} did not load from {directory}: {error}"
            raise WeightLoadError(self._dead) from error
        return time.monotonic() - loaded

    async def encode(self, prompt: str | list[dict[str, Any]]) -> NDArray[np.int32]:
        self._check_alive()
        if self._tokenizer is None:
            raise InvalidSample("the model was started without a tokenizer; send token ids")
        ids = await self._in_thread(partial(_encode, self._tokenizer, prompt))
        return np.array(ids, np.int32)

    async def stop_of(self, response: Response) -> Stop | None:
        stop: Stop | None = await self._in_thread(partial(self._texts.stop_of, response))
        return stop

    async def text_of(self, response: Response) -> str:
        return str(await self._in_thread(partial(self._texts.text_of, response)))

    async def shutdown(self) -> None:
        self._dead = self._dead or "the engine was shut down"
        self._stepping.set()
        self._thread.shutdown(wait=False)
        starting = self._starting
        if starting is None:
            return
        while not starting.done():
            # A start can be ended in no other way: it fails when its processes are gone.
            await asyncio.to_thread(end_processes, self._new_children(), 0.0)
            await asyncio.wait([starting], timeout=_LOOK_SECONDS)
        if starting.exception() is None:
            await asyncio.to_thread(starting.result().shutdown)
        else:
            self._children = self._new_children()
        await asyncio.to_thread(end_processes, self._children, _EXIT_SECONDS)
        # vLLM frees the rest when nothing refers to it.
        self._llm = self._starting = None

    async def _in_thread(self, function: Callable[[], T]) -> T:
        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, function)
        except RuntimeError as error:
            raise EngineDead("the engine was shut down") from error
        return await running

    async def _call(self, call: Awaitable[None]) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await call
        except EngineDeadError as error:
            raise EngineDead(f"vLLM's engine core is gone: {self.dead}") from error

    def _check_alive(self) -> None:
        if self._llm is None or self.dead is not None:
            raise EngineDead(self.dead or "the engine was not started")

    def _check_request(self, request: EngineRequest) -> None:
        """What vLLM would not refuse, or not by name."""
        request.check(self.info)
        if self._tokenizer is None and (request.params.stop or request.params.bad_words):
            raise InvalidSample("stop and bad_words need a model with a tokenizer")


def _encode(tokenizer: Any, prompt: str | list[dict[str, Any]]) -> list[int]:
    if not isinstance(prompt, str):
        for message in prompt:
            # A template would render what is missing as nothing.
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise InvalidSample(f"a chat message is a dict with a role, not {message!r:.200}")
    try:
        if isinstance(prompt, str):
            return list(tokenizer.encode(prompt))
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:
        what = "text" if isinstance(prompt, str) else "chat messages"
        raise InvalidSample(f"the model's tokenizer refuses the {what}: {error}") from error
