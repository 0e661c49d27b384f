# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: the router, the experts that a rank holds, and the seam through which ranks share them.

Attention is data-parallel: each rank has its own tokens. Experts are spread over the ranks: a token's hidden state
travels to the ranks that hold its experts, and their weighted sums travel back. `ExpertExchange` is that journey; its
implementations for several ranks are in `paceline.parallel`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.models.spec import ExpertConfig


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank holds which experts: runs of equal length in rank order, the first ranks one more if need be."""

    num_experts: int
    ranks: int

    def experts(self, rank: int) -> range:
        """The experts that ``rank`` holds; none for the last ranks where there are more ranks than experts."""
        share, extra = divmod(self.num_experts, self.ranks)
        first = rank * share + min(rank, extra)
        return range(first, first + share + (rank < extra))

    def bounds(self) -> list[int]:
        """First expert of each rank, and the number of experts at the end."""
        return [self.experts(rank).start for rank in range(self.ranks)] + [self.num_experts]


@dataclass(frozen=True, slots=True)
class Routed:
    """Tokens with the experts that they chose.

    ``hidden`` [tokens, hidden_size]; ``experts`` [tokens, top_k] int64, num_experts standing for none; ``weights``
    [tokens, top_k] float32.
    """

    hidden: Tensor
    experts: Tensor
    weights: Tensor


class ExpertExchange(Protocol):
    """Takes tokens to the ranks that hold their experts, and the results back, in lock-step.

    `begin` opens a forward pass; within it each mixture layer calls `dispatch` and `combine` once. All ranks make the
    same calls in the same order, whatever they hold.
    """

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def inert(self) -> Tensor | None:
        """What `begin` was given last."""
        ...

    def begin(self, mode: int, size: int, inert: Tensor | None = None) -> None:
        """Set the terms of the next forward pass; they hold until the next call.

        Args:
            mode: FULL or NONE of `core.graphs`, the same on all ranks.
            size: FULL: the most tokens that any rank brings, which fixes the size of every transfer; NONE: 0.
            inert: bool [tokens of this pass], True for rows of padding, of a dummy, or that failed: they choose no
                expert, so that only a shared expert computes them. None: there are no such rows.
        """
        ...

    def dispatch(self, tokens: Routed, placement: Placement) -> Routed:
        """This rank's tokens in, the tokens of all ranks that experts of this rank may have to compute out.

        A choice of an expert that another rank holds may be among them, and is not for this rank to compute.
        """
        ...

    def combine(self, partial: Tensor) -> Tensor:
        """Weighted sums of this rank's experts [tokens that `dispatch` gave, hidden_size] in; the sums over all
        experts of this rank's own tokens [tokens, hidden_size] out."""
        ...


class LocalExchange:
    """A single rank holds all experts: nothing travels."""

    rank, ranks = 0, 1

    def __init__(self) -> None:
        self.inert: Tensor | None = None

    def begin(self, mode: int, size: int, inert: Tensor | None = None) -> None:
        """See `ExpertExchange`; without a call there are no inert rows."""
        self.inert = inert

    def dispatch(self, tokens: Routed, placement: Placement) -> Routed:
        """See `ExpertExchange`."""
        return tokens

    def combine(self, partial: Tensor) -> Tensor:
        """See `ExpertExchange`."""
        return partial


Packed = Callable[[Tensor], Tensor]
"""A weight [out, in] in a form of its own: rows [tokens, in] -> [tokens, out]."""

Weight = Tensor | Packed

Product = Callable[[Tensor, Weight], Tensor]
"""``x`` [rows, in] times ``weight`` [out, in] transposed."""

GatedMLP = Callable[[Tensor, Weight, Weight], Tensor]
"""`gated_mlp` of hidden states, with the weights of gate and up, and of down."""


class Take(Protocol):
    """A source of weights that compares each shape with the one the configuration asks for."""

    def __call__(self, name: str, *shape: int) -> Tensor: ...


Pack = Callable[[Tensor], Weight]


def as_it_is(weight: Tensor) -> Weight:
    """The packing that leaves a weight a tensor."""
    return weight


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An expert that computes every token, weighted by the sigmoid of ``gate`` [1, hidden_size] (Qwen2-MoE)."""

    gate_up: Weight
    down: Weight
    gate: Tensor

    @classmethod
    def take(cls, size: int, hidden_size: int, take: Take, prefix: str, pack: Pack) -> SharedExpert:
        """The weights under ``prefix``; ``size`` is the expert's inner width."""
        parts = [take(f"{prefix}shared_expert.{part}_proj.weight", size, hidden_size) for part in ("gate", "up")]
        return cls(
            pack(torch.cat(parts)),
            pack(take(f"{prefix}shared_expert.down_proj.weight", hidden_size, size)),
            take(f"{prefix}shared_expert_gate.weight", 1, hidden_size),
        )

    def __call__(self, hidden: Tensor, product: Product) -> Tensor:
        return torch.sigmoid(product(hidden, self.gate)) * gated_mlp(hidden, self.gate_up, self.down, product)


class Mixture:
    """One layer's mixture, of which this rank holds a part.

    Weights of the own experts: ``gate_up`` [2 * inner, hidden_size] and ``down`` [hidden_size, inner] of each, stacked
    to one tensor, or packed one by one. ``static``: computed by products whose shapes depend on no value, as on a GPU,
    or by as many as there are experts with tokens.
    """

    def __init__(
        self,
        config: ExpertConfig,
        hidden_size: int,
        take: Take,
        prefix: str,
        exchange: ExpertExchange,
        product: Product,
        pack: Pack = as_it_is,
    ) -> None:
        """Take the router and the own experts, and no other, from the weights under ``prefix``.

        Names are those of Qwen's models: ``gate``, ``experts.N.gate_proj`` and so on. Experts are packed by ``pack``,
        and multiplied by ``product``.

        Raises:
            UnsupportedModel: a weight's shape contradicts the configuration.
        """
        self.config = config
        self.exchange = exchange
        self.placement = Placement(config.num_experts, exchange.ranks)
        self.own = self.placement.experts(exchange.rank)
        self._product = product
        inner = config.intermediate_size
        self.router = take(f"{prefix}gate.weight", config.num_experts, hidden_size)
        self.static = self.router.device.type != "cpu"
        gate_up, down = [], []
        for e in self.own:
            parts = [take(f"{prefix}experts.{e}.{part}_proj.weight", inner, hidden_size) for part in ("gate", "up")]
            gate_up.append(pack(torch.cat(parts)))
            down.append(pack(take(f"{prefix}experts.{e}.down_proj.weight", hidden_size, inner)))
        self.gate_up, self.down = _stacked(gate_up), _stacked(down)
        shared = config.shared_intermediate_size
        self.shared = SharedExpert.take(shared, hidden_size, take, prefix, pack) if shared else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """What the mixture adds to the residual stream, [tokens, hidden_size], of normed ``hidden``."""
        experts, weights = self.route(hidden)
        inert = self.exchange.inert
        if inert is not None:
            experts = experts.masked_fill(inert[:, None], self.config.num_experts)
        routed = self.exchange.dispatch(Routed(hidden, experts, weights), self.placement)
        compute = self.compute_static if self.static else self.compute_grouped
        out = self.exchange.combine(compute(routed).to(hidden.dtype))
        return out if self.shared is None else out + self.shared(hidden, self._product)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token [tokens, top_k], and their weights [tokens, top_k] float32.

        Softmax over all experts, of which the largest count; they are scaled to the sum 1 if the model asks for it.
        """
        shares = torch.softmax(self._product(hidden, self.router).float(), -1)
        weights, experts = torch.topk(shares, self.config.top_k, -1)
        if self.config.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return experts, weights

    def compute_grouped(self, tokens: Routed, gated: GatedMLP | None = None) -> Tensor:
        """Weighted sums of the own experts [tokens, hidden_size], float32: one MLP per expert that has tokens.

        ``gated``: computes it; None: `gated_mlp` with this mixture's product.
        It reads how many tokens each expert has, which costs nothing on a CPU and would make a GPU wait.
        """
        out = torch.zeros(tokens.hidden.shape, dtype=torch.float32)
        top_k = tokens.experts.shape[1]
        choices = tokens.experts.flatten()
        order = torch.argsort(choices, stable=True)
        counts = torch.bincount(choices, minlength=self.config.num_experts + 1).tolist()
        end = sum(counts[: self.own.start])
        for place, count in enumerate(counts[self.own.start : self.own.stop]):
            start, end = end, end + count
            if count:
                chosen = order[start:end]
                rows = chosen // top_k
                weights = tokens.hidden[rows], self.gate_up[place], self.down[place]
                y = gated_mlp(*weights, self._product) if gated is None else gated(*weights)
                out.index_add_(0, rows, y.float() * tokens.weights.flatten()[chosen, None])
        return out

    def compute_static(self, tokens: Routed) -> Tensor:
        """The same by products whose shapes depend on no value, so that a graph can capture them.

        Weights are tensors, not packed.
        """
        if not self.own or not len(tokens.hidden):
            return torch.zeros_like(tokens.hidden, dtype=torch.float32)
        assert isinstance(self.gate_up, Tensor)
        assert isinstance(self.down, Tensor)
        if not groups_on_device(self.gate_up, self.down):
            return self._compute_every(tokens, self.gate_up, self.down)
        count, top_k = tokens.experts.shape
        choices = tokens.experts.flatten() - self.own.start
        choices = torch.where((choices < 0) | (choices >= len(self.own)), len(self.own), choices)
        # By own expert, choices that are not for this rank at the end.
        order = torch.argsort(choices, stable=True)
        places = torch.arange(len(self.own), device=choices.device)
        ends = (choices[:, None] <= places).sum(0).to(torch.int32)
        # One group has a row even if nobody chose any, as in a step of inert rows; what it yields is left out below.
        ends[-1:].clamp_(min=1)
        hidden = tokens.hidden[order // top_k]
        gate, up = F.grouped_mm(hidden, self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends).float()
        y = y * tokens.weights.flatten()[order, None]
        y = torch.where((choices[order] < len(self.own))[:, None], y, 0.0)
        # Back in the order of the choices, so that a token's sum has the same order in every batch.
        summands = torch.empty_like(y)
        summands[order] = y
        return summands.view(count, top_k, -1).sum(1)

    def _compute_every(self, tokens: Routed, gate_up: Tensor, down: Tensor) -> Tensor:
        """The same where products cannot be grouped on the device: every own expert computes every token.

        A decode step has few tokens, and reads the weights of nearly every expert anyhow.
        """
        hidden = tokens.hidden.expand(len(self.own), -1, -1)
        gate, up = torch.bmm(hidden, gate_up.transpose(1, 2)).chunk(2, -1)
        y = torch.bmm(F.silu(gate) * up, down.transpose(1, 2)).float()
        own = torch.arange(self.own.start, self.own.stop, device=hidden.device)
        chosen = tokens.experts == own[:, None, None]
        weights = (tokens.weights * chosen).sum(-1, keepdim=True)
        # Not a product with 0: what nobody asked an expert for may be infinite.
        return torch.where(chosen.any(-1, keepdim=True), y * weights, 0.0).sum(0)


def _stacked(weights: list[Weight]) -> Tensor | list[Weight]:
    """Tensors as one; packed weights, or none, as they are."""
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    return torch.stack(tensors) if tensors else weights


def groups_on_device(*weights: Tensor) -> bool:
    """Whether `grouped_mm` multiplies ``weights`` [experts, out, in] without asking the host how large the groups are.

    On GPUs its kernel is for bfloat16, rows of a multiple of 16 bytes, and compute capability 9 or 10; elsewhere, later
    capabilities included, it falls back to a loop that reads the sizes of the groups, which no graph can capture.
    """
    if weights[0].device.type == "cpu":
        return True
    fitting = all(w.dtype == torch.bfloat16 and w.shape[-1] * w.itemsize % 16 == 0 for w in weights)
    return fitting and torch.cuda.is_available() and torch.cuda.get_device_capability(weights[0].device)[0] in (9, 10)


def gated_mlp(hidden: Tensor, gate_up: Weight, down: Weight, product: Product) -> Tensor:
    """down(silu(gate(hidden)) * up(hidden)); ``gate_up`` has the rows of both."""
    gate, up = product(hidden, gate_up).chunk(2, -1)
    return product(F.silu(gate) * up, down)
