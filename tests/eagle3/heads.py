# SPDX-License-Identifier: Apache-2.0
"""A small target with a random head, an engine around both, and the head in plain torch as a reference.

The reference never sees a cache, a batch or a step: for each draft it computes the whole sequence again, with the
hidden states that transformers gives for the target.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from paceline.connectors.decode_bench.scheduler import DecodeBenchScheduler
from paceline.connectors.decode_bench.worker import DecodeBenchWorker
from paceline.core.config import CacheConfig, EngineConfig, GraphConfig, SchedulerConfig, SpeculationConfig
from paceline.core.graphs import GraphDispatcher
from paceline.core.lockstep import RUN, Agreement, agree
from paceline.core.plan import StepPlan, StepResult
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.scheduler import Scheduler
from paceline.engine.rank import Rank
from paceline.execution.drafter import DraftModel
from paceline.execution.runner import ModelExecutor
from paceline.models.llama import Llama
from paceline.models.random_eagle3 import target_config, write_random_eagle3
from paceline.models.tokenizer import byte_level_tokenizer

K = 3
VOCABULARY, DRAFTED, LAYERS = 256, 160, 8
PROMPTS = [
    [(a * i * i + b * i + 3) % VOCABULARY for i in range(n)]
    for a, b, n in [(5, 1, 30), (3, 2, 11), (7, 5, 48), (1, 1, 1)]
]
SHARED = [[*PROMPTS[2], 5], [*PROMPTS[2][:33], 9, 9], [*PROMPTS[2][:32], 7]]
"""Beginnings that are found in the prefix cache, the last of them all but one token."""


def save_target(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A random Llama as transformers saves it, and a tokenizer of 256 bytes, 0 of which ends a text."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": 0,
            "initializer_range": 0.3,
        }
        | changes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokens = ["<eos>", *sorted(ByteLevel.alphabet())[1:]]
    byte_level_tokenizer(tokens, [], pre_tokenizer="gpt-2", special=[0]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


def save_head(target: Path, folder: Path, **options: Any) -> Path:
    """A random head for ``target``, with a draft vocabulary of its own."""
    write_random_eagle3(target_config(str(target)), folder, **({"draft_vocab_size": DRAFTED} | options))
    return folder


class Reference:
    """What a head drafts behind a sequence."""

    def __init__(self, target: Path, head: Path) -> None:
        self.target = transformers.LlamaForCausalLM.from_pretrained(target).float().eval()
        self.config = json.loads((head / "config.json").read_text())
        stored = load_file(head / "model.safetensors")
        self.w = {n: t.float() if t.is_floating_point() else t for n, t in stored.items()}
        self.known: dict[tuple[int, ...], list[tuple[int, float]]] = {}

    def drafts(self, tokens: Sequence[int]) -> list[tuple[int, float]]:
        """K drafts behind ``tokens``, and how far the two best logits of each lay apart."""
        key = tuple(tokens)
        if key not in self.known:
            with torch.no_grad():
                self.known[key] = self._drafts(list(tokens))
        return self.known[key]

    def _drafts(self, tokens: list[int]) -> list[tuple[int, float]]:
        out = self.target(torch.tensor([tokens[:-1]]), output_hidden_states=True)
        # hidden_states[i] is what enters layer i.
        taps = [out.hidden_states[i][0] for i in self.config["eagle_aux_hidden_state_layer_ids"]]
        hidden = torch.cat(taps, -1) @ self.w["fc.weight"].T
        following = tokens[1:]
        drafts: list[tuple[int, float]] = []
        for _ in range(K):
            states = self.layer(following, hidden)
            logits = self.norm(states[-1], "norm") @ self.w["lm_head.weight"].T
            best = logits.topk(2)
            drafted = int(best.indices[0])
            token = drafted + int(self.w["d2t"][drafted]) if "d2t" in self.w else drafted
            drafts.append((token, float(best.values[0] - best.values[1])))
            following = [*following, token]
            hidden = torch.cat((hidden, states[-1:]))
        return drafts

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * self.w[f"{name}.weight"]

    def layer(self, following: list[int], hidden: Tensor) -> Tensor:
        """States at all positions; ``following``: the token behind each."""
        c, w = self.config, self.w
        table = w.get("embed_tokens.weight", self.target.get_input_embeddings().weight)
        embedded = self.norm(table[torch.tensor(following)], "midlayer.input_layernorm")
        normed = self.norm(hidden, "midlayer.hidden_norm")
        x = torch.cat((embedded, normed), -1)
        residual = normed if c.get("norm_before_residual") else hidden
        count, size = len(following), c["head_dim"]
        q, k, v = (
            (x @ w[f"midlayer.self_attn.{part}_proj.weight"].T).view(count, -1, size).transpose(0, 1) for part in "qkv"
        )
        q, k = self.rotated(q), self.rotated(k)
        heads = []
        for h in range(len(q)):
            group = h * len(k) // len(q)
            scores = q[h] @ k[group].T / size**0.5
            scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf"))
            heads.append(scores.softmax(-1) @ v[group])
        residual = residual + torch.cat(heads, -1) @ w["midlayer.self_attn.o_proj.weight"].T
        return residual + self.mlp(self.norm(residual, "midlayer.post_attention_layernorm"))

    def rotated(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        angles = torch.arange(x.shape[1])[:, None] / self.config["rope_theta"] ** (torch.arange(0, size, 2) / size)
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def mlp(self, x: Tensor) -> Tensor:
        if not self.config.get("num_experts"):
            return self.gated(x, "midlayer.mlp.")
        shares = (x @ self.w["midlayer.mlp.gate.weight"].T).softmax(-1)
        rows = []
        for row, share in zip(x, shares, strict=True):
            best = share.topk(self.config["num_experts_per_tok"])
            parts = [
                weight * self.gated(row, f"midlayer.mlp.experts.{int(e)}.")
                for weight, e in zip(best.values / best.values.sum(), best.indices, strict=True)
            ]
            rows.append(sum(parts[1:], parts[0]))
        return torch.stack(rows)

    def gated(self, x: Tensor, prefix: str) -> Tensor:
        gate, up, down = (self.w[f"{prefix}{part}_proj.weight"].T for part in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down


class Recorder:
    """An executor that notes what was drafted behind which tokens: ``drafted``, (tokens, drafts) of each row."""

    def __init__(self, executor: ModelExecutor) -> None:
        self.executor = executor
        self.drafted: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._tokens: dict[int, list[int]] = {}
        self._plan = StepPlan(-1, (), 0, 0)

    def launch(self, plan: StepPlan, agreement: Agreement | None = None) -> None:
        self._plan = plan
        for new in plan.first:
            self._tokens[new.seq] = list(new.source.tokens(0, new.source.length))
        self.executor.launch(plan, agreement)

    def collect(self) -> StepResult:
        result = self.executor.collect()
        for row, sampled, drafts in zip(self._plan.rows, result.sampled, result.next_drafts, strict=False):
            if sampled:
                known = self._tokens[row.seq]
                del known[row.start + row.n - len(row.drafts) :]
                known.extend(sampled)
                self.drafted.append((tuple(known), drafts))
        return result


class Engine:
    """A scheduler and an executor that records; ``draft`` None: without speculation. ``worker``: fills prompts' KV."""

    def __init__(
        self,
        target: Llama,
        draft: DraftModel | None,
        *,
        cache: dict[str, Any] | None = None,
        speculation: dict[str, Any] | None = None,
        graphs: bool = False,
        worker: DecodeBenchWorker | None = None,
        **scheduler: Any,
    ) -> None:
        spec = {"method": "eagle3", "model": "head", "num_speculative_tokens": K} | (speculation or {})
        self.config = EngineConfig(
            scheduler=SchedulerConfig(**({"max_model_len": 128} | scheduler)),
            cache=CacheConfig(**({"num_blocks": 200, "block_size": 4} | (cache or {}))),
            speculation=SpeculationConfig(**(spec if draft is not None else {})),
            graphs=GraphConfig(mode="FULL_DECODE_ONLY" if graphs else "NONE"),
        )
        connector = DecodeBenchScheduler(self.config.cache.block_size) if worker is not None else None
        self.scheduler = Scheduler(self.config, connector)
        self.executor = Recorder(ModelExecutor(target, self.config, draft=draft, connector=worker))
        self.rank = Rank(self.scheduler, self.executor)
        self.outputs: dict[str, list[int]] = {}

    def complete(self, prompts: Sequence[list[int]], **params: Any) -> list[list[int]]:
        """Outputs of requests that start a step apart, so that prefills meet verifier rows."""
        chosen = SamplingParams(**({"temperature": 0.0, "max_tokens": 20} | params))
        names: list[str] = []
        while len(names) < len(prompts) or self.rank.has_work:
            if len(names) < len(prompts):
                self.rank.add(Request(str(len(self.outputs)), StoredTokens(prompts[len(names)]), chosen))
                names.append(str(len(self.outputs)))
                self.outputs[names[-1]] = []
            for output in self.rank.step(0.0):
                assert output.error is None
                self.outputs[output.request_id] += output.token_ids
        return [self.outputs[name] for name in names]

    def add(self, name: str, prompt: list[int], count: int) -> None:
        """A request for at most ``count`` tokens."""
        self.outputs[name] = []
        self.rank.add(Request(name, StoredTokens(prompt), SamplingParams(temperature=0.0, max_tokens=count)))

    def begin_beside_a_failure(self, prompt: list[int], poison: int) -> None:
        """The first step of a request, "good", in which another's row fails at the token ``poison``."""
        chosen = SamplingParams(temperature=0.0, max_tokens=20)
        self.rank.add(Request("bad", StoredTokens([1, poison, 2]), chosen))
        self.rank.add(Request("good", StoredTokens(prompt), chosen))
        outputs = self.rank.step(0.0)
        assert [output.finish_reason for output in outputs] == ["error", None]
        self.outputs["good"] = list(outputs[1].token_ids)


UNEVEN = (([PROMPTS[0], *SHARED], 40), ([PROMPTS[1], PROMPTS[2]], 15))
"""Prompts of two ranks, and how many tokens each is asked for."""


def run_uneven(engines: Sequence[Engine]) -> list[int]:
    """Serve `UNEVEN` in step: one rank prefills while the other decodes, idles at the end, and wakes for its last
    request. Returns the steps by mode."""
    dispatcher = GraphDispatcher(engines[0].config)
    waking, late = engines[1], UNEVEN[1][0][-1]
    for engine, (prompts, count) in zip(engines, UNEVEN, strict=True):
        for i, prompt in enumerate(prompts[:-1] if engine is waking else prompts):
            engine.add(str(i), prompt, count)
    modes = [0, 0]
    with ThreadPoolExecutor(len(engines)) as pool:
        for step in range(200):
            if step == 28:
                waking.add("late", late, UNEVEN[1][1])
            for engine in engines:
                engine.rank.begin(0.0)
            agreement = agree([engine.rank.vote(step, 0) for engine in engines], dispatcher)
            if agreement.run != RUN:
                break
            modes[agreement.mode] += 1
            list(pool.map(lambda engine, a=agreement: engine.rank.launch(a), engines))
            for engine in engines:
                for output in engine.rank.finish(engine.rank.collect(), 0.0):
                    assert output.error is None
                    engine.outputs[output.request_id] += output.token_ids
    return modes
