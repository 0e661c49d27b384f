# SPDX-License-Identifier: Apache-2.0
"""Random scenarios of any kind, played to their end.

    python -m tests.props.scenarios --seed 1 --index 17

plays scenario 17 of seed 1 again. A scenario depends on nothing but the two numbers.
"""

from __future__ import annotations

import argparse
from collections import Counter
from random import Random
from typing import Any

from paceline.connectors.decode_bench.scheduler import DecodeBenchScheduler
from paceline.core.config import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    GraphConfig,
    GroupConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from paceline.core.request import GeneratedTokens, Request, SamplingParams, StoredTokens, TokenSource, TraceTokens

from .harness import STOP_TOKEN, World
from .shadow import Wrong, require
from .transport import NEVER, Offer, Outcome, ScriptedConnector

CONNECTORS = ("none", "none", "decode_bench", "scripted", "scripted")


def random_config(rng: Random) -> EngineConfig:
    """Anything that the engine accepts, small and tight."""
    while True:
        try:
            return _any_config(rng)
        except ConfigError:
            continue


def _any_config(rng: Random) -> EngineConfig:
    spec, groups = _speculation(rng), _groups(rng)
    width = spec.width + spec.slots_per_row
    seqs = rng.choice((1, 2, 3, 4, 4, 5, 6, 8))
    budget = rng.choice((width, width + 1, 2 * width + 1, 3 * width, 12, 20, 33, 64, 256, width * seqs))
    mml = rng.choice((8, 16, 24, 32, 40, 48, 64, 96))
    size = rng.choice((1, 2, 3, 4, 4, 4, 8, 8, 16))
    least = -(-(mml + spec.width + spec.lookahead_tokens) // size) * len(groups)
    extra = rng.choice((0, 0, 1, 2, 3, rng.randint(0, 2 * least), rng.randint(0, 4 * least)))
    return EngineConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=max(budget, width),
            max_model_len=mml,
            long_prefill_token_threshold=rng.randint(1, 16) if rng.random() < 0.3 else 0,
            policy=rng.choice(("fcfs", "fcfs", "priority")),
            later_deadline_s=rng.choice((2.0, 5.0, 20.0)),
            transfer_deadline_s=rng.choice((3.0, 8.0, 30.0)),
            load_failure_policy=rng.choice(("fail", "recompute")),
        ),
        cache=CacheConfig(
            num_blocks=least + 1 + extra,
            block_size=size,
            enable_prefix_caching=rng.random() < 0.75,
            groups=groups,
        ),
        speculation=spec,
        graphs=GraphConfig(mode=rng.choice(("NONE", "FULL_DECODE_ONLY"))),
    )


def _speculation(rng: Random) -> SpeculationConfig:
    K = rng.choice((0, 0, 1, 2, 3, 3, 4))
    method: Any = rng.choice(("ngram", "ngram", "eagle3", "mtp", "draft_model")) if K else None
    return SpeculationConfig(
        method=method,
        num_speculative_tokens=K,
        pad_resumed=rng.choice(("off", "running", "resumed", "resumed")),
        lookahead=rng.choice((None, None, None, 0, K, K + 2)),
        draft_slots=rng.choice((None, None, None, 0, 1)),
        disable_eagle_block_drop=rng.random() < 0.3,
    )


def _groups(rng: Random) -> tuple[GroupConfig, ...]:
    full, recurrent = GroupConfig(), GroupConfig(kind="recurrent")
    sliding = GroupConfig(kind="sliding", sliding_window=rng.randint(1, 24))
    several = ((sliding,), (recurrent,), (full, sliding, recurrent), (recurrent, full))
    return rng.choice(((full,), (full,), (full,), (full, sliding), (full, recurrent), rng.choice(several)))


def random_world(rng: Random, config: EngineConfig) -> World:
    """A rank with a connector of some kind and a model, drafter and network that misbehave or do not."""
    kind = rng.choice(CONNECTORS)
    connector: Any = None
    if kind == "decode_bench":
        connector = DecodeBenchScheduler(config.cache.block_size)
    elif kind == "scripted":
        connector = ScriptedConnector(whole=rng.random() < 0.7)
    row_errors = rng.choice((0.0, 0.0, 0.01, 0.05))
    return World(config, connector, rng, short_drafts=rng.random() < 0.6, row_errors=row_errors)


class Requests:
    """Makes requests, some of which begin as others did.

    ``flaky``: share of loads that fail, arrive in part, or never end.
    """

    def __init__(self, rng: Random, config: EngineConfig) -> None:
        self.rng = rng
        self.mml = config.scheduler.max_model_len
        self.priorities = config.scheduler.policy == "priority"
        self.shared = rng.choice((0.0, 0.5, 0.9))
        self.stems = [[10 + i] * rng.randint(1, self.mml) for i in range(rng.choice((1, 1, 2)))]
        self.flaky = rng.choice((0.0, 0.0, 0.2, 0.5))
        self.later = rng.choice((0.0, 0.0, 0.4))
        self.made: list[Request] = []

    def request(self, now: float) -> Request:
        rng = self.rng
        source = self._source()
        room = self.mml - source.length
        params = SamplingParams(
            max_tokens=rng.randint(1, rng.choice((room, min(room, 10), 2 * self.mml))),
            stop_token_ids=(STOP_TOKEN,) if rng.random() < 0.5 else (),
        )
        request = Request(
            f"r{len(self.made)}",
            source,
            params,
            arrival=float(int(now) // 3),
            priority=rng.randint(0, 2) if self.priorities else 0,
            cache_salt="salt" if rng.random() < 0.05 else None,
        )
        self.made.append(request)
        return request

    def _source(self) -> TokenSource:
        rng, longest = self.rng, self.mml - 1
        if rng.random() >= self.shared:
            length = rng.randint(1, longest)
            draw = rng.random()
            if draw < 0.7:
                return StoredTokens([100 + len(self.made)] * length)
            if draw < 0.85:
                return GeneratedTokens(length, rng.randint(0, 3), 50)
            return TraceTokens(length, [rng.randint(0, 1) for _ in range(-(-length // 4))], 4, 1000)
        if self.made and rng.random() < 0.3:
            first = rng.choice(self.made)
            ids = first.tokens(0, first.num_tokens)
        else:
            ids = list(rng.choice(self.stems))
        ids += [100 + len(self.made)] * rng.choice((0, 0, 1, 2, 5, 13))
        return StoredTokens(ids[:longest])

    def offer(self, request: Request) -> Offer | None:
        rng, length = self.rng, request.num_prompt
        if rng.random() < 0.2:
            return None
        outcome: Outcome = rng.choice(("failure", "part")) if rng.random() < 0.8 * self.flaky else "all"
        return Offer(
            tokens=rng.choice((length, length - 1, rng.randint(0, length), 10**6)),
            is_async=rng.random() < 0.6,
            later=rng.choice((1, 3, 8, NEVER)) if rng.random() < self.later else 0,
            steps=NEVER if rng.random() < 0.2 * self.flaky else rng.choice((0, 1, 1, 2, 5, 12)),
            outcome=outcome,
            reads=rng.choice((1, 3, 9, NEVER if self.flaky else 9)) if rng.random() < 0.2 else 0,
        )


def play(seed: int, index: int) -> Counter[str]:
    """Play one scenario to its end; returns its steps and which departures came up.

    Raises:
        Wrong: an invariant was broken, a request starved, or a block leaked.
    """
    try:
        return _play(Random(f"{seed}:{index}"))
    except Exception as error:
        again = f"python -m tests.props.scenarios --seed {seed} --index {index}"
        raise Wrong(f"scenario {index} of seed {seed} ({again}): {error}") from error


def _play(rng: Random) -> Counter[str]:
    config = random_config(rng)
    world = random_world(rng, config)
    requests, s = Requests(rng, config), world.scheduler
    arrivals = _arrivals(rng)
    # Twice what all of them take one after the other, token by token, each with a load that waits for its deadlines.
    limit = arrivals[-1] + 2 * len(arrivals) * (2 * config.scheduler.max_model_len + 60)
    disturbed = rng.random() < 0.4
    while arrivals or s.has_work:
        while arrivals and arrivals[0] <= world.step:
            arrivals.pop(0)
            request = requests.request(world.now)
            world.add(request, requests.offer(request))
        left = [*s.running, *s.holding, *s.waiting]
        require(world.step <= limit, f"not done after {world.step} steps: {left}, held {s.transfers.held}")
        if disturbed:
            disturb(world, rng)
        world.begin()
        if disturbed and s.requests and rng.random() < 0.05:
            world.abort(rng.choice(list(s.requests)))
        world.commit(invalid_first=rng.random() < 0.05)
    check_end(world)
    return Counter({"scenarios": 1, "steps": world.step, **{f"departure {name}": 1 for name in s.departures}})


def _arrivals(rng: Random) -> list[int]:
    """Steps at which requests arrive, in order."""
    gap, step, steps = rng.choice((0, 0, 1, 2, 5)), 0, []
    for _ in range(rng.choice((1, 2, 3, 4, 5, 6, 8, 10))):
        steps.append(step)
        step += rng.randint(0, gap)
    return steps


def disturb(world: World, rng: Random) -> None:
    """Now and then somebody leaves, is sent back, or is read."""
    s = world.scheduler
    if s.requests and rng.random() < 0.03:
        world.abort(rng.choice(list(s.requests)))
    if rng.random() < 0.03 and (names := world.preemptible()):
        world.preempt(rng.choice(names))
    if rng.random() < 0.05 and (running := world.fenceable()):
        world.fence(rng.choice(running), rng.choice((0, 1, 3, 8)))


def check_end(world: World) -> None:
    """Everybody got an end, and once the last transfer ended all blocks are free."""
    s = world.scheduler
    require(world.ended.keys() == world.requests.keys(), f"ended: {world.ended}, of {list(world.requests)}")
    for transfer in world.transport.under_way:
        transfer.ends_at = world.step
    world.begin()
    world.commit()
    require(s.pool.num_free == s.pool.num_usable, f"blocks {s.pool.owners()} leaked")
    require(not s.has_work, "work is left")
    require(not world.executor.texts, f"sequences {list(world.executor.texts)} were never retired")


def main() -> None:
    """Play scenarios, and count what happened or say what went wrong."""
    parser = argparse.ArgumentParser(description="Play random scenarios on the scheduler.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--index", type=int, default=0, help="first scenario")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--keep-going", action="store_true", help="print each failure's message and go on")
    options = parser.parse_args()
    seen: Counter[str] = Counter()
    for index in range(options.index, options.index + options.count):
        try:
            seen.update(play(options.seed, index))
        except Wrong as wrong:
            if not options.keep_going:
                raise
            seen["wrong"] += 1
            print(wrong)
    for name, value in sorted(seen.items()):
        print(f"{name:40} {value}")


if __name__ == "__main__":
    main()
