# SPDX-License-Identifier: Apache-2.0
"""``paceline serve``: a model behind the OpenAI API. Flags are named as vLLM's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from paceline.cli.output import CommandError

Names = Annotated[
    list[str] | None,
    Parameter(consume_multiple=True, negative="", help="Names under which clients find the model; its own by default."),
]
Keys = Annotated[
    list[str] | None,
    Parameter(
        consume_multiple=True, negative="", help="Keys of which a client must send one; by default none is needed."
    ),
]


def serve(  # size: most of it is the list of flags, each with its help
    model: Annotated[str, Parameter(help="smollm2, a .gguf file, or a Hugging Face folder.")] = "smollm2",
    *,
    host: Annotated[str, Parameter(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port to listen on; 0 for any free one.")] = 8000,
    dtype: Annotated[str, Parameter(help="Of weights and KV cache: auto, float32 or bfloat16.")] = "auto",
    quantization: Annotated[
        Literal["int8", "none"] | None,
        Parameter(help="Of the weights; by default int8 if they are stored quantised and dtype is auto."),
    ] = None,
    max_model_len: Annotated[
        int | Literal["auto"],
        Parameter(help="Tokens of a prompt and its output; auto: the model's context, or what the KV cache holds."),
    ] = "auto",
    max_num_seqs: Annotated[int, Parameter(help="Requests that run at the same time.")] = 128,
    max_num_batched_tokens: Annotated[int, Parameter(help="Tokens that one step computes at most.")] = 2048,
    long_prefill_token_threshold: Annotated[
        int, Parameter(help="Prompt tokens that one request may compute in a step beside others; 0: no limit.")
    ] = 0,
    scheduling_policy: Annotated[Literal["fcfs", "priority"], Parameter(help="Order of the queue.")] = "fcfs",
    block_size: Annotated[int, Parameter(help="Tokens of a KV block.")] = 16,
    kv_cache_memory_bytes: Annotated[int | None, Parameter(help="Memory for the KV cache; 512 MiB by default.")] = None,
    num_gpu_blocks_override: Annotated[int | None, Parameter(help="KV blocks, instead of their memory.")] = None,
    enable_prefix_caching: Annotated[bool, Parameter(help="Share the KV of equal beginnings.")] = True,
    speculative_config: Annotated[
        str | None,
        Parameter(
            help="JSON: method (ngram, draft_model), num_speculative_tokens, model, prompt_lookup_min,"
            " prompt_lookup_max, rejection_sample_method, synthetic_acceptance_rates, pad_resumed."
        ),
    ] = None,
    seed: Annotated[int, Parameter(help="Makes sampled requests without a seed of their own repeatable.")] = 0,
    tensor_parallel_size: Annotated[int, Parameter(help="1.")] = 1,
    served_model_name: Names = None,
    api_key: Keys = None,
    max_num_queued_reqs: Annotated[
        int | None,
        Parameter(help="Requests in flight, waiting and running, above which new ones get 503; no limit by default."),
    ] = None,
    stream_interval: Annotated[int, Parameter(help="Tokens per chunk of a stream, after the first.")] = 1,
    shutdown_timeout: Annotated[
        float | None,
        Parameter(help="Seconds that requests in flight may take after SIGTERM; by default as long as they need."),
    ] = None,
) -> None:
    """Serve a model behind the OpenAI API: completions, chat, streams, metrics.

    The engine runs in a process of its own. SIGTERM lets requests in flight finish; a second one ends them.
    """
    try:
        from paceline.runtime.engine_process import EngineFailed, EngineRefused
        from paceline.server.serve import ServeOptions
        from paceline.server.serve import serve as run
    except ModuleNotFoundError as error:
        raise CommandError(f"serving needs {error.name}: pip install 'paceline[engine,serve]'") from error
    for name, value, least in (
        ("max-num-queued-reqs", max_num_queued_reqs, 0),
        ("stream-interval", stream_interval, 1),
        ("shutdown-timeout", shutdown_timeout, 0),
    ):
        if value is not None and value < least:
            raise CommandError(f"--{name}: must be at least {least}, got {value}")
    if tensor_parallel_size != 1:
        raise CommandError(f"--tensor-parallel-size: only 1 is supported, got {tensor_parallel_size}")
    # Inherited by the engine process. There, one thread computes between two products of all threads, and the front
    # needs a core as well: threads that wait by spinning, as OpenMP's do, would take it from both. A spin of some ten
    # microseconds bridges the gaps within a step, for which waking a thread takes longer (GCC's OpenMP, torch's).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    options = ServeOptions(
        engine={
            "model": str(Path(model).resolve()) if Path(model).exists() else model,
            "dtype": dtype,
            "quantization": quantization,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "long_prefill_token_threshold": long_prefill_token_threshold,
            "scheduling_policy": scheduling_policy,
            "block_size": block_size,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "num_gpu_blocks_override": num_gpu_blocks_override,
            "enable_prefix_caching": enable_prefix_caching,
            "speculative_config": _json_object(speculative_config, "--speculative-config"),
            "seed": seed,
        },
        host=host,
        port=port,
        names=tuple(served_model_name or ()),
        api_keys=tuple(api_key or ()),
        max_num_queued_reqs=max_num_queued_reqs,
        stream_interval=stream_interval,
        shutdown_timeout_s=shutdown_timeout,
    )
    try:
        status = run(options, _say)
    except (EngineRefused, EngineFailed) as error:
        raise CommandError(str(error)) from error
    if status:
        sys.exit(status)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _json_object(text: str | None, option: str) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CommandError(f"{option}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CommandError(f"{option}: must be a JSON object, got {text}")
    return value
