# SPDX-License-Identifier: Apache-2.0
"""A model's tokenizer without the model, for clients that make prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.models.spec import UnsupportedModel
from paceline.models.tokenizer import Tokenizer


class TokenizerUnavailable(Exception):
    """There is no tokenizer of that name, or it cannot be read."""


class PromptTokenizer:
    """What a benchmark client needs of a tokenizer.

    ``vocab_size``: ids without those added on top. ``num_special``: tokens that it puts around every text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        backend = tokenizer.backend
        added = backend.get_added_tokens_decoder()
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=False)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.num_special: int = backend.num_special_tokens_to_add(False)
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def chat(self, text: str) -> str:
        """One turn of a user in the model's chat template.

        Raises:
            ValueError: the model has no template, or it refuses.
        """
        return self._tokenizer.apply_chat_template([{"role": "user", "content": text}])


def load_tokenizer(name: str) -> PromptTokenizer:
    """The tokenizer of ``name``: ``smollm2``, a ``.gguf`` file, or a folder with ``tokenizer.json``.

    Raises:
        TokenizerUnavailable: it is none of these, or cannot be read.
    """
    path = Path(name).expanduser()
    try:
        if (path / "tokenizer.json").is_file():
            return PromptTokenizer(_of_folder(path))
        return PromptTokenizer(_of_gguf(name, path))
    except (UnsupportedModel, OSError, ValueError) as error:
        raise TokenizerUnavailable(str(error)) from error


def _of_gguf(name: str, path: Path) -> Tokenizer:
    # Here, since a folder's tokenizer needs none of it.
    from paceline.models.embedded import EMBEDDED, embedded_model_path
    from paceline.models.gguf_file import GGUFFile
    from paceline.models.gguf_tokenizer import read_tokenizer

    if name in EMBEDDED:
        path = embedded_model_path(name)
    elif not path.is_file() or path.suffix != ".gguf":
        known = ", ".join(EMBEDDED)
        raise TokenizerUnavailable(
            f"{name!r} is not a known name ({known}), not a .gguf file and not a folder with a tokenizer.json"
        )
    return read_tokenizer(GGUFFile(path).get)


def _of_folder(folder: Path) -> Tokenizer:
    config: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").is_file():
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = config.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    names = (config.get(key) for key in ("bos_token", "eos_token"))
    bos, eos = (name.get("content") if isinstance(name, dict) else name for name in names)
    return Tokenizer.from_file(
        folder / "tokenizer.json",
        chat_template=template if isinstance(template, str) else None,
        bos_token=bos,
        eos_token=eos,
    )
