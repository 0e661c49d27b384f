# SPDX-License-Identifier: Apache-2.0
"""What the front and an engine process send each other, as msgpack over sockets that drop nothing.

    front  -> engine   a list of Add, Abort and Stop per message
    engine -> engine   a list with one Wake, between ranks in lock-step
    engine -> front    Ready once, then an Update per step (or when only statistics changed); Beat now and then, to
                       show that the process is not frozen; Dead at most once, last
    node   -> front    Arrival once, before a machine without a server starts its engines
    front  -> node     Placed, which says what ranks they are

Several engines (ranks) may share the way to a front, so what they send says whose it is.

Times are seconds of the system's monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.core.plan import StepOutput
from paceline.core.request import Request, SamplingParams, StoredTokens
from paceline.core.stats import SchedulerStats
from paceline.engine.line import WaitTimes
from paceline.engine.rank import StepCounts


class Add(msgspec.Struct, frozen=True, tag=True):
    """A new request; `core.request.Request` explains the fields."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    arrival: float
    eos_token_id: int | None = None
    priority: int = 0
    cache_salt: str | None = None

    def request(self) -> Request:
        """What the scheduler queues."""
        return Request(
            self.request_id,
            StoredTokens(self.prompt_token_ids),
            self.params,
            arrival=self.arrival,
            priority=self.priority,
            eos_token_id=self.eos_token_id,
            cache_salt=self.cache_salt,
        )


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for these requests any more; unknown ids are old news."""

    request_ids: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process; requests that are still there get no further output.

    A rank in lock-step ends when the group next falls asleep, so abort first what would keep it awake.
    """


class Wake(msgspec.Struct, frozen=True, tag=True):
    """From rank to rank: wave number ``wave`` begins."""

    wave: int


ToEngine = Add | Abort | Stop | Wake


class Snapshot(msgspec.Struct, frozen=True):
    """A rank's gauges (first three, and ``quarantined_blocks``) and totals since the start; see `core.stats`.

    ``steps_by_mode``, ``dummies_by_mode``, ``graph_padding_tokens``: `engine.rank.StepCounts`, in the order of its
    modes. ``idle_admissions``: requests that came when their rank had no other. ``barrier_wait_s`` and the buckets:
    `engine.line.WaitTimes`.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    busy_steps: int = 0
    uniform_steps: int = 0
    misses: dict[str, int] = {}
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_hits: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    load_failures: int = 0
    late_transfers: int = 0
    quarantined_blocks: int = 0
    steps_by_mode: tuple[int, int] = (0, 0)
    dummies_by_mode: tuple[int, int] = (0, 0)
    graph_padding_tokens: int = 0
    idle_admissions: int = 0
    barrier_wait_s: float = 0.0
    barrier_wait_buckets: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        stats: SchedulerStats,
        running: int,
        waiting: int,
        kv_usage: float,
        quarantined_blocks: int = 0,
        steps: StepCounts | None = None,
        waits: WaitTimes | None = None,
        idle_admissions: int = 0,
    ) -> Snapshot:
        """Read the counters of a scheduler, of its executor, and of the barrier at which its rank waits for others."""
        acceptance = stats.acceptance
        return cls(
            running=running,
            waiting=waiting,
            kv_usage=kv_usage,
            busy_steps=stats.busy_steps,
            uniform_steps=stats.uniform_steps,
            misses=dict(stats.misses),
            preemptions=stats.preemptions,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            external_hits=stats.external_hits,
            num_drafts=acceptance.num_drafts,
            num_draft_tokens=acceptance.num_draft_tokens,
            num_accepted_tokens=acceptance.num_accepted_tokens,
            num_accepted_tokens_per_pos=tuple(acceptance.num_accepted_tokens_per_pos),
            load_failures=stats.load_failures,
            late_transfers=stats.late_transfers,
            quarantined_blocks=quarantined_blocks,
            steps_by_mode=(0, 0) if steps is None else (steps.by_mode[0], steps.by_mode[1]),
            dummies_by_mode=(0, 0) if steps is None else (steps.dummies_by_mode[0], steps.dummies_by_mode[1]),
            graph_padding_tokens=0 if steps is None else steps.padding_tokens,
            idle_admissions=idle_admissions,
            barrier_wait_s=0.0 if waits is None else waits.total_s,
            barrier_wait_buckets=() if waits is None else tuple(waits.buckets),
        )


class ModelInfo(msgspec.Struct, frozen=True):
    """What a front must know of the engine's model, so that it needs neither weights nor torch.

    ``tokenizer``: in the JSON format of the `tokenizers` library. ``eos_token_ids``: the first ends a request by
    default, further ones do so too. Lengths are in tokens.
    """

    name: str
    tokenizer: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    dtype: str = ""
    block_size: int = 0
    num_blocks: int = 0
    enable_prefix_caching: bool = False
    scheduling_policy: str = "fcfs"
    num_speculative_tokens: int = 0
    cudagraph_mode: str = "NONE"
    warnings: tuple[str, ...] = ()


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine takes requests from now on, at ``inbox``. ``version``: of its program."""

    model: ModelInfo
    rank: int = 0
    inbox: str = ""
    version: str = ""


class Update(msgspec.Struct, frozen=True, tag=True):
    """What one step brought. ``started``: requests scheduled for the first time. ``began``: when it was planned.

    ``tokens``: how many the step computed. ``stats``: None where the last ones are recent enough.
    """

    outputs: list[StepOutput]
    started: tuple[str, ...] = ()
    began: float = 0.0
    tokens: int = 0
    stats: Snapshot | None = None
    rank: int = 0


class Dead(msgspec.Struct, frozen=True, tag=True):
    """The engine process is about to exit. ``refused``: it never started, since the options cannot be honoured.

    ``peer_lost``: it ends because another rank has gone, which is the one to ask for the reason.
    """

    reason: str
    refused: bool = False
    rank: int = 0
    peer_lost: bool = False


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The process of ``rank`` runs."""

    rank: int


class Arrival(msgspec.Struct, frozen=True, tag=True):
    """A node without a server of its own would run ``ranks`` ranks of a group of ``size``.

    ``inbox``: where it is answered. ``first``: the rank that the first of them is to be; None: whichever is free.
    ``in_step``: whether its ranks keep step with others. ``version``: of its program.
    """

    ranks: int
    size: int
    first: int | None
    in_step: bool
    inbox: str
    version: str


class Placed(msgspec.Struct, frozen=True):
    """The answer to an Arrival: the first of the node's ranks, or why it has none."""

    first: int = -1
    refusal: str = ""


FromEngine = Ready | Update | Dead | Beat | Arrival

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_to_engine = msgspec.msgpack.Decoder(list[ToEngine]).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_placed = msgspec.msgpack.Decoder(Placed).decode
