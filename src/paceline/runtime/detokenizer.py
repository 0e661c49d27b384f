# SPDX-License-Identifier: Apache-2.0
"""Text of a growing output, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
"""What a decoder makes of bytes that are no character, or not yet."""


class Decodes(Protocol):
    """The half of a tokenizer that is needed here."""

    def decode(self, ids: Sequence[int], /) -> str: ...


class Detokenizer:
    """Decodes one output token by token.

    Stop strings are looked for in what comes after the first ``min_tokens`` tokens.

    A character whose bytes are spread over several tokens appears when its last one arrives, and not at all
    if the output ends before. A new token is decoded together with the ones before it, since decoders treat
    the beginning of a text in their own way; ``_read`` divides what was already given out from what was not.
    """

    __slots__ = (
        "_ids",
        "_longest",
        "_min_tokens",
        "_prefix",
        "_read",
        "_searchable",
        "_stop",
        "_tokenizer",
        "stop_reason",
        "text",
    )

    def __init__(self, tokenizer: Decodes, stop: Sequence[str] = (), *, min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._min_tokens = min_tokens
        self._searchable = 0
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self.text = ""
        self.stop_reason: str | None = None

    def push(self, token: int) -> bool:
        """Add a token. True if a stop string is complete: ``text`` then ends before it, ``stop_reason`` names it.

        Of several stop strings the one that begins first in the text wins, then the one named first.
        """
        self._ids.append(token)
        shown = self._tokenizer.decode(self._ids[self._prefix : self._read])
        longer = self._tokenizer.decode(self._ids[self._prefix :])
        if len(longer) <= len(shown) or longer.endswith(REPLACEMENT):
            return False
        self._prefix, self._read = self._read, len(self._ids)
        return self._extend(longer[len(shown) :])

    def flush(self) -> bool:
        """The output has ended: give out what was held back, but no part of a character. Result as for `push`."""
        shown = self._tokenizer.decode(self._ids[self._prefix : self._read])
        longer = self._tokenizer.decode(self._ids[self._prefix :])
        self._prefix = self._read = len(self._ids)
        return self._extend(longer[len(shown) :].rstrip(REPLACEMENT))

    def _extend(self, new: str) -> bool:
        searched = max(self._searchable, len(self.text) - self._longest + 1)
        self.text += new
        if len(self._ids) <= self._min_tokens:
            self._searchable = len(self.text)
            return False
        found = [(at, s) for s in self._stop if (at := self.text.find(s, searched)) >= 0]
        if not found:
            return False
        at, self.stop_reason = min(found, key=lambda hit: hit[0])
        self.text = self.text[:at]
        return True
