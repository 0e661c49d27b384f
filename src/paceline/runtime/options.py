# SPDX-License-Identifier: Apache-2.0
"""From the options that users of an engine write to the frozen configuration that its scheduler reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from paceline.core.config import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    GraphConfig,
    GraphMode,
    LoadFailurePolicy,
    Policy,
    SchedulerConfig,
    SpeculationConfig,
    require,
    require_int,
)
from paceline.execution.drafter import DraftModel
from paceline.execution.kvcache import KVCache
from paceline.models.device import arithmetic_on, resolve_device
from paceline.models.eagle3_checkpoint import load_eagle3
from paceline.models.experts import ExpertExchange
from paceline.models.llama import Llama
from paceline.models.registry import load_model
from paceline.models.spec import LlamaConfig, LoadedModel, resolve_dtype
from paceline.models.static import StaticMixture
from paceline.parallel.exchange import GroupExchange

DEFAULT_KV_CACHE_BYTES = 1 << 29
"""Memory for the KV cache when nothing is said, or what one request of full length needs if that is more."""

_GRAPH_KEYS = {"cudagraph_mode": "mode", "cudagraph_capture_sizes": "capture_sizes"}
_KEYS = sorted(f.name for f in fields(SpeculationConfig) if f.name not in ("lookahead", "draft_slots"))


def speculation_config(given: Mapping[str, Any] | None) -> SpeculationConfig:
    """Read ``speculative_config``: vLLM's keys, and ``pad_resumed``.

    Of ``prompt_lookup_min`` and ``prompt_lookup_max``, one alone stands for both.

    Raises:
        ConfigError: an unknown key, a value out of range, or a method without a drafter.
    """
    if given is None:
        return SpeculationConfig()
    for key in given:
        require(key in _KEYS, f"speculative_config.{key}", f"unknown key; known are {', '.join(_KEYS)}")
    values = dict(given)
    method = values.get("method")
    known = method in ("ngram", "draft_model", "eagle3")
    require(known, "speculative_config.method", f"{method!r} is not supported; use ngram, draft_model or eagle3")
    model = values.get("model")
    if method != "ngram":
        require(isinstance(model, str) and model != "", "speculative_config.model", f"method {method!r} needs one")
    else:
        require(model is None, "speculative_config.model", "method 'ngram' has no model")
    lookups = [values[key] for key in ("prompt_lookup_min", "prompt_lookup_max") if key in values]
    if len(lookups) == 1:
        values["prompt_lookup_min"] = values["prompt_lookup_max"] = lookups[0]
    if values.get("synthetic_acceptance_rates") is not None:
        values["synthetic_acceptance_rates"] = tuple(values["synthetic_acceptance_rates"])
    return SpeculationConfig(**values)


def graph_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Read ``compilation_config``, vLLM's ``cudagraph_mode`` and ``cudagraph_capture_sizes``: fields of `GraphConfig`.

    Raises:
        ConfigError: an unknown key, or a value that cannot be honoured.
    """
    values: dict[str, Any] = {}
    for key, value in (given or {}).items():
        known = ", ".join(sorted(_GRAPH_KEYS))
        require(key in _GRAPH_KEYS, f"compilation_config.{key}", f"unknown key; known are {known}")
        if key == "cudagraph_capture_sizes":
            require(isinstance(value, list), f"compilation_config.{key}", f"must be a list of integers, got {value!r}")
        values[_GRAPH_KEYS[key]] = tuple(value) if isinstance(value, list) else value
    try:
        GraphConfig(**values)
    except ConfigError as error:
        name = {field: key for key, field in _GRAPH_KEYS.items()}[error.field.removeprefix("graphs.")]
        raise ConfigError(f"compilation_config.{name}", error.problem) from None
    return values


def graph_config(asked: Mapping[str, Any], model: Llama, speculation: SpeculationConfig) -> GraphConfig:
    """The decode graphs of ``model``: as ``asked`` for (see `graph_options`), in its default mode if none was.

    Raises:
        ConfigError: sizes of which none would be used.
    """
    mode = asked.get("mode") or default_graph_mode(model, speculation)
    default = "" if "mode" in asked else ", the default for this model"
    require(
        mode != "NONE" or "capture_sizes" not in asked,
        "compilation_config.cudagraph_capture_sizes",
        f"nothing is captured with cudagraph_mode NONE{default}; leave them out, or ask for FULL_DECODE_ONLY",
    )
    return GraphConfig(mode=mode, capture_sizes=asked.get("capture_sizes"))


def default_graph_mode(model: Llama, speculation: SpeculationConfig) -> GraphMode:
    """The mode that measured faster for ``model`` where it runs (docs/performance.md, "Decode graphs").

    On a CPU, FULL pays where a static backend computes its steps, whatever drafts. Without one it saves ranks that
    exchange over a network the collective that tells how many tokens go where; but it widens rows to the verifier's
    width where prompt lookup found no draft, and on a CPU these cost as much as real ones. On a GPU the default is what
    graphs are for, and has not been measured.
    """
    if model.device.type != "cpu" or StaticMixture.supports(model):
        return "FULL_DECODE_ONLY"
    return "FULL_DECODE_ONLY" if isinstance(model.exchange, GroupExchange) and speculation.method != "ngram" else "NONE"


def load_target(
    model: str | Path | LoadedModel, dtype: str, quantization: str | None, device: str
) -> tuple[LoadedModel, str, str | None]:
    """The model, loaded by these options or found to have been, with the dtype and quantization for a draft model.

    Raises:
        ConfigError: an option that cannot be honoured here, or that differs from how the model was loaded.
        UnsupportedModel: it cannot be found or run.
    """
    if not isinstance(model, LoadedModel):
        where = resolve_device(device)
        dtype, quantization = arithmetic_on(where, dtype, quantization)
        return load_model(model, dtype, quantization, device=where), dtype, quantization
    where, stored, kept = model.model.device, model.model.dtype, model.model.quantization or "none"
    require(device in ("auto", where.type), "device", f"the model was loaded on {where.type}, not {device}")
    require(resolve_dtype(dtype, stored) == stored, "dtype", f"the model was loaded as {stored}, not {dtype}")
    require(quantization in (None, kept), "quantization", f"the model was loaded with {kept}, not {quantization}")
    return model, dtype, quantization


def load_draft(
    speculation: SpeculationConfig,
    target: Llama,
    dtype: str,
    quantization: str | None,
    *,
    parallel: ExpertExchange | None = None,
    device: torch.device | None = None,
) -> DraftModel | None:
    """What drafts for ``target``, None for methods without a model.

    A draft model is loaded by the same options as the target was, where ``dtype`` auto and ``quantization`` None go by
    how its own weights are stored. An EAGLE-3 head runs in the target's arithmetic. ``parallel``: what experts are
    shared through. ``device``: where the target is; None: on the CPU.

    Raises:
        UnsupportedModel: it cannot be found or run.
    """
    if speculation.model is None:
        return None
    if speculation.method == "eagle3":
        folder = Path(speculation.model).expanduser()
        return load_eagle3(folder, target, parallel=parallel)
    return load_model(speculation.model, dtype, quantization, parallel=parallel, device=device).model


def engine_config(
    model: LlamaConfig,
    dtype: torch.dtype,
    *,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    long_prefill_token_threshold: int,
    scheduling_policy: Policy,
    block_size: int,
    num_gpu_blocks_override: int | None,
    kv_cache_memory_bytes: int | None,
    enable_prefix_caching: bool,
    speculation: SpeculationConfig,
    draft: DraftModel | None = None,
    graphs: GraphConfig | None = None,
    load_failure_policy: LoadFailurePolicy = "fail",
) -> EngineConfig:
    """The configuration of one rank that runs ``model``, with its KV pool sized in blocks.

    A block of the pool is one of the model and, where there is a ``draft`` model, one of that.

    Raises:
        ConfigError: a value that cannot be honoured.
    """
    length = model.max_position if max_model_len is None else max_model_len
    require(
        length <= model.max_position,
        "max_model_len",
        f"the model's context is {model.max_position} tokens, got {length}",
    )
    require_int(block_size, 1, "block_size")
    least = length + speculation.width + speculation.lookahead_tokens
    return EngineConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=length,
            long_prefill_token_threshold=long_prefill_token_threshold,
            policy=scheduling_policy,
            load_failure_policy=load_failure_policy,
        ),
        cache=CacheConfig(
            num_blocks=_num_blocks(
                1 + -(-least // block_size),
                block_bytes(model, dtype, draft, block_size),
                num_gpu_blocks_override,
                kv_cache_memory_bytes,
            ),
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
        ),
        speculation=speculation,
        graphs=graphs or GraphConfig(),
    )


def block_bytes(model: LlamaConfig, dtype: torch.dtype, draft: DraftModel | None, block_size: int) -> int:
    """Bytes of one KV block of the pool."""
    drafting = 0 if draft is None else KVCache.block_bytes(draft.config, block_size, draft.dtype)
    return KVCache.block_bytes(model, block_size, dtype) + drafting


def _num_blocks(least: int, block_bytes: int, override: int | None, memory_bytes: int | None) -> int:
    """Blocks of the pool, the null block included; ``least`` hold one request of full length."""
    if override is not None:
        if memory_bytes is not None:
            raise ConfigError("kv_cache_memory_bytes", "give either this or num_gpu_blocks_override")
        return override
    if memory_bytes is None:
        return max(least, DEFAULT_KV_CACHE_BYTES // block_bytes)
    require_int(memory_bytes, 1, "kv_cache_memory_bytes")
    require(
        memory_bytes >= least * block_bytes,
        "kv_cache_memory_bytes",
        f"one request of max_model_len tokens needs {least * block_bytes}; raise this or lower max_model_len",
    )
    return memory_bytes // block_bytes
