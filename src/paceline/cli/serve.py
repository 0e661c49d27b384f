# SPDX-License-Identifier: Apache-2.0
"""``paceline serve``: a model behind the OpenAI API. Flags are named as vLLM's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from paceline.cli.data_parallel import DataParallelFlags
from paceline.cli.output import CommandError, integer, integer_or_auto, json_object

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
    port: Annotated[int, Parameter(converter=integer, help="Port to listen on; 0 for any free one.")] = 8000,
    dtype: Annotated[str, Parameter(help="Of weights and KV cache: auto, float32 or bfloat16.")] = "auto",
    quantization: Annotated[
        Literal["int8", "none"] | None,
        Parameter(help="Of the weights; by default int8 if they are stored quantised and dtype is auto."),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Parameter(help="auto: a GPU for each rank where PyTorch can use one.")
    ] = "auto",
    gpu_memory_utilization: Annotated[
        float | None, Parameter(help="Of a GPU's memory, the share that a rank may use; 0.9 by default.")
    ] = None,
    max_model_len: Annotated[
        int | Literal["auto"],
        Parameter(
            converter=integer_or_auto,
            help="Tokens of a prompt and its output; auto: the model's context, or what the KV cache holds.",
        ),
    ] = "auto",
    max_num_seqs: Annotated[int, Parameter(converter=integer, help="Requests that run at the same time.")] = 128,
    max_num_batched_tokens: Annotated[
        int, Parameter(converter=integer, help="Tokens that one step computes at most.")
    ] = 2048,
    long_prefill_token_threshold: Annotated[
        int,
        Parameter(
            converter=integer, help="Prompt tokens that one request may compute in a step beside others; 0: no limit."
        ),
    ] = 0,
    scheduling_policy: Annotated[Literal["fcfs", "priority"], Parameter(help="Order of the queue.")] = "fcfs",
    block_size: Annotated[int, Parameter(converter=integer, help="Tokens of a KV block.")] = 16,
    kv_cache_memory_bytes: Annotated[
        int | None, Parameter(converter=integer, help="Memory for the KV cache; on a CPU 512 MiB by default.")
    ] = None,
    num_gpu_blocks_override: Annotated[
        int | None, Parameter(converter=integer, help="KV blocks, instead of their memory.")
    ] = None,
    enable_prefix_caching: Annotated[bool, Parameter(help="Share the KV of equal beginnings.")] = True,
    speculative_config: Annotated[
        str | None,
        Parameter(
            help="JSON: method (ngram, draft_model, eagle3), num_speculative_tokens, model, prompt_lookup_min,"
            " prompt_lookup_max, rejection_sample_method, synthetic_acceptance_rates, pad_resumed."
        ),
    ] = None,
    kv_transfer_config: Annotated[
        str | None,
        Parameter(
            help="JSON: kv_connector (DecodeBenchConnector: makes up the KV of prompts; or a class of your own, with"
            " kv_connector_module_path: docs/connectors.md), kv_role, kv_load_failure_policy (fail, recompute),"
            " kv_connector_extra_config (fill_mean, fill_std)."
        ),
    ] = None,
    seed: Annotated[
        int, Parameter(converter=integer, help="Makes sampled requests without a seed of their own repeatable.")
    ] = 0,
    tensor_parallel_size: Annotated[int, Parameter(converter=integer, help="1.")] = 1,
    compilation_config: Annotated[
        str | None,
        Parameter(
            help='JSON: cudagraph_mode ("FULL_DECODE_ONLY": decode steps in sizes that all ranks agree on, or "NONE"),'
            " cudagraph_capture_sizes (tokens). By default the mode that measured faster: FULL_DECODE_ONLY for mixtures"
            " in int8, for others whose ranks exchange over a network (unless method is ngram), and, unmeasured, on"
            " GPUs; NONE otherwise."
        ),
    ] = None,
    data_parallel_size: Annotated[
        int | None, Parameter(converter=integer, help="Ranks, each a process with the model, its KV cache and a queue.")
    ] = None,
    data_parallel_size_local: Annotated[
        int | None,
        Parameter(converter=integer, help="Ranks that run here, if not all of them."),
    ] = None,
    data_parallel_start_rank: Annotated[
        int | None,
        Parameter(converter=integer, help="The first rank here; by default 0, and with --headless what is free."),
    ] = None,
    data_parallel_rank: Annotated[
        int | None, Parameter(converter=integer, help="The one rank of this server, which an outer balancer feeds.")
    ] = None,
    data_parallel_address: Annotated[
        str | None, Parameter(help="Where ranks of several machines meet: that of rank 0. Only for trusted networks.")
    ] = None,
    data_parallel_rpc_port: Annotated[
        int | None, Parameter(converter=integer, help="The port there; the next one is used as well.")
    ] = None,
    data_parallel_hybrid_lb: Annotated[
        bool, Parameter(negative="", help="This server shares requests out among its own ranks only.")
    ] = False,
    data_parallel_backend: Annotated[
        Literal["mp", "ray"], Parameter(help="mp: ranks run here; ray: where a Ray cluster has room (RAY_ADDRESS).")
    ] = "mp",
    headless: Annotated[bool, Parameter(negative="", help="Run ranks that the server of rank 0 serves.")] = False,
    enable_expert_parallel: Annotated[
        bool, Parameter(negative="", help="Share the experts of a mixture out among the ranks, which then keep step.")
    ] = False,
    distributed_timeout_seconds: Annotated[
        float | None, Parameter(help="How long a rank waits for the slowest; 600, and longer than any step.")
    ] = None,
    served_model_name: Names = None,
    api_key: Keys = None,
    max_num_queued_reqs: Annotated[
        int | None,
        Parameter(
            converter=integer,
            help="Requests in flight, waiting and running, above which new ones get 503; no limit by default.",
        ),
    ] = None,
    stream_interval: Annotated[
        int, Parameter(converter=integer, help="Tokens per chunk of a stream, after the first.")
    ] = 1,
    shutdown_timeout: Annotated[
        float | None,
        Parameter(help="Seconds that requests in flight may take after SIGTERM; by default as long as they need."),
    ] = None,
) -> None:
    """Serve a model behind the OpenAI API: completions, chat, streams, metrics.

    Each rank of the engine runs in a process of its own; they share the cores out among their threads. SIGTERM lets
    requests in flight finish; a second one ends them. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT stand for
    --data-parallel-rank, -size, -address and -rpc-port where these are not given.
    """
    try:
        from paceline.runtime.engine_group import EngineFailed, EngineRefused
        from paceline.runtime.headless import run_headless
        from paceline.server.serve import ServeOptions
        from paceline.server.serve import serve as run
    except ModuleNotFoundError as error:
        raise CommandError(f"serving needs {error.name}: pip install 'paceline[engine,serve]'") from error
    _require_at_least(0, "max-num-queued-reqs", max_num_queued_reqs)
    _require_at_least(1, "stream-interval", stream_interval)
    _require_at_least(0, "shutdown-timeout", shutdown_timeout)
    if tensor_parallel_size != 1:
        raise CommandError(f"--tensor-parallel-size: only 1 is supported, got {tensor_parallel_size}")
    ranks, data_parallel = (
        DataParallelFlags(
            size=data_parallel_size,
            size_local=data_parallel_size_local,
            start_rank=data_parallel_start_rank,
            rank=data_parallel_rank,
            address=data_parallel_address,
            rpc_port=data_parallel_rpc_port,
            headless=headless,
            hybrid_lb=data_parallel_hybrid_lb,
            backend=data_parallel_backend,
            enable_expert_parallel=enable_expert_parallel,
            timeout_s=distributed_timeout_seconds,
        )
        .with_environment(os.environ)
        .placement()
    )
    _let_threads_sleep()
    options = ServeOptions(
        engine={
            "model": str(Path(model).resolve()) if Path(model).exists() else model,
            "dtype": dtype,
            "quantization": quantization,
            "device": device,
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "long_prefill_token_threshold": long_prefill_token_threshold,
            "scheduling_policy": scheduling_policy,
            "block_size": block_size,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "num_gpu_blocks_override": num_gpu_blocks_override,
            "enable_prefix_caching": enable_prefix_caching,
            "speculative_config": json_object(speculative_config, "--speculative-config"),
            "kv_transfer_config": json_object(kv_transfer_config, "--kv-transfer-config"),
            "seed": seed,
            "compilation_config": json_object(compilation_config, "--compilation-config"),
            "data_parallel": data_parallel,
        },
        data_parallel_size=ranks,
        data_parallel_backend=data_parallel_backend,
        host=host,
        port=port,
        names=tuple(served_model_name or ()),
        api_keys=tuple(api_key or ()),
        max_num_queued_reqs=max_num_queued_reqs,
        stream_interval=stream_interval,
        shutdown_timeout_s=shutdown_timeout,
    )
    try:
        status = run_headless(options.factory, options.engine, ranks, _say) if headless else run(options, _say)
    except (EngineRefused, EngineFailed) as error:
        raise CommandError(str(error)) from error
    if status:
        sys.exit(status)


def _require_at_least(least: int, name: str, value: float | None) -> None:
    if value is not None and value < least:
        raise CommandError(f"--{name}: must be at least {least}, got {value}")


def _let_threads_sleep() -> None:
    """How the threads of the engine processes, which inherit it, wait for each other.

    In float32 one thread computes between two products of all threads, and the front needs a core as well: threads that
    wait by spinning, as OpenMP's do, would take it from both. A spin of some ten microseconds bridges the gaps within a
    step, for which waking a thread takes longer (GCC's OpenMP, torch's).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
