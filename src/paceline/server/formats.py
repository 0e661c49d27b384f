# SPDX-License-Identifier: Apache-2.0
"""How completions and chat answers look on the wire, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from paceline.server.choice import Choice, Delta, Scored
from paceline.server.jobs import Job
from paceline.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatReply,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    Message,
    TokenLogprob,
    TopLogprob,
    Usage,
    usage,
)

Names = Callable[[int], tuple[str, bytes]]


class Format(Protocol):
    """One endpoint's replies to one job."""

    def opening(self, choice: Choice) -> list[msgspec.Struct]:
        """Chunks that come before a choice's first text."""
        ...

    def chunk(self, choice: Choice, delta: Delta, counts: Usage | UnsetType, last: bool) -> msgspec.Struct:
        """A piece of a choice; ``last`` of the whole answer."""
        ...

    def closing(self, counts: Usage) -> msgspec.Struct:
        """The chunk without choices that carries the token counts."""
        ...

    def whole(self) -> msgspec.Struct:
        """The answer in one piece."""
        ...


def names_of(job: Job) -> Names:
    """How a job's tokens are called in its log-probabilities."""
    if job.request.return_tokens_as_token_ids:
        return lambda token: (f"token_id:{token}", job.state.token_names(token)[1])
    return job.state.token_names


class CompletionFormat:
    """Replies of /v1/completions. ``num_top``: alternatives per token."""

    def __init__(self, job: Job, *, num_top: int, echo: bool) -> None:
        self._job = job
        self._num_top = num_top
        self._names = names_of(job)
        self._echo = echo
        self._ids = job.request.return_token_ids

    def opening(self, choice: Choice) -> list[msgspec.Struct]:
        return []

    def chunk(self, choice: Choice, delta: Delta, counts: Usage | UnsetType, last: bool) -> msgspec.Struct:
        first = not choice.started
        prompt = self._job.prompt_of(choice)
        piece = CompletionChoice(
            index=choice.index,
            text=self._echoed(choice, delta.text) if first else delta.text,
            logprobs=self._logprobs(delta.scored) if self._job.scores else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            prompt_token_ids=prompt.ids if self._ids and first else None,
            token_ids=list(delta.token_ids) if self._ids else None,
        )
        return self._reply([piece], counts, self._job.state.fingerprint if last else UNSET)

    def closing(self, counts: Usage) -> msgspec.Struct:
        return self._reply([], counts, self._job.state.fingerprint)

    def whole(self) -> msgspec.Struct:
        job = self._job
        choices = [
            CompletionChoice(
                index=choice.index,
                text=self._echoed(choice, choice.text),
                logprobs=self._logprobs(choice.scored) if job.scores else None,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                prompt_token_ids=job.prompt_of(choice).ids if self._ids else None,
                token_ids=choice.token_ids if self._ids else None,
            )
            for choice in job.choices
        ]
        return self._reply(choices, usage(job.num_prompt_tokens, job.num_output_tokens), job.state.fingerprint)

    def _reply(
        self, choices: list[CompletionChoice], counts: Usage | UnsetType, fingerprint: str | UnsetType
    ) -> CompletionReply:
        job = self._job
        return CompletionReply(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=choices,
            usage=counts,
            system_fingerprint=fingerprint,
        )

    def _echoed(self, choice: Choice, text: str) -> str:
        if not self._echo:
            return text
        prompt = self._job.prompt_of(choice)
        return (self._job.state.tokenizer.decode(prompt.ids) if prompt.text is None else prompt.text) + text

    def _logprobs(self, scored: Sequence[Scored]) -> CompletionLogprobs:
        """The chosen token is among the alternatives, and comes first."""
        names = self._names
        top = []
        for s in scored:
            likely = {names(s.token_id)[0]: s.logprob}
            for token, logprob in s.top[: self._num_top]:
                likely.setdefault(names(token)[0], logprob)
            top.append(likely)
        return CompletionLogprobs(
            text_offset=[s.offset for s in scored],
            token_logprobs=[s.logprob for s in scored],
            tokens=[names(s.token_id)[0] for s in scored],
            top_logprobs=top,
        )


class ChatFormat:
    """Replies of /v1/chat/completions. ``num_top``: alternatives per token."""

    def __init__(self, job: Job, *, num_top: int) -> None:
        self._job = job
        self._num_top = num_top
        self._names = names_of(job)
        self._ids = job.request.return_token_ids

    def opening(self, choice: Choice) -> list[msgspec.Struct]:
        piece = ChatChunkChoice(index=choice.index, delta=Message(role="assistant", content=""), logprobs=None)
        chunk = self._chunk([piece])
        if self._ids:
            chunk.prompt_token_ids = self._job.prompt_of(choice).ids
            chunk.prompt_text = None
        return [chunk]

    def chunk(self, choice: Choice, delta: Delta, counts: Usage | UnsetType, last: bool) -> msgspec.Struct:
        ended = choice.finish_reason is not None
        piece = ChatChunkChoice(
            index=choice.index,
            delta=Message(content=delta.text),
            logprobs=self._logprobs(delta.scored) if self._job.scores else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason if ended else UNSET,
            token_ids=list(delta.token_ids) if self._ids else UNSET,
        )
        return self._chunk([piece], counts, self._job.state.fingerprint if last else UNSET)

    def closing(self, counts: Usage) -> msgspec.Struct:
        return self._chunk([], counts, self._job.state.fingerprint)

    def whole(self) -> msgspec.Struct:
        job = self._job
        return ChatReply(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=Message(role="assistant", content=choice.text),
                    logprobs=self._logprobs(choice.scored) if job.scores else None,
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    token_ids=choice.token_ids if self._ids else None,
                )
                for choice in job.choices
            ],
            usage=usage(job.num_prompt_tokens, job.num_output_tokens),
            system_fingerprint=job.state.fingerprint,
            prompt_token_ids=job.prompts[0].ids if self._ids else None,
        )

    def _chunk(
        self, choices: list[ChatChunkChoice], counts: Usage | UnsetType = UNSET, fingerprint: str | UnsetType = UNSET
    ) -> ChatChunk:
        job = self._job
        return ChatChunk(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=choices,
            usage=counts,
            system_fingerprint=fingerprint,
        )

    def _logprobs(self, scored: Sequence[Scored]) -> ChatLogprobs:
        return ChatLogprobs(
            [
                TokenLogprob(
                    *self._entry(s.token_id, s.logprob),
                    top_logprobs=[TopLogprob(*self._entry(*likely)) for likely in s.top[: self._num_top]],
                )
                for s in scored
            ]
        )

    def _entry(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        text, data = self._names(token)
        return text, logprob, list(data)
