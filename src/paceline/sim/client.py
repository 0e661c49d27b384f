# SPDX-License-Identifier: Apache-2.0
"""The benchmark client in virtual time: sends the workload's jobs within its concurrency limit, and keeps records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from paceline.core.results import RequestRecord
from paceline.core.workload import Job
from paceline.sim.clock import EventLoop


class Client:
    """Sends jobs at their arrival times, at most ``max_concurrency`` in flight; calls ``done`` after the last ended.

    ``send`` hands a job and its record to the cluster, which adds chunk times to the record and calls `ended`.
    """

    def __init__(
        self,
        loop: EventLoop,
        jobs: Sequence[Job],
        max_concurrency: int | None,
        send: Callable[[Job, RequestRecord], None],
        done: Callable[[], None],
    ) -> None:
        self.loop = loop
        self.records: list[RequestRecord] = []
        self.start_s = 0.0
        self.end_s = 0.0
        self._jobs = jobs
        self._free = max_concurrency if max_concurrency is not None else len(jobs)
        self._queue: deque[Job] = deque()
        self._send = send
        self._done = done
        self.left = len(jobs)

    def start(self) -> None:
        """Begin the run now: arrival times count from here."""
        self.start_s = self.loop.now
        for job in self._jobs:
            self.loop.at(self.start_s + job.arrival_s, lambda job=job: self._due(job))  # type: ignore[misc]
        if not self._jobs:
            self._done()

    def _due(self, job: Job) -> None:
        if self._free:
            self._dispatch(job)
        else:
            self._queue.append(job)

    def _dispatch(self, job: Job) -> None:
        self._free -= 1
        record = RequestRecord(prompt_len=job.prompt_len, intended_s=self.start_s + job.arrival_s, sent_s=self.loop.now)
        self.records.append(record)
        self._send(job, record)

    def ended(self) -> None:
        """One request of this client has ended, well or not."""
        self._free += 1
        self.left -= 1
        self.end_s = self.loop.now
        if self._queue:
            self._dispatch(self._queue.popleft())
        if not self.left:
            self._done()
