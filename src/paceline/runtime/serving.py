# SPDX-License-Identifier: Apache-2.0
"""Builds the engine that `paceline serve` runs in a process of its own."""

from __future__ import annotations

import time
from typing import Any

from paceline.connectors.config import kv_transfer_config
from paceline.core.config import ConfigError, EngineConfig, SchedulerConfig, require_int
from paceline.core.graphs import GraphDispatcher
from paceline.core.lockstep import agree
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.scheduler import Scheduler
from paceline.engine.messages import ModelInfo
from paceline.engine.rank import Executor, Rank, StepCounts
from paceline.execution.drafter import DraftModel
from paceline.execution.runner import ModelExecutor
from paceline.models.device import arithmetic_on, resolve_device
from paceline.models.registry import load_model
from paceline.models.spec import LoadedModel
from paceline.runtime.connecting import connector_halves
from paceline.runtime.engine_process import BuiltEngine
from paceline.runtime.gpu_memory import asked_utilization, cache_bytes
from paceline.runtime.joining import JoinedLine
from paceline.runtime.options import (
    block_bytes,
    engine_config,
    graph_config,
    graph_options,
    load_draft,
    speculation_config,
)

FACTORY = f"{__name__}:build_engine"
WARM_UP_TOKENS = 2
"""Output tokens of the request that is run before the first real one: a prefill and a decode step."""


def build_engine(options: dict[str, Any]) -> BuiltEngine:
    """Load a model and compose its rank.

    Args:
        options: the keyword arguments of `paceline.LLM`, its model among them. ``max_model_len`` may be ``auto``:
            the model's context, or what the KV cache holds if that is less.

    Raises:
        ConfigError: an option that cannot be honoured; the error names it.
        UnsupportedModel: the model cannot be found or run.
    """
    chosen = dict(options)
    name, dtype, seed = chosen.pop("model"), chosen.pop("dtype"), chosen.pop("seed")
    quantization, place = chosen.pop("quantization", None), chosen.pop("data_parallel", {})
    device = resolve_device(
        chosen.pop("device", "auto"), local_rank=place.get("local_rank", 0), local_ranks=place.get("local_ranks", 1)
    )
    dtype, quantization = arithmetic_on(device, dtype, quantization)
    sizes = chosen["kv_cache_memory_bytes"], chosen["num_gpu_blocks_override"]
    utilization = asked_utilization(chosen.pop("gpu_memory_utilization", None), device, sizes)
    asked_graphs = graph_options(chosen.pop("compilation_config", None))
    transfer = kv_transfer_config(chosen.pop("kv_transfer_config", None))
    speculation = speculation_config(chosen.pop("speculative_config"))
    _check_early(chosen)
    line = JoinedLine.join(place, device)
    exchange = None if line is None else line.exchange
    loaded = load_model(name, dtype, quantization, parallel=exchange, device=device)
    draft = load_draft(speculation, loaded.model, dtype, quantization, parallel=exchange, device=device)
    mixtures = [model for model in (loaded.model, draft) if model is not None and model.exchange is not None]
    if place.get("enable_expert_parallel") and not mixtures:
        raise ConfigError("enable_expert_parallel", "this model has no experts; leave it out")
    if utilization is not None:
        memory = cache_bytes(loaded.model, speculation.width, chosen, utilization)
        chosen["kv_cache_memory_bytes"] = memory if line is None else line.least(memory)
    if chosen["max_model_len"] == "auto":
        chosen["max_model_len"] = _fitting_length(
            loaded, draft, chosen, speculation.width + speculation.lookahead_tokens
        )
    config = engine_config(
        loaded.model.config,
        loaded.model.dtype,
        speculation=speculation,
        draft=draft,
        graphs=graph_config(asked_graphs, loaded.model, speculation),
        load_failure_policy="fail" if transfer is None else transfer.kv_load_failure_policy,
        **chosen,
    )
    # Ranks that are given the same prompt must not draw the same numbers.
    number = place.get("rank", 0)
    seed += number
    beside_scheduler, beside_cache = connector_halves(transfer, config, seed, number)
    # First of all ranks are compared: on GPUs the executor captures graphs, in collectives whose sizes must agree.
    in_step = None if line is None else line.begin(loaded, config)
    executor = ModelExecutor(loaded.model, config, seed=seed, draft=draft, connector=beside_cache)
    warm_up(config, executor, ranks=1 if line is None else line.size)
    executor.steps = StepCounts()
    rank = Rank(Scheduler(config, beside_scheduler), executor)
    return BuiltEngine(rank, model_info(loaded, config), in_step, executor.shutdown)


def _check_early(options: dict[str, Any]) -> None:
    """What is wrong whatever the model is said before it is loaded."""
    auto = options["max_model_len"] == "auto"
    SchedulerConfig(
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
        long_prefill_token_threshold=options["long_prefill_token_threshold"],
        policy=options["scheduling_policy"],
        **({} if auto else {"max_model_len": options["max_model_len"]}),
    )
    require_int(options["block_size"], 1, "block_size")
    for name in ("kv_cache_memory_bytes", "num_gpu_blocks_override"):
        if options[name] is not None:
            require_int(options[name], 1, name)


def _fitting_length(loaded: LoadedModel, draft: DraftModel | None, options: dict[str, Any], slack: int) -> int | None:
    """The longest request, in tokens, that models and KV cache hold; None (the model's) if the cache's size is open."""
    model, block_size = loaded.model.config, options["block_size"]
    blocks, memory = options["num_gpu_blocks_override"], options["kv_cache_memory_bytes"]
    if blocks is None:
        if memory is None:
            return None if draft is None else min(model.max_position, draft.config.max_position)
        blocks = memory // block_bytes(model, loaded.model.dtype, draft, block_size)
    context = model.max_position if draft is None else min(model.max_position, draft.config.max_position)
    return min(context, max(2, (blocks - 1) * block_size - slack))


def warm_up(config: EngineConfig, executor: Executor, *, ranks: int = 1) -> None:
    """Run a short request, so that the first real one pays for nothing that happens once.

    Its scheduler is thrown away: no statistics and no cached block remain. All ``ranks`` that share collectives do
    this at the same time; their votes are the same, so none need be sent.
    """
    rank = Rank(Scheduler(config), executor)
    graphs = GraphDispatcher(config)
    step = 0
    output = min(WARM_UP_TOKENS, config.scheduler.max_model_len - 1)
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    rank.add(Request("warm-up", StoredTokens((0,)), params))
    while rank.has_work:
        rank.begin(time.monotonic())
        rank.launch(agree([rank.vote(step, 0)] * ranks, graphs))
        rank.finish(rank.collect(), time.monotonic())
        step += 1


def model_info(loaded: LoadedModel, config: EngineConfig) -> ModelInfo:
    """What a front needs to know of a loaded model."""
    tokenizer = loaded.tokenizer
    return ModelInfo(
        name=loaded.name,
        tokenizer=tokenizer.backend.to_str(),
        vocab_size=loaded.model.config.vocab_size,
        max_model_len=config.scheduler.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        chat_template=tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        block_size=config.cache.block_size,
        num_blocks=config.cache.num_blocks,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        scheduling_policy=config.scheduler.policy,
        num_speculative_tokens=config.speculation.num_speculative_tokens,
        cudagraph_mode=config.graphs.mode,
        warnings=tuple(config.warnings()),
    )
