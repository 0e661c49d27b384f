# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in int8 by the general path: operation by operation, with shapes as they come.

What lies between products is compiled, row by row, from the code that the static backend uses: so a token becomes the
same, bit for bit, in whatever batch and by whichever of the two it is computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.models import kernels
from paceline.models.experts import ExpertExchange, Mixture, Routed, Weight
from paceline.models.kernels import Array
from paceline.models.llama import Attend, GetTensor, Llama, LlamaLayer, Taps, project
from paceline.models.spec import LlamaConfig
from paceline.models.static_kernels import gate_rows, normalise_and_route
from paceline.models.static_weights import SharedLinear
from paceline.models.team import shared_team

_NO_ROWS = np.empty((0, 0), dtype=np.float32)
_NO_TAPS = np.empty((0, 0, 0), dtype=np.float32)


class Int8Mixture(Llama):
    """Products on int8 weights and activations, the rest in float32, the KV cache in bfloat16."""

    def __init__(self, config: LlamaConfig, get: GetTensor, exchange: ExpertExchange | None) -> None:
        """See `Llama`; ``get`` yields float32."""
        super().__init__(config, torch.bfloat16, get, exchange, SharedLinear)
        self.quantization = "int8"
        self._team = shared_team()

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Taps | None = None) -> Tensor:
        """See `Llama.forward`."""
        c = self.config
        q, both = c.num_heads, c.num_heads + c.num_kv_heads
        angles = positions.to(torch.float32)[:, None] * self._rotary
        cos, sin = angles.cos().numpy(), angles.sin().numpy()
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            if taps is not None and i in taps.layers:
                taps.states.append(x)
            hidden, _, _ = self._norm(x, layer.attn_norm, None)
            heads = self._rotated(project(hidden, layer.qkv), layer, cos, sin).view(len(x), -1, c.head_dim)
            out = attend(i, heads[:, :q], heads[:, q:both], heads[:, both:])
            x = x + project(out, layer.o)
            mixture = layer.experts if isinstance(layer.experts, Mixture) else None
            hidden, routed, gates = self._norm(x, layer.mlp_norm, mixture)
            if mixture is None:
                x = x + self._gated(hidden, layer.gate_up, layer.down)
            else:
                x = x + self._mix(mixture, routed, gates)
        if taps is not None and c.num_layers in taps.layers:
            taps.states.append(x)
        final = torch.empty_like(x)
        kernels.final_norm(
            x.numpy(), torch.zeros_like(x).numpy(), self.final_norm.numpy(), c.rms_norm_eps, final.numpy()
        )
        return final

    def _norm(self, x: Tensor, weight: Tensor, mixture: Mixture | None) -> tuple[Tensor, Routed, Tensor]:
        """The RMS norm of ``x``, the choices of a mixture's router, and the weight of its shared expert."""
        hidden, nothing, gates = torch.empty_like(x), torch.zeros_like(x), torch.empty(len(x), 1)
        router = gate = _NO_ROWS
        top_k, normed = 0, False
        if mixture is not None:
            router, top_k, normed = mixture.router.numpy(), mixture.config.top_k, mixture.config.normalise
            gate = router[:0] if mixture.shared is None else mixture.shared.gate.numpy()
        experts, weights = torch.empty(len(x), top_k, dtype=torch.int64), torch.empty(len(x), top_k)
        stream: tuple[Any, ...] = x.numpy(), nothing.numpy(), weight.numpy()[None], 0, self.config.rms_norm_eps
        out = hidden.numpy(), router, gate, normed, experts.numpy(), weights.numpy(), gates.numpy()
        self._team.run(normalise_and_route, 1, 0, *stream, _NO_TAPS, -1, *out)
        return hidden, Routed(hidden, experts, weights), gates

    def _rotated(self, qkv: Tensor, layer: LlamaLayer[Any], cos: Array, sin: Array) -> Tensor:
        """A stacked product's queries, keys and values, ready for attention."""
        c = self.config
        qkv = qkv.contiguous()
        if len(qkv):
            bias = torch.empty(0) if layer.qkv_bias is None else layer.qkv_bias
            norms = torch.empty(2, 0) if layer.qk_norms is None else layer.qk_norms
            small = bias.numpy()[None], norms.numpy()[None], 0, c.rms_norm_eps
            self._team.run(kernels.rotate, 1, 0, qkv.numpy(), *small, cos, sin, c.num_heads, c.num_kv_heads)
        return qkv

    def _gated(self, hidden: Tensor, gate_up: Weight, down: Weight) -> Tensor:
        """down(silu(gate(hidden)) * up(hidden))."""
        both = project(hidden, gate_up).contiguous()
        act = torch.empty(len(both), both.shape[1] // 2)
        self._team.run(gate_rows, 1, 0, both.numpy(), act.shape[1], act.numpy())
        return project(act, down)

    def _mix(self, mixture: Mixture, routed: Routed, gates: Tensor) -> Tensor:
        """See `Mixture.__call__`."""
        inert = mixture.exchange.inert
        if inert is not None:
            routed.experts.masked_fill_(inert[:, None], mixture.config.num_experts)
        arrived = mixture.exchange.dispatch(routed, mixture.placement)
        out = mixture.exchange.combine(mixture.compute_grouped(arrived, self._gated))
        shared = mixture.shared
        return out if shared is None else out + gates * self._gated(routed.hidden, shared.gate_up, shared.down)
