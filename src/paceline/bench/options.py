# SPDX-License-Identifier: Apache-2.0
"""What ``paceline bench serve`` is asked to do, checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.bench.report import Asked
from paceline.core.config import require, require_choice, require_int
from paceline.core.results import METRICS
from paceline.core.workload import Workload

Backend = Literal["openai", "openai-chat"]
DatasetName = Literal["random", "sharegpt", "custom"]

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DEFAULT_METRICS = ("ttft", "tpot", "itl")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
CUSTOM_OUTPUT_LEN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """A benchmark of a server; names follow the options of ``vllm bench serve``.

    ``workload``: traffic, and the lengths of the random dataset. ``endpoint`` None: the backend's. ``model`` None: the
    first that the server offers. ``tokenizer`` None: the server's own. ``vocab_size``: ids of random prompts are below
    it; None: the tokenizer's, and 32,000 where that is the server's. ``prompt_token_ids``: send ids, not text.
    ``ignore_eos`` None: for the random dataset only. ``custom_output_len`` None: what each line says.
    ``goodput_slo_ms``: limits by name of the latency.
    """

    base_url: str
    backend: Backend = "openai"
    endpoint: str | None = None
    api_key: str | None = None
    model: str | None = None
    tokenizer: str | None = None
    workload: Workload = field(default_factory=Workload)
    dataset_name: DatasetName = "random"
    dataset_path: Path | None = None
    vocab_size: int | None = None
    prompt_token_ids: bool = False
    sharegpt_output_len: int | None = None
    custom_output_len: int | None = CUSTOM_OUTPUT_LEN
    skip_chat_template: bool = False
    ignore_eos: bool | None = None
    temperature: float | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    percentile_metrics: tuple[str, ...] = DEFAULT_METRICS
    metric_percentiles: tuple[float, ...] = (99.0,)
    goodput_slo_ms: Mapping[str, float] = field(default_factory=dict)
    ready_check_timeout_s: float = 0.0
    label: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice(self.backend, tuple(ENDPOINTS), "backend")
        require(self.base_url.startswith(("http://", "https://")), "base_url",
                f"must begin with http:// or https://, got {self.base_url!r}")  # fmt: skip
        require(self.endpoint is None or self.endpoint.startswith("/"), "endpoint", "must begin with /")
        self._check_dataset()
        if self.vocab_size is not None:
            require_int(self.vocab_size, 2, "random_vocab_size")
        for name in ("sharegpt_output_len", "custom_output_len"):
            if getattr(self, name) is not None:
                require_int(getattr(self, name), 1, name)
        for name in self.percentile_metrics:
            require(name in METRICS, "percentile_metrics", f"unknown {name!r}, known are {', '.join(METRICS)}")
        for p in self.metric_percentiles:
            require(0.0 <= p <= 100.0, "metric_percentiles", f"must lie in [0, 100], got {p:g}")
        for name, limit_ms in self.goodput_slo_ms.items():
            require(name in GOODPUT_METRICS, "goodput", f"unknown {name!r}, known are {', '.join(GOODPUT_METRICS)}")
            require(limit_ms >= 0.0, "goodput", f"{name}: must be at least 0 ms, got {limit_ms:g}")
        open_loop = not math.isinf(self.workload.request_rate)
        require(open_loop or self.workload.burstiness == 1.0, "burstiness", "shapes arrivals only with a request_rate")

    def _check_dataset(self) -> None:
        require_choice(self.dataset_name, ("random", "sharegpt", "custom"), "dataset_name")
        is_random = self.dataset_name == "random"
        if is_random:
            require(self.dataset_path is None, "dataset_path", "random prompts come from no file; see dataset_name")
        else:
            require(self.dataset_path is not None, "dataset_path", f"{self.dataset_name} needs the file")
        require(is_random or not self.prompt_token_ids, "prompt_token_ids", "is for the random dataset")
        require(is_random or self.vocab_size is None, "random_vocab_size", "is for the random dataset")
        require(not (self.prompt_token_ids and self.chat), "prompt_token_ids",
                "chat takes messages, not ids; use the backend openai")  # fmt: skip
        require(not (self.skip_chat_template and (self.chat or self.dataset_name != "custom")), "skip_chat_template",
                "only custom prompts for the backend openai are put into the chat template here")  # fmt: skip

    @property
    def chat(self) -> bool:
        return self.backend == "openai-chat"

    @property
    def path(self) -> str:
        """Of the endpoint that answers prompts."""
        return self.endpoint or ENDPOINTS[self.backend]

    @property
    def ignores_eos(self) -> bool:
        """Whether answers run to their full length; random prompts ask for exact ones unless told otherwise."""
        return self.dataset_name == "random" if self.ignore_eos is None else self.ignore_eos

    @property
    def asked(self) -> Asked:
        """What the report has."""
        return Asked(
            metrics=self.percentile_metrics,
            percentiles=self.metric_percentiles,
            goodput_slo_ms=self.goodput_slo_ms,
            request_rate=self.workload.request_rate,
            max_concurrency=self.workload.max_concurrency,
        )
