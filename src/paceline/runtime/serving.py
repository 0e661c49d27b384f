# SPDX-License-Identifier: Apache-2.0
"""Builds the engine that `paceline serve` runs in a process of its own."""

from __future__ import annotations

import time
from typing import Any

from paceline.core.config import EngineConfig, SchedulerConfig, require_int
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.scheduler import Scheduler
from paceline.engine.messages import ModelInfo
from paceline.engine.rank import Executor, Rank
from paceline.execution.runner import ModelExecutor
from paceline.models.llama import Llama
from paceline.models.registry import load_model
from paceline.models.spec import LoadedModel
from paceline.runtime.engine_process import BuiltEngine
from paceline.runtime.options import block_bytes, engine_config, load_draft, speculation_config

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
    quantization = chosen.pop("quantization", None)
    speculation = speculation_config(chosen.pop("speculative_config"))
    _check_early(chosen)
    loaded = load_model(name, dtype, quantization)
    draft = load_draft(speculation, dtype, quantization)
    if chosen["max_model_len"] == "auto":
        chosen["max_model_len"] = _fitting_length(
            loaded, draft, chosen, speculation.width + speculation.lookahead_tokens
        )
    config = engine_config(loaded.model.config, loaded.model.dtype, speculation=speculation, draft=draft, **chosen)
    executor = ModelExecutor(loaded.model, config, seed=seed, draft=draft)
    warm_up(config, executor)
    return BuiltEngine(Rank(Scheduler(config), executor), model_info(loaded, config))


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


def _fitting_length(loaded: LoadedModel, draft: Llama | None, options: dict[str, Any], slack: int) -> int | None:
    """The longest request, in tokens, that models and KV cache hold; None (the model's) if the cache's size is open."""
    model, block_size = loaded.model.config, options["block_size"]
    blocks, memory = options["num_gpu_blocks_override"], options["kv_cache_memory_bytes"]
    if blocks is None:
        if memory is None:
            return None if draft is None else min(model.max_position, draft.config.max_position)
        blocks = memory // block_bytes(model, loaded.model.dtype, draft, block_size)
    context = model.max_position if draft is None else min(model.max_position, draft.config.max_position)
    return min(context, max(2, (blocks - 1) * block_size - slack))


def warm_up(config: EngineConfig, executor: Executor) -> None:
    """Run a short request, so that the first real one pays for nothing that happens once.

    Its scheduler is thrown away: no statistics and no cached block remain.
    """
    rank = Rank(Scheduler(config), executor)
    output = min(WARM_UP_TOKENS, config.scheduler.max_model_len - 1)
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    rank.add(Request("warm-up", StoredTokens((0,)), params))
    while rank.has_work:
        rank.step(time.monotonic())


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
        warnings=tuple(config.warnings()),
    )
