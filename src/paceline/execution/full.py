# SPDX-License-Identifier: Apache-2.0
"""The backends of FULL steps: what the executor gives them, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.execution.batch import Batch
from paceline.execution.connector import ConnectorSteps
from paceline.models.llama import Taps
from paceline.models.static import StaticMixture


class Verdict(NamedTuple):
    """How a row was verified: drafts ``accepted``, and the model's own ``token`` behind them.

    ``finite``: all its hidden states are; ``sound``: so is the best logit of each of its positions.
    """

    accepted: int
    token: int
    finite: bool
    sound: bool


@dataclass(frozen=True, slots=True)
class Computed:
    """What a forward gave, the rows of the batch one after the other.

    ``hidden`` [tokens, hidden_size], after the final norm. ``logits`` [tokens, vocab_size], float32, and ``verdicts``,
    by row, as for rows that choose the likeliest token: None where both are left to the executor. All of it is
    overwritten by the next step.
    """

    hidden: Tensor
    logits: Tensor | None = None
    verdicts: list[Verdict] | None = None


class FullSteps(Protocol):
    """Computes FULL steps: rows of W tokens each, in sizes that were fixed when it was made."""

    def forward(self, batch: Batch, size: int, taps: Taps | None, connector: ConnectorSteps | None) -> Computed | None:
        """A step of at most ``size`` tokens; ``taps``, if given, is filled.

        None: these rows are not what it was made for, and nothing was done; the general path computes them.
        """
        ...

    def idle(self, size: int) -> None:
        """The share in a step of ``size`` tokens of a rank without rows, if there is any."""
        ...


class StaticSteps:
    """`paceline.models.static` as a backend. It computes no row of padding, so it asks for no size."""

    def __init__(self, mixture: StaticMixture) -> None:
        self._mixture = mixture

    def forward(self, batch: Batch, size: int, taps: Taps | None, connector: ConnectorSteps | None) -> Computed | None:
        """See `FullSteps.forward`."""
        rows = [(span.start, span.n, span.table) for span in batch.spans]
        around = None if connector is None else connector.attend
        tokens, positions = torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions)
        hidden = self._mixture.forward(tokens, positions, rows, taps, around)
        return None if hidden is None else Computed(hidden)

    def idle(self, size: int) -> None:
        """See `FullSteps.idle`."""
        self._mixture.idle()
