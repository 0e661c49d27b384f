# SPDX-License-Identifier: Apache-2.0
"""An engine without a model, for the process that serves: real scheduler, scripted tokens.

Output token k of a request is its prompt's token k, over and over. A test therefore writes what it wants to read into
the prompt. Bytes are tokens, so that a character of several bytes is a character of several tokens. Some ids do more.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from paceline.core.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from paceline.core.lockstep import RUN, Agreement
from paceline.core.plan import NewSequence, Row, StepPlan, StepResult, TokenLogprobs
from paceline.core.scheduler import Scheduler
from paceline.engine.messages import ModelInfo
from paceline.engine.rank import Rank, StepCounts
from paceline.runtime.engine_process import BuiltEngine, InStep

FACTORY = f"{__name__}:build"
SPECIAL = ("<|end|>", "<|turn|>", "<|kill|>", "<|raise|>", "<|poison|>")
END, TURN, KILL, RAISE, POISON = range(256, 256 + len(SPECIAL))
"""END ends a request. When one of the last three is the token to sample, the process is killed, the executor raises,
or the row carries an error."""
VOCAB = 256 + len(SPECIAL)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('who is nobody?') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Token b is byte b."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    vocabulary = {chr(b) if b in printable else chr(next(others)): b for b in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return tokenizer


def logprob(token: int) -> float:
    """The log-probability that every token has wherever it is sampled."""
    return -1.0 - token / 256


def scored(token: int, num_top: int) -> TokenLogprobs:
    """A token's log-probabilities: it is the second best; the best is the one after it, then come those before it."""
    likely = [(token + 1, -0.5), (token, logprob(token)), *((token - i, -9.0 - i) for i in range(1, 20))]
    return TokenLogprobs(token_id=token, logprob=logprob(token), top=tuple(likely[:num_top]), rank=2)


@dataclass(slots=True)
class Script:
    """What one sequence says. ``num_top``: alternatives to report per token; None: no log-probabilities."""

    ids: list[int]
    num_top: int | None = None

    def token(self, k: int) -> int:
        return self.ids[k % len(self.ids)]


class ScriptedExecutor:
    """Computes any plan from the scripts, with drafts that are always right; ``step_s``: how long a step takes.

    ``hangs_at``: the token at which it hangs while its process lives.
    """

    def __init__(self, num_drafts: int, step_s: float, hangs_at: int | None = None) -> None:
        self._num_drafts = num_drafts
        self._hangs_at = hangs_at
        self._step_s = step_s
        self._scripts: dict[int, Script] = {}
        self._plan: StepPlan | None = None
        self._computes = False
        self.steps = StepCounts()

    def launch(self, plan: StepPlan, agreement: Agreement | None) -> None:
        self._computes = bool(plan.rows) or (agreement is not None and agreement.run == RUN)
        if self._computes:
            self.steps.count(plan.tokens, agreement)
        for new in plan.first:
            self._scripts[new.seq] = _script(new)
        for seq in plan.retired:
            self._scripts.pop(seq, None)
        self._plan = plan

    def collect(self) -> StepResult:
        plan = self._plan
        assert plan is not None
        if self._step_s and self._computes:
            time.sleep(self._step_s)
        sampled, drafts, errors = [], [], {}
        logprobs: list[tuple[TokenLogprobs, ...] | None] = []
        for i, row in enumerate(plan.rows):
            tokens, proposals = self._row(row)
            if POISON in tokens:
                errors[i] = "the row was poisoned"
                tokens, proposals = (), ()
            sampled.append(tokens)
            drafts.append(proposals)
            num_top = self._scripts[row.seq].num_top
            logprobs.append(None if num_top is None else tuple(scored(token, num_top) for token in tokens))
        return StepResult(plan.step, sampled, drafts, logprobs if any(logprobs) else None, errors or None)

    def _row(self, row: Row) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if not row.samples:
            return (), ()
        script = self._scripts[row.seq]
        k = row.start + row.n - len(row.drafts) - len(script.ids)
        tokens = []
        for draft in (*row.drafts, None):
            token = script.token(k + len(tokens))
            if token == KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            if token == RAISE:
                raise RuntimeError("the script says so")
            if token == self._hangs_at:
                threading.Event().wait()
            tokens.append(token)
            if draft != token:
                break
        after = k + len(tokens)
        return tuple(tokens), tuple(script.token(after + i) for i in range(self._num_drafts))


def _script(new: NewSequence) -> Script:
    return Script(list(new.source.tokens(0, new.source.length)), new.params.logprobs)


def build(options: dict[str, Any]) -> BuiltEngine:
    """Options: ``num_drafts``, ``step_s``, ``hangs_at``, ``refuse`` (a complaint), fields of `SchedulerConfig`.

    ``data_parallel``: see `runtime.engine_group`; ``lockstep`` there puts the ranks in step, ``differ`` makes the last
    of them another engine.
    """
    chosen = dict(options)
    if "refuse" in chosen:
        raise ValueError(chosen["refuse"])
    place = chosen.pop("data_parallel", {})
    num_drafts, step_s = chosen.pop("num_drafts", 0), chosen.pop("step_s", 0.0)
    hangs_at = chosen.pop("hangs_at", None)
    scheduler = SchedulerConfig(**{"max_model_len": 2048, "max_num_seqs": 64, **chosen})
    speculation = SpeculationConfig(method="ngram" if num_drafts else None, num_speculative_tokens=num_drafts)
    config = EngineConfig(scheduler=scheduler, speculation=speculation, cache=CacheConfig(num_blocks=8192))
    return BuiltEngine(
        Rank(Scheduler(config), ScriptedExecutor(num_drafts, step_s, hangs_at)),
        ModelInfo(
            name="fake",
            tokenizer=byte_tokenizer().to_str(),
            vocab_size=VOCAB,
            max_model_len=scheduler.max_model_len,
            eos_token_ids=(END,),
            chat_template=TEMPLATE,
            bos_token=None,
            eos_token=SPECIAL[0],
            dtype="none",
            block_size=config.cache.block_size,
            num_blocks=config.cache.num_blocks,
            enable_prefix_caching=True,
            scheduling_policy=scheduler.policy,
            num_speculative_tokens=num_drafts,
        ),
        _line(place) if place.get("lockstep") else None,
    )


def _line(place: dict[str, Any]) -> InStep:
    """Over gloo, as ranks of several hosts are; torch is imported by nobody else here."""
    from paceline.parallel.rendezvous import Meeting, Place
    from paceline.parallel.votes import GlooVotes

    names = ("size", "rank", "store", "inbox", "timeout_s", "join_timeout_s")
    meeting = Meeting(Place(**{name: place[name] for name in names if name in place}))
    layers = 2 + (place.get("differ", False) and place["rank"] == place["size"] - 1)
    peers = meeting.compare({"model": {"num_layers": layers}})
    return InStep(GlooVotes(place["timeout_s"], meeting), peers)
