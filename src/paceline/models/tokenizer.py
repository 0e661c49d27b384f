# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back, and chat messages to text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from paceline.models.spec import UnsupportedModel

Message = dict[str, Any]
"""One turn of a conversation: ``role``, ``content`` and whatever else a template reads."""

_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTE_LEVEL]),
    "qwen2": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "llama-bpe": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
"""How text is cut before merging, by GGUF's name for it."""


def byte_level_tokenizer(
    tokens: Sequence[str],
    merges: Iterable[str],
    *,
    pre_tokenizer: str,
    special: Sequence[int] = (),
    added: Sequence[int] = (),
    bos: int | None = None,
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer from a vocabulary in id order and merges ("left right", best first).

    ``special`` ids are control tokens, dropped when decoding; ``added`` ids are matched whole but are text.
    ``bos``: the id put before every encoded text, if any.

    Raises:
        UnsupportedModel: the pre-tokenizer is unknown.
    """
    if pre_tokenizer not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise UnsupportedModel(f"tokenizer.ggml.pre: {pre_tokenizer!r} is not supported (known: {known})")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    # Llama 3 takes a word that is in the vocabulary as it is, without asking the merges.
    bpe = models.BPE(vocabulary, pairs, ignore_merges=pre_tokenizer == "llama-bpe")
    tokenizer = tokenizers.Tokenizer(bpe)
    if pre_tokenizer == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre_tokenizer]
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in special])
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False) for i in added])
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


class Tokenizer:
    """A tokenizer with its chat template; special tokens in a text are taken as such."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self.bos_token = bos_token
        self.eos_token = eos_token

    @classmethod
    def from_file(cls, path: Path, **kwargs: Any) -> Tokenizer:
        """A tokenizer from ``tokenizer.json``."""
        return cls(tokenizers.Tokenizer.from_file(str(path)), **kwargs)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, with the model's leading special tokens if it has any.

        Raises:
            ValueError: half a surrogate pair is in the text; it has no bytes.
        """
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise ValueError("text: half a surrogate pair is no character, and cannot be encoded") from None
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that form no character come out as U+FFFD."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    @cached_property
    def _template(self) -> Template:
        if self.chat_template is None:
            raise ValueError("chat_template: this model has none, so it cannot take messages; give it a plain prompt")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise_exception
        return environment.from_string(self.chat_template)

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation as the model was trained to see it.

        Raises:
            ValueError: there is no template, a message lacks a role or content, or the template refuses them.
        """
        for i, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise ValueError(f"messages[{i}].{key}: must be a string, got {message.get(key)!r}")
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token or "",
                eos_token=self.eos_token or "",
            )
        except TemplateError as error:
            raise ValueError(f"messages: the chat template refuses them: {error}") from error


def _raise_exception(message: str) -> None:
    """Called by templates that reject a conversation, for example one whose roles do not alternate."""
    raise TemplateError(message)
