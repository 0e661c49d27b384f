# SPDX-License-Identifier: Apache-2.0
"""The offline engine: prompts in, completions out, one rank in this process."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.connectors.config import kv_transfer_config as read_transfer_config
from paceline.core.config import Policy, require
from paceline.core.plan import StepOutput, TokenLogprobs
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.scheduler import Scheduler
from paceline.engine.rank import Rank
from paceline.execution.runner import ModelExecutor
from paceline.models.spec import LoadedModel
from paceline.models.tokenizer import Message
from paceline.runtime.connecting import connector_halves
from paceline.runtime.detokenizer import Detokenizer
from paceline.runtime.gpu_memory import asked_utilization, cache_bytes
from paceline.runtime.options import (
    engine_config,
    graph_config,
    graph_options,
    load_draft,
    load_target,
    speculation_config,
)
from paceline.runtime.outputs import CompletionOutput, EngineStats, RequestOutput, position_logprobs

Prompt = str | Mapping[str, Any]
"""A text, or a mapping with ``prompt_token_ids`` (or ``prompt``, a text)."""


class LLM:
    """A model behind a scheduler of its own.

    Example:
        >>> llm = LLM("smollm2")
        >>> out = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
        >>> out[0].outputs[0].text
    """

    def __init__(  # size: most of it is the list of options, each explained
        self,
        model: str | Path | LoadedModel,
        *,
        dtype: str = "auto",
        quantization: str | None = None,
        device: str = "auto",
        gpu_memory_utilization: float | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 2048,
        long_prefill_token_threshold: int = 0,
        scheduling_policy: Policy = "fcfs",
        block_size: int = 16,
        num_gpu_blocks_override: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        speculative_config: Mapping[str, Any] | None = None,
        kv_transfer_config: Mapping[str, Any] | None = None,
        compilation_config: Mapping[str, Any] | None = None,
        seed: int = 0,
        tensor_parallel_size: int = 1,
    ) -> None:
        """Load a model and reserve its KV cache.

        Args:
            model: ``smollm2``, a ``.gguf`` file, a Hugging Face folder, or a model loaded before.
            dtype: of weights and KV cache: float32, bfloat16, or auto (as stored).
            quantization: of the weights: int8 (activations are rounded too, KV cache in bfloat16), none, or None:
                int8 for weights that are stored quantised if dtype is auto, none otherwise.
            device: cpu, cuda, or auto: a GPU where PyTorch can use one. On a GPU dtype auto is bfloat16.
            gpu_memory_utilization: of a GPU's memory, the share that may be used, and so the size of the KV cache;
                0.9 by default.
            max_model_len: tokens of a prompt and its output together; the model's context by default.
            max_num_seqs: requests that run at the same time.
            max_num_batched_tokens: tokens that one step computes at most.
            long_prefill_token_threshold: prompt tokens that one request may compute in a step; 0: no limit.
            scheduling_policy: fcfs or priority.
            block_size: tokens of a KV block.
            num_gpu_blocks_override: KV blocks, one of them reserved (vLLM's name; they lie where the model does).
            kv_cache_memory_bytes: memory for the KV cache instead; on a CPU 512 MiB by default, or what one request
                needs.
            enable_prefix_caching: share the KV of equal beginnings.
            speculative_config: vLLM's keys and ``pad_resumed``; methods ngram, draft_model and eagle3.
            kv_transfer_config: vLLM's keys; DecodeBenchConnector, which makes up the KV of prompts, or a connector from
                the module kv_connector_module_path.
            compilation_config: vLLM's cudagraph_mode (FULL_DECODE_ONLY, NONE; by default what measured faster for such
                a model) and cudagraph_capture_sizes.
            seed: makes sampled requests without a seed of their own repeatable.
            tensor_parallel_size: 1.

        Raises:
            ConfigError: an option that cannot be honoured; the error names it.
            UnsupportedModel: the model cannot be found or run.
        """
        require(tensor_parallel_size == 1, "tensor_parallel_size", f"only 1 is supported, got {tensor_parallel_size}")
        speculation = speculation_config(speculative_config)
        asked_graphs = graph_options(compilation_config)
        self._transfer = read_transfer_config(kv_transfer_config)
        loaded, dtype, quantization = load_target(model, dtype, quantization, device)
        sizes = kv_cache_memory_bytes, num_gpu_blocks_override
        utilization = asked_utilization(gpu_memory_utilization, loaded.model.device, sizes)
        self._draft = load_draft(speculation, loaded.model, dtype, quantization, device=loaded.model.device)
        if utilization is not None:
            limits = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
            limits |= {"max_num_batched_tokens": max_num_batched_tokens}
            kv_cache_memory_bytes = cache_bytes(loaded.model, speculation.width, limits, utilization)
        self.model = loaded
        self.tokenizer = loaded.tokenizer
        self.config = engine_config(
            loaded.model.config,
            loaded.model.dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
            scheduling_policy=scheduling_policy,
            block_size=block_size,
            num_gpu_blocks_override=num_gpu_blocks_override,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            enable_prefix_caching=enable_prefix_caching,
            speculation=speculation,
            draft=self._draft,
            graphs=graph_config(asked_graphs, loaded.model, speculation),
            load_failure_policy="fail" if self._transfer is None else self._transfer.kv_load_failure_policy,
        )
        self._seed = seed
        self._next_id = 0
        self._start()

    def _start(self) -> None:
        """An engine without requests and with an empty cache."""
        beside_scheduler, beside_cache = connector_halves(self._transfer, self.config, self._seed)
        self._executor = ModelExecutor(
            self.model.model, self.config, seed=self._seed, draft=self._draft, connector=beside_cache
        )
        self._rank = Rank(Scheduler(self.config, beside_scheduler), self._executor)
        self._forward_s = 0.0
        self._draft_s = 0.0

    def _restart(self, error: BaseException) -> None:
        """Begin anew: a step that ``error`` interrupted cannot be resumed.

        The cache goes before the next is made, since there may be no memory for two. What holds it besides the executor
        are the variables of the functions that the exception left.
        """
        try:
            self._executor.shutdown()
        finally:
            del self._executor, self._rank
            left: BaseException | None = error
            while left is not None:
                traceback.clear_frames(left.__traceback__)
                left = left.__context__
            self._start()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; results come in their order.

        Args:
            prompts: one or several; a text, or ``{"prompt_token_ids": [...]}``.
            sampling_params: for all, or one per prompt; by default 16 tokens at temperature 1.
            use_tqdm: show a progress bar (vLLM's name for it).
            priority: one per prompt, lower first; needs scheduling_policy priority.

        Raises:
            ValueError: a prompt that is empty or too long, parameters that do not match the prompts.
        """
        several = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        encoded = [self._encode(prompt, i) for i, prompt in enumerate(several)]
        return self._complete(encoded, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; each is a list of ``{"role": ..., "content": ...}``.

        Raises:
            ValueError: the model has no chat template, or the template refuses a conversation.
        """
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        texts = [self.tokenizer.apply_chat_template(conversation) for conversation in conversations]
        # The template has written the special tokens into the text.
        encoded = [(text, self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        return self._complete(encoded, sampling_params, use_tqdm, None)

    def stats(self) -> EngineStats:
        """Totals, those of speculation among them, since the start (or since a call ended in an exception)."""
        return EngineStats.of(self._rank.scheduler.stats, self._forward_s, self._draft_s)

    def _encode(self, prompt: Prompt, index: int) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping) and set(prompt) == {"prompt"}:
            return prompt["prompt"], self.tokenizer.encode(prompt["prompt"])
        if not isinstance(prompt, Mapping) or set(prompt) != {"prompt_token_ids"}:
            raise ValueError(f"prompts[{index}]: must be a text or {{'prompt_token_ids': [...]}}, got {prompt!r}")
        ids = list(prompt["prompt_token_ids"])
        vocabulary = self.model.model.config.vocab_size
        if bad := [i for i in ids if not (isinstance(i, int) and 0 <= i < vocabulary)]:
            raise ValueError(f"prompts[{index}].prompt_token_ids: {bad[0]!r} is not an id below {vocabulary}")
        return None, ids

    def _complete(
        self,
        encoded: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        show_progress: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        count = len(encoded)
        params = sampling_params or SamplingParams()
        each = [params] * count if isinstance(params, SamplingParams) else list(params)
        if len(each) != count:
            raise ValueError(f"sampling_params: {len(each)} for {count} prompts; give one for all or one per prompt")
        if priority is not None and self.config.scheduler.policy != "priority":
            raise ValueError("priority: needs scheduling_policy='priority'")
        if priority is not None and len(priority) != count:
            raise ValueError(f"priority: {len(priority)} for {count} prompts; give one per prompt")
        self._check_lengths(encoded)
        vocabulary = self.model.model.config.vocab_size
        for given in each:
            if bad := [token for token in given.logit_bias or () if token >= vocabulary]:
                raise ValueError(f"sampling_params.logit_bias: {bad[0]} is not an id below {vocabulary}")
        jobs = {}
        for i, ((text, ids), given) in enumerate(zip(encoded, each, strict=True)):
            job = _Job(str(self._next_id), text, ids, given, self.tokenizer)
            self._next_id += 1
            jobs[job.request_id] = job
            self._rank.add(self._request(job, priority[i] if priority else 0))
        try:
            with _progress(count, show_progress) as advance:
                self._run(jobs, advance)
        except BaseException as error:
            self._restart(error)
            raise
        return [job.output() for job in jobs.values()]

    def _check_lengths(self, encoded: Sequence[tuple[str | None, list[int]]]) -> None:
        """All prompts are checked before any is queued."""
        limit = self.config.scheduler.max_model_len
        for i, (_, ids) in enumerate(encoded):
            if not ids:
                raise ValueError(f"prompts[{i}]: is empty")
            if len(ids) >= limit:
                raise ValueError(f"prompts[{i}]: {len(ids)} tokens leave no room within max_model_len = {limit}")

    def _request(self, job: _Job, priority: int) -> Request:
        first, *further = self.model.eos_token_ids or (None,)
        params = job.params
        if further and not params.ignore_eos:
            params = msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, *further))
        return Request(
            job.request_id,
            StoredTokens(job.prompt_token_ids),
            params,
            arrival=time.monotonic(),
            priority=priority,
            eos_token_id=first,
        )

    def _run(self, jobs: dict[str, _Job], advance: Any) -> None:
        """Step until every job has finished."""
        left = len(jobs)
        while left:
            self._rank.begin(time.monotonic())
            self._rank.launch_alone()
            result = self._rank.collect()
            self._forward_s += result.forward_s
            self._draft_s += result.draft_s
            for output in self._rank.finish(result, time.monotonic()):
                job = jobs.get(output.request_id)
                # A request that a stop string ended still reports its abort.
                if job is None or job.finish_reason is not None:
                    continue
                stopped = job.take(output)
                if stopped and output.finish_reason is None:
                    self._rank.abort(job.request_id)
                if job.finish_reason is not None:
                    left -= 1
                    advance(1)


class _Job:
    """A prompt on its way to a `RequestOutput`."""

    def __init__(
        self, request_id: str, prompt: str | None, ids: list[int], params: SamplingParams, tokenizer: Any
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = ids
        self.params = params
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self._tokenizer = tokenizer
        self._scored: list[TokenLogprobs] = []
        self._detokenizer = Detokenizer(tokenizer, params.stop, min_tokens=params.min_tokens)

    def take(self, output: StepOutput) -> bool:
        """Append what a step brought, token by token; True if a stop string ended the output."""
        tokens = output.token_ids
        # A token that ends the output by its id is in token_ids, and not in the text.
        silent = len(tokens) - 1 if output.finish_reason == "stop" else len(tokens)
        for i, token in enumerate(tokens):
            self.token_ids.append(token)
            if output.logprobs is not None:
                self._scored.append(output.logprobs[i])
            if i < silent and self._detokenizer.push(token):
                return self._stop_at_string()
        if output.finish_reason is None:
            return False
        if self._detokenizer.flush():
            return self._stop_at_string()
        self.finish_reason, self.stop_reason, self.error = output.finish_reason, output.stop_reason, output.error
        return False

    def _stop_at_string(self) -> bool:
        self.finish_reason, self.stop_reason = "stop", self._detokenizer.stop_reason
        return True

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def output(self) -> RequestOutput:
        assert self.finish_reason is not None
        asked = self.params.logprobs is not None
        completion = CompletionOutput(
            0,
            self._detokenizer.text,
            tuple(self.token_ids),
            self.finish_reason,
            self.stop_reason,
            self.error,
            sum(entry.logprob for entry in self._scored) if asked else None,
            [position_logprobs(entry, self._decode) for entry in self._scored] if asked else None,
        )
        return RequestOutput(self.request_id, self.prompt, tuple(self.prompt_token_ids), [completion])


@contextmanager
def _progress(total: int, show: bool) -> Iterator[Any]:
    """A progress bar on standard error, which advances by requests."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show, transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda n: bar.advance(task, n)
