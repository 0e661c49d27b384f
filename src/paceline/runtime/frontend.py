# SPDX-License-Identifier: Apache-2.0
"""What a front process rebuilds from the engine's description of its model."""

from __future__ import annotations

import tokenizers

from paceline.engine.messages import ModelInfo
from paceline.models.tokenizer import Tokenizer


def load_tokenizer(model: ModelInfo) -> Tokenizer:
    """The tokenizer of the engine's model, without its weights."""
    return Tokenizer(
        tokenizers.Tokenizer.from_str(model.tokenizer),
        chat_template=model.chat_template,
        bos_token=model.bos_token,
        eos_token=model.eos_token,
    )
