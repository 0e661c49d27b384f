# SPDX-License-Identifier: Apache-2.0
"""Tokens as text: the tokenizer a front needs, and the names of single tokens in log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

BYTE_TOKEN = 6
"""Characters of ``<0x0A>``, how vocabularies with byte fallback name a byte."""


class TextTokenizer(Protocol):
    """What the server asks of a tokenizer; `paceline.models.tokenizer.Tokenizer` is one."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> str: ...

    @property
    def backend(self) -> Any: ...


class Verbatim:
    """A tokenizer that shows special tokens too (``skip_special_tokens: false``)."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _byte_characters() -> dict[str, int]:
    """How byte-level vocabularies write a byte: as itself if printable, else as a character from U+0100 on (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_characters()


class TokenNames:
    """The text and the bytes of single tokens, remembered.

    A token that is part of a character has no text of its own; it is named by its bytes, ``bytes:\\xe2\\x80``.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token: int) -> tuple[str, bytes]:
        """(text, bytes) of a token id."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._look_up(token)
        return known

    def _look_up(self, token: int) -> tuple[str, bytes]:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" not in text:
            return text, text.encode()
        piece: str = self._tokenizer.backend.id_to_token(token) or ""
        if len(piece) == BYTE_TOKEN and piece.startswith("<0x"):
            data = bytes([int(piece[3:5], 16)])
        elif all(c in _BYTES for c in piece):
            data = bytes(_BYTES[c] for c in piece)
        else:
            return text, text.encode()
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data), data
