# SPDX-License-Identifier: Apache-2.0
"""One completion as it grows: tokens in, text, stops and log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.plan import StepOutput
from paceline.runtime.detokenizer import Decodes, Detokenizer


class Scored(NamedTuple):
    """A token's log-probabilities. ``offset``: where its text begins, in characters of the completion.

    ``top``: (id, log-probability) of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]
    offset: int


class Delta(NamedTuple):
    """What a completion gained since the last one was taken."""

    text: str
    token_ids: Sequence[int]
    scored: Sequence[Scored]


class Choice:
    """The completion at ``index`` of an answer.

    Text that might be the beginning of a stop string is held back until it is known not to be. ``finish_reason``:
    None while it grows. ``error``: what went wrong, for people.
    """

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_scores",
        "_shown",
        "_stop",
        "_taken",
        "error",
        "finish_reason",
        "index",
        "scored",
        "started",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        index: int,
        tokenizer: Decodes,
        stop: Sequence[str],
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        scores: bool = False,
    ) -> None:
        self.index = index
        self._detokenizer = Detokenizer(tokenizer, stop, min_tokens=min_tokens)
        self._stop = stop
        self._include_stop = include_stop
        self._scores = scores
        self._shown = 0
        self._taken = 0
        self.token_ids: list[int] = []
        self.scored: list[Scored] = []
        self.started = False
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None

    @property
    def text(self) -> str:
        """All of it, held back or not."""
        return self._detokenizer.text

    @property
    def num_untaken(self) -> int:
        """Tokens that no `delta` has reported yet."""
        return len(self.token_ids) - self._taken

    def take(self, output: StepOutput) -> None:
        """Add what a step brought. A stop string may end the completion, of which the engine knows nothing.

        Tokens take effect one at a time: what comes after the one that completes a stop string is cut, ids and
        log-probabilities alike.
        """
        text, tokens = self._detokenizer, output.token_ids
        stopped_by_id = output.finish_reason == "stop" and not self._include_stop
        # A token that ends the output by its id is among the ids, and not in the text.
        silent = len(tokens) - 1 if stopped_by_id else len(tokens)
        logprobs = output.logprobs if self._scores else None
        for i, token in enumerate(tokens):
            self.token_ids.append(token)
            if logprobs is not None:
                score = logprobs[i]
                self.scored.append(Scored(token, score.logprob, score.top, len(text.text)))
            if i < silent and text.push(token):
                self._stop_at_string()
                return
        if output.finish_reason is None:
            return
        if text.flush():
            self._stop_at_string()
        else:
            self.finish_reason, self.stop_reason, self.error = output.finish_reason, output.stop_reason, output.error

    def delta(self) -> Delta:
        """What can be shown and was not yet."""
        text = self._detokenizer.text
        end = len(text)
        if self._stop and self.finish_reason is None:
            end -= held_back(text, self._stop)
        new = Delta(text[self._shown : end], self.token_ids[self._taken :], self.scored[self._taken :])
        self._shown = max(self._shown, end)
        self._taken = len(self.token_ids)
        return new

    def _stop_at_string(self) -> None:
        self.finish_reason, self.stop_reason = "stop", self._detokenizer.stop_reason
        if self._include_stop:
            self._detokenizer.text += self._detokenizer.stop_reason or ""


def held_back(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of a stop string."""
    longest = 0
    for s in stop:
        for length in range(min(len(s) - 1, len(text)), longest, -1):
            if text.endswith(s[:length]):
                longest = length
                break
    return longest
