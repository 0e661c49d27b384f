# SPDX-License-Identifier: Apache-2.0
"""Frozen configuration of one engine rank: validated once, every error names its field."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

PadResumed = Literal["off", "running", "resumed"]
GraphMode = Literal["NONE", "FULL_DECODE_ONLY"]
Policy = Literal["fcfs", "priority"]
LoadFailurePolicy = Literal["fail", "recompute"]
GroupKind = Literal["full", "sliding", "recurrent"]
Method = Literal["ngram", "draft_model", "eagle3", "mtp"]

PROMPT_LOOKUP = (2, 5)
"""Shortest and longest n-gram that prompt lookup looks for, if nothing is said."""


class ConfigError(ValueError):
    """A configuration value that cannot be honoured; ``field`` is its dotted name."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


def require(condition: bool, field: str, problem: str) -> None:
    """Raise `ConfigError` for ``field`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(field, problem)


def require_choice(value: object, choices: tuple[str, ...], field: str) -> None:
    """Raise `ConfigError` unless ``value`` is one of ``choices``."""
    require(value in choices, field, f"must be one of {', '.join(choices)}, got {value!r}")


def require_int(value: object, least: int, field: str) -> None:
    """Raise `ConfigError` unless ``value`` is an integer (not a bool) of at least ``least``."""
    require(
        isinstance(value, int) and not isinstance(value, bool) and value >= least,
        field,
        f"must be an integer of at least {least}, got {value!r}",
    )


def require_seconds(value: object, field: str) -> None:
    """Raise `ConfigError` unless ``value`` is a finite time above 0, in seconds."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(
        number and 0 < float(value) < float("inf"),  # type: ignore[arg-type]
        field,
        f"must be a finite number of seconds above 0, got {value!r}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Budgets of a step (units: tokens and requests) and the order of the queue."""

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    long_prefill_token_threshold: int = 0
    policy: Policy = "fcfs"
    later_deadline_s: float = 30.0
    """How long a connector may answer "later" before the request is computed locally."""
    transfer_deadline_s: float = 60.0
    """How long a KV load may take before it is given up, which is a load failure."""
    load_failure_policy: LoadFailurePolicy = "fail"

    def __post_init__(self) -> None:
        require_int(self.max_num_seqs, 1, "scheduler.max_num_seqs")
        require_int(self.max_num_batched_tokens, 1, "scheduler.max_num_batched_tokens")
        require_int(self.max_model_len, 2, "scheduler.max_model_len")
        require_int(self.long_prefill_token_threshold, 0, "scheduler.long_prefill_token_threshold")
        for name in ("later_deadline_s", "transfer_deadline_s"):
            require_seconds(getattr(self, name), f"scheduler.{name}")
        require_choice(self.load_failure_policy, ("fail", "recompute"), "scheduler.load_failure_policy")
        require_choice(self.policy, ("fcfs", "priority"), "scheduler.policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """One KV cache group: layers that share a block table.

    ``sliding_window`` is in tokens and belongs to kind ``sliding`` only.
    """

    kind: GroupKind = "full"
    sliding_window: int = 0

    def __post_init__(self) -> None:
        require_choice(self.kind, ("full", "sliding", "recurrent"), "cache.groups.kind")
        if self.kind == "sliding":
            require_int(self.sliding_window, 1, "cache.groups.sliding_window")
        else:
            require(
                self.sliding_window == 0,
                "cache.groups.sliding_window",
                f"only a sliding group has a window, this one is {self.kind}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache: ``num_blocks`` blocks of ``block_size`` tokens, one of them the null block."""

    num_blocks: int = 4096
    block_size: int = 16
    enable_prefix_caching: bool = True
    groups: tuple[GroupConfig, ...] = (GroupConfig(),)

    def __post_init__(self) -> None:
        require_int(self.block_size, 1, "cache.block_size")
        require_int(self.num_blocks, 2, "cache.num_blocks")
        require(isinstance(self.enable_prefix_caching, bool), "cache.enable_prefix_caching", "must be a boolean")
        require(len(self.groups) > 0, "cache.groups", "at least one group is needed")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding, with vLLM's key names plus ``pad_resumed``.

    ``lookahead`` (KV slots that the drafter writes ahead) and ``draft_slots`` (token slots that it adds to a row)
    default to what the method needs. A field that the method has no use for is refused.
    """

    method: Method | None = None
    num_speculative_tokens: int = 0
    model: str | None = None
    pad_resumed: PadResumed = "resumed"
    rejection_sample_method: Literal["standard", "synthetic"] = "standard"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None
    disable_eagle_block_drop: bool = False
    prompt_lookup_min: int = PROMPT_LOOKUP[0]
    prompt_lookup_max: int = PROMPT_LOOKUP[1]
    lookahead: int | None = None
    draft_slots: int | None = None

    def __post_init__(self) -> None:
        require_int(self.num_speculative_tokens, 0, "speculation.num_speculative_tokens")
        require_choice(self.pad_resumed, ("off", "running", "resumed"), "speculation.pad_resumed")
        require_choice(self.rejection_sample_method, ("standard", "synthetic"), "speculation.rejection_sample_method")
        if self.method is None:
            require(self.num_speculative_tokens == 0, "speculation.method", "needed when num_speculative_tokens > 0")
        else:
            require_choice(self.method, ("ngram", "draft_model", "eagle3", "mtp"), "speculation.method")
            require_int(self.num_speculative_tokens, 1, "speculation.num_speculative_tokens")
        require_int(self.prompt_lookup_min, 1, "speculation.prompt_lookup_min")
        require(
            self.prompt_lookup_max >= self.prompt_lookup_min,
            "speculation.prompt_lookup_max",
            f"must be at least prompt_lookup_min = {self.prompt_lookup_min}",
        )
        self._check_synthetic()
        self._check_method()
        for name in ("lookahead", "draft_slots"):
            if (value := getattr(self, name)) is not None:
                require_int(value, 0, f"speculation.{name}")

    def _check_synthetic(self) -> None:
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if self.rejection_sample_method == "standard":
            require(rates is None, "speculation.synthetic_acceptance_rates", "needs rejection_sample_method: synthetic")
            require(
                length is None, "speculation.synthetic_acceptance_length", "needs rejection_sample_method: synthetic"
            )
            return
        where, K = "speculation.synthetic_acceptance_rates", self.num_speculative_tokens
        require((rates is None) != (length is None), where, "give either the rates or synthetic_acceptance_length")
        if rates is not None:
            require(len(rates) == K, where, f"needs num_speculative_tokens = {K} rates, got {len(rates)}")
            require(all(0.0 <= r <= 1.0 for r in rates), where, "rates lie in [0, 1]")
            require(all(a >= b for a, b in pairwise(rates)), where, "rates must not increase")
        elif length is not None:
            require(1.0 <= length <= K + 1, "speculation.synthetic_acceptance_length", f"must lie in [1, {K + 1}]")

    def _check_method(self) -> None:
        """Refuse what only another method would honour."""
        if self.method is None:
            for name in ("lookahead", "draft_slots"):
                require(not getattr(self, name), f"speculation.{name}", "needs a method")
        if self.method == "ngram" or self.method is None:
            require(self.model is None, "speculation.model", f"method {self.method} drafts without a model")
        if self.method != "ngram":
            lookup = (self.prompt_lookup_min, self.prompt_lookup_max)
            require(lookup == PROMPT_LOOKUP, "speculation.prompt_lookup_max", "prompt lookup belongs to method ngram")
        if self.disable_eagle_block_drop:
            name = "speculation.disable_eagle_block_drop"
            require(self.method in ("eagle3", "mtp"), name, "only eagle3 and mtp drop the last block of a hit")

    @property
    def width(self) -> int:
        """W, the verifier width: one known token and K drafts."""
        return 1 + self.num_speculative_tokens

    @property
    def lookahead_tokens(self) -> int:
        """KV slots beyond the planned tokens that the drafter writes in the same step."""
        if self.lookahead is not None:
            return self.lookahead
        return 0 if self.method in (None, "ngram") else self.num_speculative_tokens

    @property
    def slots_per_row(self) -> int:
        """Token slots that the drafter adds to each row of a step."""
        if self.draft_slots is not None:
            return self.draft_slots
        return 1 if self.method == "draft_model" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """Decode graphs: when they run and which token counts are captured (None: the default list)."""

    mode: GraphMode = "NONE"
    capture_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require_choice(self.mode, ("NONE", "FULL_DECODE_ONLY"), "graphs.mode")
        require(self.capture_sizes is None or len(self.capture_sizes) > 0, "graphs.capture_sizes", "must not be empty")
        for size in self.capture_sizes or ():
            require_int(size, 1, "graphs.capture_sizes")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything a rank's scheduler needs to know; cross-checked as a whole."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)

    def __post_init__(self) -> None:
        s, c, spec = self.scheduler, self.cache, self.speculation
        least = spec.width + spec.slots_per_row
        require(
            s.max_num_batched_tokens >= least,
            "scheduler.max_num_batched_tokens",
            f"must be at least {least}: one verifier row of 1 + num_speculative_tokens = {spec.width} tokens"
            f" and {spec.slots_per_row} draft slots",
        )
        if any(g.kind == "recurrent" for g in c.groups):
            self._check_chunks()
        tokens = s.max_model_len + spec.width + spec.lookahead_tokens
        blocks = -(-tokens // c.block_size)
        require(
            c.num_blocks - 1 >= blocks * len(c.groups),
            "cache.num_blocks",
            f"the pool must hold max_model_len + width + lookahead = {tokens} tokens in every group:"
            f" at least {blocks * len(c.groups) + 1} blocks, got {c.num_blocks}",
        )

    def _check_chunks(self) -> None:
        """Prefill chunks end on block boundaries where recurrent state is kept, so one must hold a block."""
        s, block = self.scheduler, self.cache.block_size
        why = f"a recurrent group needs prefill chunks of at least block_size = {block} tokens"
        least = block + self.speculation.slots_per_row
        require(s.max_num_batched_tokens >= least, "scheduler.max_num_batched_tokens", f"{why}: at least {least}")
        threshold = s.long_prefill_token_threshold
        require(threshold == 0 or threshold >= block, "scheduler.long_prefill_token_threshold", why)

    def warnings(self) -> list[str]:
        """What is legal but probably not meant, in words."""
        s, spec = self.scheduler, self.speculation
        full = (spec.width + spec.slots_per_row) * s.max_num_seqs
        if s.max_num_batched_tokens < full:
            return [
                f"scheduler.max_num_batched_tokens = {s.max_num_batched_tokens} is less than"
                f" {full} = (width + draft slots) x max_num_seqs: not every running request fits one step"
            ]
        return []
