# SPDX-License-Identifier: Apache-2.0
"""The benchmark of a server: check that it is there, make prompts, warm up, measure, report."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import aiohttp
import msgspec
import uvloop

from paceline.bench.client import Client, Refused, ServerUnavailable
from paceline.bench.counters import read_counters, speculation_between
from paceline.bench.datasets import Prompt, Prompts, custom, random_ids, random_texts, sharegpt
from paceline.bench.load import Outgoing, Progress, Run, run_load
from paceline.bench.options import BenchOptions
from paceline.bench.report import Report, make_report, to_json
from paceline.bench.texts import SERVER_VOCAB_SIZE, LocalTexts, LocalTokenizer, ServerTexts, Texts
from paceline.core.workload import arrival_times

OPEN_FILES = 65536

Stage = Callable[[str], AbstractContextManager[Progress]]
"""Shows how far a named part of the run is."""
LoadTokenizer = Callable[[str], LocalTokenizer]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run. ``about``: what was run, as a result file says it.

    ``metrics``: the server's metrics before the measured requests, warm-ups done, and after them.
    """

    report: Report
    about: dict[str, Any]
    metrics: tuple[str, str]

    def to_json(self, *, detailed: bool) -> dict[str, Any]:
        """The result file; ``detailed``: with the lists of every request."""
        return to_json(self.report, self.about, detailed=detailed)

    def file_name(self) -> str:
        """The name of the result file, made as vLLM's client does."""
        a = self.about
        limit = "" if a["max_concurrency"] is None else f"-concurrency{a['max_concurrency']}"
        model = str(a["model_id"]).rstrip("/").split("/")[-1]
        return f"{a['label'] or a['backend']}-{a['request_rate']}qps{limit}-{model}-{a['date']}.json"


def run(options: BenchOptions, load_tokenizer: LoadTokenizer, stage: Stage) -> Outcome:
    """Run a benchmark to its end. ``load_tokenizer`` is called for a tokenizer named in the options.

    Raises:
        ServerUnavailable: there is no server, or it cannot make the prompts.
        ConfigError: a dataset file is not what it should be.
        OSError: it cannot be read.
    """
    _allow_many_connections()
    return uvloop.run(_run(options, load_tokenizer, stage))


def _allow_many_connections() -> None:
    """Raise the soft limit on open files, often 1,024, as far as may be: every request in flight has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _run(options: BenchOptions, load_tokenizer: LoadTokenizer, stage: Stage) -> Outcome:
    workload = options.workload
    async with Client(options.base_url, options.path, options.api_key) as client:
        names = await client.wait_ready(options.ready_check_timeout_s)
        model = options.model or next(iter(names), None)
        if model is None:
            raise ServerUnavailable(f"{options.base_url} does not say which models it has: name one with --model")
        texts = await _texts(options, load_tokenizer, client, model)
        with stage("prompts"):
            prompts = await _prompts(options, texts)
        notes = await _warm_up(options, client, model, prompts.warmups, stage)
        outgoing = [
            Outgoing(at, _body(options, model, prompt), prompt.num_tokens)
            for at, prompt in zip(arrival_times(workload), prompts.measured, strict=True)
        ]
        before = await _metrics(client)
        with stage("requests") as progress:
            measured = await run_load(outgoing, client.send, workload.max_concurrency, progress)
        after = await _metrics(client)
        speculation = speculation_between(read_counters(before), read_counters(after))
        notes += await _count_missing(measured, texts)
    report = make_report(options.asked, measured, speculation, notes)
    return Outcome(report, _about(options, model), (before, after))


async def _texts(options: BenchOptions, load_tokenizer: LoadTokenizer, client: Client, model: str) -> Texts | None:
    """The tokenizer, if the prompts need one."""
    if options.tokenizer is not None:
        return LocalTexts(load_tokenizer(options.tokenizer), options.vocab_size)
    as_they_are = options.dataset_name == "custom" and (options.chat or options.skip_chat_template)
    if options.prompt_token_ids or as_they_are:
        return None
    return await ServerTexts.of(client, model, options.vocab_size)


async def _prompts(options: BenchOptions, texts: Texts | None) -> Prompts:
    workload = options.workload
    if options.dataset_name == "random":
        vocab_size = options.vocab_size or (SERVER_VOCAB_SIZE if texts is None else texts.vocab_size)
        workload = replace(workload, vocab_size=vocab_size)
        if options.prompt_token_ids or texts is None:
            return random_ids(workload)
        return await random_texts(replace(workload, input_len=max(0, workload.input_len - texts.num_special)), texts)
    assert options.dataset_path is not None
    wanted = {"seed": workload.seed, "num_prompts": workload.num_prompts, "num_warmups": workload.num_warmups}
    if options.dataset_name == "sharegpt":
        assert texts is not None
        return await sharegpt(options.dataset_path, texts, output_len=options.sharegpt_output_len, **wanted)
    templated = not (options.chat or options.skip_chat_template)
    return await custom(
        options.dataset_path, texts, output_len=options.custom_output_len, templated=templated, **wanted
    )


def _body(options: BenchOptions, model: str, prompt: Prompt) -> bytes:
    """A request as it goes over the wire; made before the run, so that making it delays nothing."""
    fields: dict[str, Any] = {"model": model}
    if options.chat:
        fields["messages"] = [{"role": "user", "content": prompt.content}]
        fields["max_completion_tokens"] = prompt.max_tokens
    else:
        fields["prompt"] = prompt.content
        fields["max_tokens"] = prompt.max_tokens
    fields["stream"] = True
    fields["stream_options"] = {"include_usage": True}
    if options.ignores_eos:
        fields["ignore_eos"] = True
    if options.temperature is not None:
        fields["temperature"] = options.temperature
    return msgspec.json.encode({**fields, **options.extra_body})


async def _warm_up(
    options: BenchOptions, client: Client, model: str, prompts: Sequence[Prompt], stage: Stage
) -> list[str]:
    """Send the warm-ups and wait for them; a note if some failed."""
    if not prompts:
        return []
    outgoing = [Outgoing(0.0, _body(options, model, prompt), prompt.num_tokens) for prompt in prompts]
    with stage("warm-ups") as progress:
        done = await run_load(outgoing, client.send, options.workload.max_concurrency, progress)
    errors = [record.error for record in done.records if not record.ok]
    return [f"{len(errors)} of {len(prompts)} warm-ups failed: {errors[0]}"] if errors else []


async def _metrics(client: Client) -> str:
    """The server's metrics as Prometheus text; empty where it publishes none."""
    try:
        return (await client.get("/metrics")).decode("utf-8", "replace")
    except (Refused, aiohttp.ClientError, OSError):
        return ""


async def _count_missing(run: Run, texts: Texts | None) -> list[str]:
    """Count the output tokens of answers whose server gave no count; a note if there were any."""
    missing = [record for record in run.records if record.ok and not record.output_tokens]
    for record in missing:
        if texts is not None and record.text:
            record.output_tokens = len(await texts.encode(record.text, add_special_tokens=False))
        else:
            record.output_tokens = len(record.chunk_s) - record.silent_chunks
    if not missing:
        return []
    how = "by the tokenizer, from their text" if texts is not None else "as one per chunk"
    return [f"the server gave no token counts for {len(missing)} answers; they were counted {how}"]


def _about(options: BenchOptions, model: str) -> dict[str, Any]:
    workload = options.workload
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label,
        "model_id": model,
        "tokenizer_id": options.tokenizer or (None if options.prompt_token_ids else model),
        "num_prompts": workload.num_prompts,
        **options.metadata,
        "request_rate": "inf" if math.isinf(workload.request_rate) else workload.request_rate,
        "burstiness": workload.burstiness,
        "max_concurrency": workload.max_concurrency,
    }
