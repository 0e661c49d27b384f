# SPDX-License-Identifier: Apache-2.0
"""Heads that are built to be right: the target counts upwards, and they know it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.models.eagle3 import Eagle3, Eagle3Config
from paceline.models.llama import Llama
from paceline.models.spec import LlamaConfig
from tests.eagle3.heads import Engine, K

SIZE, STEP = 48, 7
PROMPTS = [[5], [1, 8, 15, 22], [40, 47, 6, 13, 20, 27, 34, 41, 0]]
SHARPNESS = 4000.0
"""Scores of a head's own position lie this far above a quarter turn away: it attends to nothing else."""


def config(head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=SIZE,
        hidden_size=SIZE,
        intermediate_size=4,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position=128,
        tie_word_embeddings=False,
    )


def following(steps: int = 1) -> Tensor:
    """A matrix that maps the one-hot vector of a token to that of the token ``steps`` later."""
    return torch.eye(SIZE).roll(STEP * steps, 0)


def counting_target() -> Llama:
    """Embeddings are one-hot, the layer adds nothing, and token t is followed by t + 7."""
    shapes = {"q_proj": (2, SIZE), "k_proj": (2, SIZE), "v_proj": (2, SIZE), "o_proj": (SIZE, 2)}
    shapes |= {"gate_proj": (4, SIZE), "up_proj": (4, SIZE), "down_proj": (SIZE, 4)}
    fixed = {"model.embed_tokens.weight": torch.eye(SIZE), "lm_head.weight": following()}

    def get(name: str) -> Tensor:
        kind = name.split(".")[-2]
        return fixed[name] if name in fixed else torch.zeros(shapes[kind]) if kind in shapes else torch.ones(SIZE)

    return Llama(config(2), torch.float32, get)


def head(target: Llama, fc: Tensor, attention: dict[str, Tensor]) -> Eagle3:
    """A head whose layer only attends. Its draft vocabulary counts backwards: draft id d is token 47 - d."""
    mlp = {"gate_proj": (4, SIZE), "up_proj": (4, SIZE), "down_proj": (SIZE, 4)}
    ids = torch.arange(SIZE)
    fixed = {"fc.weight": fc, "lm_head.weight": torch.eye(SIZE).flip(0), "d2t": SIZE - 1 - 2 * ids} | attention

    def get(name: str) -> Tensor:
        kind = name.split(".")[-2] if "." in name else name
        return fixed[name] if name in fixed else torch.zeros(mlp[kind]) if kind in mlp else torch.ones(SIZE)

    shape = Eagle3Config(config(2 * SIZE), SIZE, SIZE, taps=(1,))
    return Eagle3(shape, target, get, fixed, torch.float32)


def projections(make: Callable[[Tensor, Tensor, Tensor, Tensor], None]) -> dict[str, Tensor]:
    shapes = {"q": (2 * SIZE, 2 * SIZE), "k": (2 * SIZE, 2 * SIZE), "v": (2 * SIZE, 2 * SIZE), "o": (SIZE, 2 * SIZE)}
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    make(*weights.values())
    return {f"midlayer.self_attn.{name}_proj.weight": weight for name, weight in weights.items()}


def run(target: Llama, draft: Eagle3) -> list[int]:
    """Accepted drafts by position, of 12 tokens behind each prompt, which are checked."""
    engine = Engine(target, draft, speculation={"num_speculative_tokens": K}, max_model_len=64)
    for prompt, output in zip(PROMPTS, engine.complete(PROMPTS, max_tokens=12), strict=True):
        assert output == [(prompt[-1] + STEP * (i + 1)) % SIZE for i in range(12)]
    acceptance = engine.scheduler.stats.acceptance
    assert acceptance.num_draft_tokens == K * acceptance.num_drafts > 0
    return [acceptance.num_drafts, *acceptance.num_accepted_tokens_per_pos]


def test_a_head_that_knows_the_target_only_by_its_hidden_states() -> None:
    """It sees the last token in the target's state and skips two ahead; from its own state it says the same again."""
    target = counting_target()
    drafts, *accepted = run(target, head(target, following(2), projections(lambda q, k, v, o: None)))
    assert accepted == [drafts, 0, 0]


def test_a_head_that_is_always_right() -> None:
    """It attends to its own position alone, says what follows the token there, and forgets the state it came with."""

    def make(q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        # Normed one-hot vectors have the sum sqrt(SIZE), so q and k are constant but for their rotation.
        constant = math.sqrt(SHARPNESS * math.sqrt(2 * SIZE) / SIZE)
        q[0, :SIZE] = k[0, :SIZE] = constant
        v.copy_(torch.eye(2 * SIZE) / math.sqrt(SIZE))
        o[:, :SIZE] = following()
        o[:, SIZE:] = -torch.eye(SIZE)

    target = counting_target()
    drafts, *accepted = run(target, head(target, torch.zeros(SIZE, SIZE), projections(make)))
    assert accepted == [drafts] * K
