# SPDX-License-Identifier: Apache-2.0
"""What a request does to its logits before the temperature: biases, stop ids it may not say yet, penalties."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import numpy as np
import torch
from torch import Tensor

from paceline.core.request import SamplingParams
from paceline.execution.kvcache import Array, placed


class Adjustments:
    """The changes that one request makes to its logits; `of` gives None for a request that makes none.

    They depend on the request's tokens alone. Work is proportional to these, not to the vocabulary.
    """

    def __init__(self, params: SamplingParams, stop_ids: AbstractSet[int]) -> None:
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._repetition = params.repetition_penalty
        self._min_tokens = params.min_tokens
        self._stop_ids = np.array(sorted(stop_ids), dtype=np.int64)
        bias = params.logit_bias or {}
        self._biased = torch.tensor(list(bias), dtype=torch.int64)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32)
        self._prompt: Array | None = None

    @staticmethod
    def of(params: SamplingParams, stop_ids: AbstractSet[int]) -> Adjustments | None:
        """None where the logits stay as they are."""
        penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        delayed = params.min_tokens and stop_ids
        return Adjustments(params, stop_ids) if penalised or delayed or params.logit_bias else None

    def apply(self, logits: Tensor, prompt: Array, output: Array) -> None:
        """Change the ``logits`` [vocabulary] of the token that follows ``prompt`` and ``output``, in place.

        The order is bias, mask, repetition, frequency, presence. Repetition divides positive logits of tokens seen in
        prompt or output by the penalty and multiplies others (Keskar et al., "CTRL", 2019); frequency subtracts per
        occurrence in the output and presence once.
        """
        if len(self._biased):
            logits[self._biased.to(logits.device)] += self._bias.to(logits.device)
        if len(output) < self._min_tokens:
            # An id past the vocabulary cannot be said anyway.
            logits[placed(self._stop_ids[self._stop_ids < len(logits)], logits.device)] = -torch.inf
        if self._repetition == 1.0 and not self._frequency and not self._presence:
            return
        ids, counts = np.unique(output, return_counts=True)
        if self._repetition != 1.0:
            self._repeat(logits, prompt, ids)
        if len(ids) and (self._frequency or self._presence):
            cost = self._frequency * placed(counts, logits.device).to(torch.float32) + self._presence
            logits[placed(ids, logits.device)] -= cost

    def _repeat(self, logits: Tensor, prompt: Array, output_ids: Array) -> None:
        if self._prompt is None:
            self._prompt = np.unique(prompt)
        known = self._prompt
        at = np.searchsorted(known, output_ids)
        new = output_ids[known[np.minimum(at, len(known) - 1)] != output_ids] if len(known) else output_ids
        seen = placed(np.concatenate((known, new)), logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / self._repetition, values * self._repetition)
