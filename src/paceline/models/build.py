# SPDX-License-Identifier: Apache-2.0
"""From weights to a model in the arithmetic that was asked for."""

from __future__ import annotations

import torch

from paceline.models.experts import ExpertExchange
from paceline.models.fused import FusedLlama
from paceline.models.llama import GetTensor, Llama
from paceline.models.spec import LlamaConfig, resolve_dtype, resolve_quantization
from paceline.models.static_general import Int8Mixture


def build_model(
    config: LlamaConfig,
    get: GetTensor,
    dtype: str,
    quantization: str | None,
    stored: torch.dtype,
    parallel: ExpertExchange | None = None,
    device: torch.device | None = None,
) -> Llama:
    """A model from ``get``, whose weights are stored as ``stored``, an integer type if quantised.

    float32 runs in plain torch, as a reference does; bfloat16 and int8 run on the fused path. A mixture of experts runs
    in plain torch too unless it is in int8, and its experts are spread over the ranks of ``parallel`` (None: one rank
    holds them all). On a GPU (``device``; None: the CPU) everything runs in plain torch, in float32 or bfloat16.

    Raises:
        UnsupportedModel: a weight's shape contradicts the configuration.
        ValueError: ``dtype`` or ``quantization`` is none of the known ones, or they contradict each other.
    """
    chosen = resolve_dtype(dtype, stored)
    int8 = resolve_quantization(quantization, dtype, stored) == "int8"
    if device is not None and device.type != "cpu":
        if int8:
            raise ValueError("quantization: int8 runs on CPUs only; use none, or device cpu")
        return Llama(config, chosen, _in(chosen, get, device), parallel)
    if config.experts is not None:
        if int8:
            return Int8Mixture(config, _in(torch.float32, get), parallel)
        return Llama(config, chosen, _in(chosen, get), parallel)
    if int8:
        return FusedLlama(config, get, int8=True)
    if chosen == torch.bfloat16:
        return FusedLlama(config, get, int8=False)
    return Llama(config, chosen, _in(chosen, get))


def _in(dtype: torch.dtype, get: GetTensor, device: torch.device | None = None) -> GetTensor:
    return lambda weight: get(weight).to(device=device, dtype=dtype)
