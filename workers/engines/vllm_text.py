"""Where a response stops and what its text is, by vLLM's own detokenizer.

A request that goes on with a response is a new one to vLLM, and its detokenizer would begin at
the seam: it would miss a stop string that began before, and after half a character take the
whole prompt for output. So such a request is given the detokenizer that read the response from
its beginning, and stops, tokens and text are those of an uninterrupted request.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from producer.contract.errors import InvalidSample
from producer.contract.sampling import SamplingParams
from workers.engines.protocol import EngineRequest, Response, Stop


class VllmTexts:
    """Reads responses of one engine's model; its methods run in the tokenizer's thread.

    `resumed` are the detokenizers of requests that are about to be added.
    """

    def __init__(self, llm: Any) -> None:
        self._tokenizer = llm.tokenizer
        self._inputs = llm.input_processor
        self._processor = llm.output_processor
        self.resumed: dict[str, _Resumed] = {}
        self._register = self._processor.add_request
        # The one moment between a request's detokenizer and its first token.
        self._processor.add_request = self._register_resumed

    def stop_of(self, response: Response) -> Stop | None:
        params = self._params(response)
        last = int(response.token_ids[-1])
        by_id = _stop_id(params, last)
        if params.stop and (string := self._read(response, params)[1]) is not None:
            return Stop(string)
        return by_id

    def text_of(self, response: Response) -> str:
        if self._tokenizer is None or not len(response.token_ids):
            return ""
        detokenizer, _ = self._read(response, self._params(response))
        return str(detokenizer.get_next_output_text(finished=True, delta=False))

    def read(self, request: EngineRequest) -> _Resumed:
        """The detokenizer of a request that goes on with a response."""
        least = request.done + request.params.min_tokens
        response = Response(
            request.prompt_ids[: -request.done],
            request.prompt_ids[-request.done :],
            dataclasses.replace(request.params, min_tokens=least, max_tokens=None),
        )
        return _Resumed(self._read(response, self._params(response))[0])

    def _register_resumed(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._register(request, *args, **kwargs)
        detokenizer = self.resumed.pop(request.external_req_id, None)
        if detokenizer is not None:
            self._processor.request_states[request.request_id].detokenizer = detokenizer

    def _params(self, response: Response) -> Any:
        """Of the whole response, with the model's own stop ids."""
        params = vllm_params(response.params)
        params.update_from_generation_config(
            self._inputs.generation_config_fields, self._inputs.renderer.get_eos_token_id()
        )
        return params

    def _read(self, response: Response, params: Any) -> tuple[Any, str | None]:
        """vLLM's detokenizer after a response, and the stop string that it ends with."""
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        request = EngineCoreRequest(
            request_id="",
            prompt_token_ids=response.prompt_ids.tolist(),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        detokenizer = IncrementalDetokenizer.from_new_request(self._tokenizer, request)
        ids = response.token_ids.tolist()
        ends_with_id = bool(ids) and _stop_id(params, ids[-1]) is not None
        string: str | None = detokenizer.update(ids, ends_with_id)
        return detokenizer, string


def _stop_id(params: Any, last: int) -> Stop | None:
    """As vLLM's scheduler decides: EOS first, and it is not named."""
    if last == params.eos_token_id:
        return Stop(None)
    return Stop(last) if last in params.stop_token_ids else None


class _Resumed:
    """The detokenizer of a whole response, counting from the seam as its request does."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self._before: int = whole.num_output_tokens()

    @property
    def output_token_ids(self) -> list[int]:
        ids: list[int] = self._whole.output_token_ids[self._before :]
        return ids

    def num_output_tokens(self) -> int:
        made: int = self._whole.num_output_tokens()
        return made - self._before

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        string: str | None = self._whole.update(new_token_ids, stop_terminated)
        return string

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        return str(self._whole.get_next_output_text(finished, delta))


def vllm_params(params: SamplingParams) -> Any:
    """Raises InvalidSample: vLLM does not take them."""
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSamplingParams

    try:
        return VllmSamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            seed=params.seed,
            stop=list(params.stop) or None,
            stop_token_ids=list(params.stop_token_ids) or None,
            include_stop_str_in_output=params.include_stop_str_in_output,
            ignore_eos=params.ignore_eos,
            skip_special_tokens=params.skip_special_tokens,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            bad_words=list(params.bad_words) or None,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(params.stop),
            output_kind=RequestOutputKind.DELTA,
        )
    except (VLLMClientError, ValueError, TypeError) as error:
        raise InvalidSample(f"vLLM refuses the request: {error}") from error
