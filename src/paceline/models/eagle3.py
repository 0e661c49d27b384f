# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 draft model: one decoder layer that continues a target model from the target's own hidden states.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025. At
position p it is given the embedding of token p + 1, which is known by then, and the hidden states that the target had
at p in a few of its layers, fused by one product; further tokens are drafted from its own hidden state instead.

Weights are kept as the target's are: float32, bfloat16 or int8. Activations are float32 throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.models.experts import ExpertExchange, LocalExchange, Mixture, Take
from paceline.models.fused import PackedLinear
from paceline.models.llama import Attend, GetTensor, Llama, inverse_frequencies, project, rotate, taking
from paceline.models.spec import LlamaConfig, UnsupportedModel
from paceline.models.static_weights import SharedLinear

Product = Callable[[Tensor], Tensor]
"""Rows [tokens, in], float32, times a weight [out, in] transposed: [tokens, out], float32."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Shape of a draft model.

    ``decoder``: its one layer, with the vocabulary of the target. ``target_hidden_size``: of each of the hidden states
    before the target's layers ``taps``, which are in rising order. ``norm_before_residual``: the layer adds to the
    normalised hidden state instead of the state itself, as heads trained by the speculators library do.
    """

    decoder: LlamaConfig
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0:
            raise UnsupportedModel(
                f"eagle_aux_hidden_state_layer_ids: {list(self.taps)} are no layers of the target in rising order"
            )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The layers of a target of ``num_layers`` before which its hidden states are taken if a checkpoint names none.

    An early, a middle and a late one; the numbers are vLLM's.

    Raises:
        UnsupportedModel: in so small a target they are not three.
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise UnsupportedModel(
            f"eagle_aux_hidden_state_layer_ids: must be given for a target of {num_layers} layers; the usual ones"
            f" (2, half of them, all but 3) are {taps} there"
        )
    return taps


def product(weight: Tensor, dtype: torch.dtype, int8: bool) -> Product:
    """A weight [out, in], kept in ``dtype`` (float32 or bfloat16) or, if ``int8``, as `paceline.models.fused` does.

    On a GPU rows are rounded to ``dtype`` for the product.
    """
    if weight.device.type != "cpu":
        on_device = weight.to(dtype)
        return lambda x: F.linear(x.to(dtype), on_device).float()
    if int8:
        return SharedLinear(weight)
    if dtype == torch.bfloat16:
        return PackedLinear(weight, int8=False)
    kept = weight.to(dtype)
    return lambda x: project(x, kept)


class Eagle3:
    """A draft model beside its target; all methods run under ``torch.inference_mode``.

    ``config`` is the shape of its one layer, ``dtype`` that of its KV cache, ``device`` where it is. ``exchange``: what
    a mixture shares its experts through, to be told of each forward; None for a dense layer.
    """

    def __init__(
        self,
        shape: Eagle3Config,
        target: Llama,
        get: GetTensor,
        names: Collection[str],
        dtype: torch.dtype,
        *,
        int8: bool = False,
        exchange: ExpertExchange | None = None,
    ) -> None:
        """Take every weight from ``get``, except experts that other ranks of ``exchange`` hold; of weights that are
        optional, ``names`` tells which there are.

        Without ``embed_tokens.weight`` it embeds as the target does, without ``lm_head.weight`` it ends as that does.

        Raises:
            UnsupportedModel: a weight is missing or has another shape than the configuration asks for, or ``d2t`` leads
                out of the target's vocabulary.
        """
        c = shape.decoder
        self.config, self.dtype = c, dtype
        self.taps, self.target_hidden_size = shape.taps, shape.target_hidden_size
        self.quantization = "int8" if int8 else None
        take = taking(get)

        def packed(weight: Tensor) -> Product:
            return product(weight, dtype, int8)

        hidden, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attn = "midlayer.self_attn."
        parts = (("q", q), ("k", kv), ("v", kv))
        self.fc = packed(take("fc.weight", hidden, len(shape.taps) * shape.target_hidden_size))
        self.qkv = packed(torch.cat([take(attn + f"{name}_proj.weight", rows, 2 * hidden) for name, rows in parts]))
        self.o = packed(take(attn + "o_proj.weight", hidden, q))
        self.exchange = None if c.experts is None else exchange or LocalExchange()
        self.mlp: Product = (
            GatedMLP(c, take, packed) if self.exchange is None else _mixture(c, take, dtype, int8, self.exchange)
        )
        self.norm_before_residual = shape.norm_before_residual
        self.draft_vocab_size = shape.draft_vocab_size
        self.norms = self._embedding_norm, self._hidden_norm, self._mlp_norm, self._final_norm = tuple(
            take(f"{name}.weight", hidden).float()
            for name in (
                "midlayer.input_layernorm",
                "midlayer.hidden_norm",
                "midlayer.post_attention_layernorm",
                "norm",
            )
        )
        self.embed = target.embed
        if "embed_tokens.weight" in names:
            table = take("embed_tokens.weight", c.vocab_size, hidden).to(dtype)
            self.embed = lambda tokens: F.embedding(tokens, table).float()
        elif target.config.hidden_size != hidden:
            raise UnsupportedModel(
                f"embed_tokens.weight: is missing, and embeddings of the target ({target.config.hidden_size} wide) do"
                f" not fit hidden_size = {hidden}"
            )
        self.head: Product = target.logits
        if "lm_head.weight" in names:
            self.head = packed(take("lm_head.weight", shape.draft_vocab_size, hidden))
        elif shape.draft_vocab_size != c.vocab_size or target.config.hidden_size != hidden:
            raise UnsupportedModel("lm_head.weight: is missing, and the target's does not fit")
        self.targets = _target_ids(shape, take, names)
        self.device = self._final_norm.device
        self.rotary = inverse_frequencies(c.rope_theta, c.head_dim, c.rope_scaling).to(self.device)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """The target's hidden states [tokens, target_hidden_size] of each tap as one state [tokens, hidden_size]."""
        return self.fc(torch.cat([state.float() for state in states], -1))

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Its own hidden states [tokens, hidden_size].

        Args:
            tokens: at each place the token *behind* the position, int64 [tokens], of the target's vocabulary.
            hidden: `fuse`d states of the target at the positions, or this model's own at the positions before.
            positions: int64 [tokens].
            attend: keeps keys and values of layer 0.
        """
        c = self.config
        size, eps = (c.hidden_size,), c.rms_norm_eps
        rotated = c.num_heads + c.num_kv_heads
        angles = positions.to(torch.float32)[:, None] * self.rotary
        cos, sin = angles.cos(), angles.sin()
        normed = F.rms_norm(hidden, size, self._hidden_norm, eps)
        x = normed if self.norm_before_residual else hidden
        embedded = F.rms_norm(self.embed(tokens).float(), size, self._embedding_norm, eps)
        qkv = self.qkv(torch.cat((embedded, normed), -1)).view(-1, rotated + c.num_kv_heads, c.head_dim)
        qk = rotate(qkv[:, :rotated], torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])
        out = attend(0, qk[:, : c.num_heads], qk[:, c.num_heads :], qkv[:, rotated:])
        x = x + self.o(out)
        return x + self.mlp(F.rms_norm(x, size, self._mlp_norm, eps))

    def best(self, hidden: Tensor) -> Tensor:
        """The likeliest next tokens, ids of the target's vocabulary, after own hidden states [rows, hidden_size]."""
        c = self.config
        ids = self.head(F.rms_norm(hidden, (c.hidden_size,), self._final_norm, c.rms_norm_eps)).argmax(-1)
        return ids if self.targets is None else self.targets[ids]


class GatedMLP:
    """The layer's gated MLP; ``gate_up``: the gate's rows above those of up."""

    def __init__(self, c: LlamaConfig, take: Take, packed: Callable[[Tensor], Product]) -> None:
        names = [f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up")]
        self.gate_up = packed(torch.cat([take(name, c.intermediate_size, c.hidden_size) for name in names]))
        self.down = packed(take("midlayer.mlp.down_proj.weight", c.hidden_size, c.intermediate_size))
        self._inner = c.intermediate_size

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).split(self._inner, -1)
        return self.down(F.silu(gate) * up)


def _mixture(c: LlamaConfig, take: Take, dtype: torch.dtype, int8: bool, exchange: ExpertExchange) -> Product:
    """The layer's mixture. What travels between ranks is of ``dtype``, or float32 if the experts are ``int8``."""
    assert c.experts is not None
    travels = torch.float32 if int8 else dtype

    def kept(name: str, *shape: int) -> Tensor:
        return take(name, *shape).to(travels)

    def pack(weight: Tensor) -> Tensor | Product:
        return product(weight, travels, int8=True) if int8 else weight

    mixture = Mixture(c.experts, c.hidden_size, kept, "midlayer.mlp.", exchange, project, pack)
    return lambda x: mixture(x.to(travels)).float()


def _target_ids(shape: Eagle3Config, take: Take, names: Collection[str]) -> Tensor | None:
    """The target's id of each id of the draft vocabulary, which ``d2t`` gives as offsets; None: they are the same."""
    vocabulary = shape.decoder.vocab_size
    if "d2t" not in names and shape.draft_vocab_size == vocabulary:
        return None
    offsets = take("d2t", shape.draft_vocab_size).to(torch.int64)
    targets = torch.arange(shape.draft_vocab_size, device=offsets.device) + offsets
    if bool(((targets < 0) | (targets >= vocabulary)).any()):
        raise UnsupportedModel(f"d2t: leads to ids outside of the target's vocabulary of {vocabulary} tokens")
    return targets
