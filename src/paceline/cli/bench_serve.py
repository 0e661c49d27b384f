# SPDX-License-Identifier: Apache-2.0
"""``paceline bench serve``: the load client. Flags are named as vLLM's."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from paceline.cli.output import CommandError, integer, json_object, progress_bar, stderr, write_json

if TYPE_CHECKING:
    from paceline.bench.texts import LocalTokenizer

REFRESHES_PER_S = 2
"""Of the progress bar: drawing it takes time from the client that measures."""
RANDOM_DEFAULTS: dict[str, Any] = {"input_len": 1024, "output_len": 128, "range_ratio": "0.0", "prefix_len": 0}

Pairs = Annotated[list[str] | None, Parameter(consume_multiple=True, negative="")]
Flag = Annotated[bool, Parameter(negative="")]


def serve(  # size: most of it is the list of flags, each with its help
    *,
    backend: Annotated[
        Literal["openai", "openai-chat"], Parameter(help="What is asked: completions, or chat completions.")
    ] = "openai",
    base_url: Annotated[str | None, Parameter(help="The server's address, instead of host and port.")] = None,
    host: Annotated[str, Parameter(help="The server's host.")] = "127.0.0.1",
    port: Annotated[int, Parameter(converter=integer, help="The server's port.")] = 8000,
    endpoint: Annotated[
        str | None, Parameter(help="Path that answers prompts; by default /v1/completions or /v1/chat/completions.")
    ] = None,
    model: Annotated[str | None, Parameter(help="The model to ask for; by default the first on offer.")] = None,
    tokenizer: Annotated[
        str | None,
        Parameter(help="A folder with tokenizer.json, a .gguf file, or smollm2; by default the server's own is asked."),
    ] = None,
    dataset_name: Annotated[
        Literal["random", "sharegpt", "custom"],
        Parameter(help="Random prompts, a ShareGPT JSON file, or JSON lines with `prompt` and `output_tokens`."),
    ] = "random",
    dataset_path: Annotated[Path | None, Parameter(help="The file of sharegpt or custom.")] = None,
    random_input_len: Annotated[
        int | None, Parameter(converter=integer, help="Tokens of a random prompt; 1024 by default.")
    ] = None,
    random_output_len: Annotated[
        int | None, Parameter(converter=integer, help="Tokens to ask for; 128 by default.")
    ] = None,
    random_range_ratio: Annotated[
        str | None,
        Parameter(
            help="R spreads both lengths uniformly over L (1 - R) to L (1 + R); JSON with `input` and `output` sets"
            " them apart; 0 by default."
        ),
    ] = None,
    random_prefix_len: Annotated[
        int | None, Parameter(converter=integer, help="Tokens in front that all random prompts share; 0 by default.")
    ] = None,
    random_vocab_size: Annotated[
        int | None,
        Parameter(
            converter=integer,
            help="Random ids are below this; the tokenizer's by default, 32000 if that is the server's.",
        ),
    ] = None,
    prompt_token_ids: Annotated[Flag, Parameter(help="Send random prompts as token ids, not as text.")] = False,
    sharegpt_output_len: Annotated[
        int | None, Parameter(converter=integer, help="Tokens to ask for; by default as many as the file's answer has.")
    ] = None,
    custom_output_len: Annotated[
        int | None,
        Parameter(converter=integer, help="Tokens to ask for; 256 by default, -1: each line's output_tokens."),
    ] = None,
    skip_chat_template: Annotated[
        Flag, Parameter(help="Send custom prompts to /v1/completions without the model's chat template.")
    ] = False,
    ignore_eos: Annotated[
        bool | None, Parameter(help="Let answers run to their full length; by default for random prompts.")
    ] = None,
    temperature: Annotated[float | None, Parameter(help="0 is greedy; the server's default by default.")] = None,
    extra_body: Annotated[str | None, Parameter(help="JSON object whose fields go into every request.")] = None,
    request_rate: Annotated[
        float, Parameter(help="Requests per second, at random times; inf: all at once, as far as the limit allows.")
    ] = math.inf,
    burstiness: Annotated[
        float, Parameter(help="Shape of the gamma-distributed gaps; 1: Poisson, less: bursts, inf: even.")
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, Parameter(converter=integer, help="Requests in flight at most; no limit by default.")
    ] = None,
    num_prompts: Annotated[int, Parameter(converter=integer, help="Requests to measure.")] = 1000,
    num_warmups: Annotated[
        int, Parameter(converter=integer, help="Requests of their own that come first and do not count.")
    ] = 0,
    seed: Annotated[int, Parameter(converter=integer, help="The same seed gives the same lengths and arrivals.")] = 0,
    percentile_metrics: Annotated[
        str,
        Parameter(
            help="Latencies to report, of ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue."
        ),
    ] = "ttft,tpot,itl",
    metric_percentiles: Annotated[str, Parameter(help="Percentiles of these, separated by commas.")] = "99",
    goodput: Annotated[
        Pairs, Parameter(help="METRIC:MS, limits on ttft, tpot or e2el that a good request keeps; several may follow.")
    ] = None,
    save_result: Annotated[Flag, Parameter(help="Write a JSON result file.")] = False,
    save_detailed: Annotated[Flag, Parameter(help="With lists of every request in it.")] = False,
    result_dir: Annotated[Path | None, Parameter(help="Folder for it; the current one by default.")] = None,
    result_filename: Annotated[
        str | None, Parameter(help="Its name; by default from label, rate, concurrency, model and date.")
    ] = None,
    label: Annotated[str | None, Parameter(help="A name for the run in the result file.")] = None,
    metadata: Annotated[Pairs, Parameter(help="KEY=VALUE for the result file; several may follow.")] = None,
    ready_check_timeout_sec: Annotated[
        float, Parameter(help="Seconds to wait for a server that is starting; 0: it must be up.")
    ] = 0,
    disable_tqdm: Annotated[Flag, Parameter(help="No progress bar.")] = False,
) -> None:
    """Send load to a server and measure it: TTFT, TPOT, ITL, throughput, and the client's own delays.

    Lengths and arrivals are those of `vllm bench serve` with the same options, and those of a simulation. A stream
    that ends in an error event, or without [DONE], counts as failed. OPENAI_API_KEY is sent if it is set.
    """
    given = {
        "input_len": random_input_len, "output_len": random_output_len,
        "range_ratio": random_range_ratio, "prefix_len": random_prefix_len,
    }  # fmt: skip
    _refuse_unused(dataset_name, given, sharegpt_output_len, custom_output_len)
    saving = {"--save-detailed": save_detailed, "--result-dir": result_dir, "--result-filename": result_filename,
              "--label": label, "--metadata": metadata}  # fmt: skip
    if not save_result and (unused := [option for option, value in saving.items() if value]):
        raise CommandError(f"{unused[0]}: is about the result file; add --save-result")
    try:
        from paceline.bench.client import ServerUnavailable
        from paceline.bench.options import CUSTOM_OUTPUT_LEN, BenchOptions
        from paceline.bench.report import to_text
        from paceline.bench.serve import run
        from paceline.core.workload import Workload
    except ModuleNotFoundError as error:
        raise CommandError(f"the benchmark client needs {error.name}: pip install 'paceline[serve]'") from error
    workload = Workload(
        **_random_lengths(given),
        num_prompts=num_prompts,
        num_warmups=num_warmups,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        seed=seed,
    )
    custom_len = CUSTOM_OUTPUT_LEN if custom_output_len is None else custom_output_len
    options = BenchOptions(
        base_url=base_url or f"http://{f'[{host}]' if ':' in host else host}:{port}",
        backend=backend,
        endpoint=endpoint,
        api_key=os.environ.get("OPENAI_API_KEY"),
        model=model,
        tokenizer=tokenizer,
        workload=workload,
        dataset_name=dataset_name,
        dataset_path=dataset_path,
        vocab_size=random_vocab_size,
        prompt_token_ids=prompt_token_ids,
        sharegpt_output_len=sharegpt_output_len,
        custom_output_len=None if custom_len == -1 else custom_len,
        skip_chat_template=skip_chat_template,
        ignore_eos=ignore_eos,
        temperature=temperature,
        extra_body=json_object(extra_body, "--extra-body") or {},
        percentile_metrics=tuple(name.strip() for name in percentile_metrics.split(",")),
        metric_percentiles=tuple(_numbers(metric_percentiles.split(","), "--metric-percentiles")),
        goodput_slo_ms=_limits(goodput or ()),
        ready_check_timeout_s=ready_check_timeout_sec,
        label=label,
        metadata=dict(_pair(text, "=", "--metadata") for text in metadata or ()),
    )
    try:
        outcome = run(options, _load_tokenizer, stages(not disable_tqdm))
    except ServerUnavailable as error:
        raise CommandError(str(error)) from error
    print(to_text(outcome.report), flush=True)
    if save_result:
        _save(outcome.to_json(detailed=save_detailed), result_dir or Path(), result_filename or outcome.file_name())
    if not outcome.report.summary.completed:
        sys.exit(1)


def _refuse_unused(
    dataset: str, random: dict[str, Any], sharegpt_output_len: int | None, custom_output_len: int | None
) -> None:
    """Options of one dataset do nothing for another."""
    options = {f"--random-{name.replace('_', '-')}": ("random", value) for name, value in random.items()}
    options["--sharegpt-output-len"] = ("sharegpt", sharegpt_output_len)
    options["--custom-output-len"] = ("custom", custom_output_len)
    for option, (owner, value) in options.items():
        if value is not None and owner != dataset:
            raise CommandError(f"{option}: is for --dataset-name {owner}, not {dataset}")


def _save(result: dict[str, Any], folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(result, str(folder / name))
    stderr().print(f"wrote {folder / name}", soft_wrap=True)


def _random_lengths(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of the workload."""
    chosen = {name: RANDOM_DEFAULTS[name] if value is None else value for name, value in given.items()}
    ratio = chosen.pop("range_ratio")
    try:
        parsed = json.loads(ratio)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict) and set(parsed) == {"input", "output"}:
        return {**chosen, "input_range_ratio": parsed["input"], "output_range_ratio": parsed["output"]}
    if isinstance(parsed, int | float) and not isinstance(parsed, bool):
        return {**chosen, "range_ratio": float(parsed)}
    raise CommandError(f'--random-range-ratio: must be a number or {{"input": A, "output": B}}, got {ratio!r}')


def _load_tokenizer(name: str) -> LocalTokenizer:
    try:
        from paceline.runtime.tokenizer import TokenizerUnavailable, load_tokenizer
    except ModuleNotFoundError as error:
        raise CommandError(
            f"--tokenizer needs {error.name}: pip install 'paceline[engine]', or leave it away to ask the server's"
        ) from error
    try:
        return load_tokenizer(name)
    except TokenizerUnavailable as error:
        raise CommandError(f"--tokenizer: {error}") from error


def stages(shown: bool) -> Callable[[str], contextlib.AbstractContextManager[Callable[[int, int], None]]]:
    """Progress bars on stderr, one after the other; silent without a terminal."""
    return lambda what: progress_bar(what, shown=shown, refreshes_per_s=REFRESHES_PER_S)


def _numbers(texts: Sequence[str], option: str) -> list[float]:
    try:
        return [float(text) for text in texts]
    except ValueError:
        raise CommandError(f"{option}: must be numbers separated by commas, got {','.join(texts)!r}") from None


def _pair(text: str, separator: str, option: str) -> tuple[str, str]:
    key, found, value = text.partition(separator)
    if not found or not key.strip():
        raise CommandError(f"{option}: must look like KEY{separator}VALUE, got {text!r}")
    return key.strip(), value.strip()


def _limits(texts: Sequence[str]) -> dict[str, float]:
    """Goodput limits by the name of the latency, in milliseconds."""
    pairs = [_pair(text, ":", "--goodput") for text in texts]
    return {name: _numbers([value], "--goodput")[0] for name, value in pairs}
