# SPDX-License-Identifier: Apache-2.0
"""Ranks in lock-step as threads of one process: real loop and sockets, a scripted model, a collective of threads."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from typing import Any

import zmq

from paceline.core.config import CacheConfig, EngineConfig, GraphConfig, SchedulerConfig, SpeculationConfig
from paceline.core.connector import SchedulerConnector
from paceline.core.lockstep import RUN, Agreement, Vote
from paceline.core.plan import PLACEHOLDER, NewSequence, StepPlan, StepResult, TransferEvent
from paceline.core.request import SamplingParams
from paceline.core.scheduler import Scheduler
from paceline.engine.line import PeerLost, WaitTimes
from paceline.engine.messages import Abort, Add, Stop, ToEngine, Update, decode_from_engine, encode
from paceline.engine.rank import Rank, StepCounts
from paceline.runtime.line import LineLoop
from paceline.runtime.loop import Desk, EngineLoop

K, W = 3, 4
DEADLINE_S = 30.0
VOCAB = 1000


def engine_config(**scheduler: Any) -> EngineConfig:
    return EngineConfig(
        scheduler=SchedulerConfig(
            **{"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 120} | scheduler
        ),
        cache=CacheConfig(num_blocks=40, block_size=8),
        speculation=SpeculationConfig(method="ngram", num_speculative_tokens=K),
        graphs=GraphConfig(mode="FULL_DECODE_ONLY"),
    )


def said(prompt: Sequence[int], count: int) -> list[int]:
    """What the scripted model answers to ``prompt``."""
    return [(sum(prompt) * 31 + 7 * k) % VOCAB for k in range(count)]


class ScriptedModel:
    """Tokens are a function of the prompt and the position; some drafts are wrong. ``seen``: (plan, agreement)s.

    ``events`` are reported once; ``errors``, by row, belong to the next step with rows.
    """

    def __init__(self, on_launch: Any = None) -> None:
        self.events: list[TransferEvent] = []
        self.errors: dict[int, str] = {}
        self.steps = StepCounts()
        self.seen: list[tuple[StepPlan, Agreement | None]] = []
        self._on_launch = on_launch
        self._new: dict[int, NewSequence] = {}

    def launch(self, plan: StepPlan, agreement: Agreement | None) -> None:
        for new in plan.first:
            self._new[new.seq] = new
        self.seen.append((plan, agreement))
        if agreement is None or agreement.run == RUN:
            self.steps.count(plan.tokens, agreement)
        if self._on_launch is not None:
            self._on_launch()

    def collect(self) -> StepResult:
        plan, _ = self.seen[-1]
        sampled, drafts = [], []
        events, self.events = self.events, []
        errors: dict[int, str] = {}
        if plan.rows:
            errors, self.errors = self.errors, {}
        for i, row in enumerate(plan.rows):
            source = self._new[row.seq].source
            script = said(source.tokens(0, source.length), 200)
            if not row.samples or i in errors:
                sampled.append(())
                drafts.append(())
                continue
            k = row.start + row.n - len(row.drafts) - source.length
            tokens: list[int] = []
            for draft in (*row.drafts, PLACEHOLDER):
                tokens.append(script[k + len(tokens)])
                if draft != tokens[-1]:
                    break
            sampled.append(tuple(tokens))
            after = k + len(tokens)
            # As many drafts as the position says, the last of them wrong now and then.
            drafts.append(tuple(script[after + i] + (after % 5 == i) for i in range(after % (K + 1))))
        return StepResult(plan.step, sampled, drafts, errors=errors or None, transfers=events)


class ThreadVotes:
    """The collective: every rank leaves its vote and waits for all others'. ``left``: how often each went on."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._slots: list[Vote | None] = [None] * ranks
        self.history: list[list[Vote]] = []
        self.left = [0] * ranks

    def of(self, rank: int) -> Any:
        outer = self

        class Exchange:
            def join(self, vote: Vote) -> list[Vote]:
                outer._slots[rank] = vote
                try:
                    outer._barrier.wait(DEADLINE_S)
                    votes = [vote for vote in outer._slots if vote is not None]
                    if rank == 0:
                        outer.history.append(votes)
                    outer._barrier.wait(DEADLINE_S)
                    outer.left[rank] += 1
                except threading.BrokenBarrierError:
                    raise PeerLost("a rank did not vote") from None
                return votes

        return Exchange()


class Line:
    """``ranks`` loops, each in a thread, and their front. ``ranks=0``: one rank on its own, without votes."""

    def __init__(
        self,
        ranks: int,
        config: EngineConfig | None = None,
        connectors: Sequence[SchedulerConnector | None] = (),
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.config = config or engine_config()
        count = max(ranks, 1)
        self.votes = ThreadVotes(count)
        self.models = [ScriptedModel() for _ in range(count)]
        self.schedulers = [Scheduler(self.config, half) for half in connectors or [None] * count]
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.refusals: dict[str, str] = {}
        self.failures: list[BaseException] = []
        self.snapshots: list[Any] = [None] * count
        self._names = itertools.count()
        self._links = [os.pipe() for _ in range(count)]
        self._outbox = self._socket(zmq.PULL)
        self._outbox.bind("inproc://front")
        # Kept until the end, whoever has left by then: within a process, a sender without a receiver waits for ever.
        self._inboxes = [self._socket(zmq.PULL) for _ in range(count)]
        for i, inbox in enumerate(self._inboxes):
            inbox.bind(f"inproc://inbox-{i}")
        self._to = [self._connected(i) for i in range(count)]
        self.threads = []
        self._outs = [self._socket(zmq.PUSH) for _ in range(count)]
        for i, (inbox, out) in enumerate(zip(self._inboxes, self._outs, strict=True)):
            out.connect("inproc://front")
            rank, waits = Rank(self.schedulers[i], self.models[i]), WaitTimes()
            desk = Desk(rank, inbox, out, self._links[i][0], number=i, waits=waits if ranks else None)
            peers = [self._connected(j) for j in range(count) if j != i]
            loop = LineLoop(rank, desk, self.votes.of(i), peers, waits) if ranks else EngineLoop(rank, desk)
            self.threads.append(threading.Thread(target=self._run, args=(loop,), daemon=True))
        for thread in self.threads:
            thread.start()

    def _run(self, loop: LineLoop | EngineLoop) -> None:
        try:
            loop.run()
        except BaseException as error:
            self.failures.append(error)
            self.votes._barrier.abort()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDTIMEO, int(DEADLINE_S * 1000))
        return socket

    def _connected(self, rank: int) -> zmq.Socket[bytes]:
        socket = self._socket(zmq.PUSH)
        socket.connect(f"inproc://inbox-{rank}")
        return socket

    def send(self, rank: int, *messages: ToEngine) -> None:
        self._to[rank].send(encode(messages))

    def add(self, rank: int, prompt: Sequence[int], max_tokens: int, name: str | None = None) -> str:
        name = name or f"r{next(self._names)}"
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.tokens[name] = []
        self.send(rank, Add(name, list(prompt), params, 0.0))
        return name

    def abort(self, rank: int, *names: str) -> None:
        self.send(rank, Abort(names))

    def receive(self, wait_ms: int) -> bool:
        """Take in one message; False if none came."""
        if not self._outbox.poll(wait_ms):
            assert not self.failures, self.failures
            return False
        message = decode_from_engine(self._outbox.recv())
        assert isinstance(message, Update)
        if message.stats is not None:
            self.snapshots[message.rank] = message.stats
        for output in message.outputs:
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                assert output.request_id not in self.reasons, "ended twice"
                self.reasons[output.request_id] = output.finish_reason
                if output.error is not None:
                    self.refusals[output.request_id] = output.error
        return True

    def drain(self) -> None:
        """Receive until every request has ended."""
        while len(self.reasons) < len(self.tokens):
            assert self.receive(int(DEADLINE_S * 1000)), f"no end of {set(self.tokens) - set(self.reasons)}"

    def stop(self, *ranks: int) -> None:
        """Ask ``ranks`` to stop and wait until all threads have ended."""
        for rank in ranks or range(len(self.threads)):
            self.send(rank, Stop())
        for thread in self.threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in self.threads)
        assert not self.failures, self.failures

    def close(self) -> None:
        """End whatever still runs, and free everything."""
        for _, end in self._links:
            os.close(end)
        self.votes._barrier.abort()
        for thread in self.threads:
            thread.join(DEADLINE_S)
        for start, _ in self._links:
            os.close(start)
        self.context.destroy(linger=0)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
