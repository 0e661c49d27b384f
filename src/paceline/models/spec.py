# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint turns into, whatever the format of its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from paceline.models.llama import Llama
    from paceline.models.tokenizer import Tokenizer

DType = Literal["auto", "float32", "bfloat16"]


class UnsupportedModel(ValueError):
    """A checkpoint that this engine cannot run; the message names what it cannot do and where that is written."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    ``linear`` divides all frequencies by ``factor``. ``llama3`` divides those whose wavelength exceeds
    ``original_max_position / low_freq_factor``, keeps those below ``original_max_position / high_freq_factor``
    and blends between (Llama 3.1). ``factors`` divides each frequency by its own number (GGUF stores the llama3
    rule so); ``factors`` then has head_dim / 2 entries.
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """A mixture of experts in place of the MLP: each token is computed by the ``top_k`` experts its router prefers.

    ``intermediate_size``: inner width of one expert. ``normalise``: the weights of the chosen ones are scaled to add up
    to 1. ``shared_intermediate_size``: inner width of an expert that computes every token besides; 0: there is none.
    ``dense_layers``: layers that keep a plain MLP.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    normalise: bool
    shared_intermediate_size: int = 0
    dense_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise UnsupportedModel(
                f"num_experts_per_tok = {self.top_k} must be at least 1 and at most the {self.num_experts} experts"
            )


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shape of a Llama-family decoder; names follow Hugging Face's configuration.

    ``max_position`` is the context length in tokens that the model was made for. ``qkv_bias``: queries, keys and
    values have a bias. ``qk_norm``: queries and keys are RMS-normalised head by head, before rotation. ``experts``: the
    mixture that layers have in place of the MLP of ``intermediate_size``, None in a dense model.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: ExpertConfig | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"num_attention_heads = {self.num_heads} is no multiple of num_key_value_heads = {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim = {self.head_dim}: rotary embedding needs an even number")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. ``eos_token_ids``: the first ends a request by default, further ones do so too."""

    name: str
    model: Llama
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]


def resolve_dtype(wanted: str, stored: torch.dtype) -> torch.dtype:
    """The dtype of weights and KV cache.

    ``auto`` takes the stored dtype where it is float32 or bfloat16; float16 becomes bfloat16; quantised weights
    (stored as integers) become float32, which holds every dequantised value.

    Raises:
        ValueError: ``wanted`` is another dtype.
    """
    import torch

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if wanted == "auto":
        if stored == torch.float16:
            return torch.bfloat16
        return stored if stored in dtypes.values() else torch.float32
    if wanted not in dtypes:
        raise ValueError(f"dtype: must be auto, {' or '.join(dtypes)}, got {wanted!r}")
    return dtypes[wanted]


def resolve_quantization(wanted: str | None, dtype: str, stored: torch.dtype) -> Literal["int8"] | None:
    """How weights are kept: ``int8`` or as ``dtype`` says.

    Nothing said, weights that are stored quantised (as integers) become int8, unless a dtype is asked for.

    Raises:
        ValueError: ``wanted`` is not int8, none or None, or int8 is asked for together with float32.
    """
    if wanted not in (None, "none", "int8"):
        raise ValueError(f"quantization: must be int8 or none, got {wanted!r}")
    if wanted == "int8" and dtype == "float32":
        raise ValueError("quantization: int8 keeps its KV cache in bfloat16; leave dtype at auto, or quantization out")
    if wanted == "int8" or (wanted is None and dtype == "auto" and not stored.is_floating_point):
        return "int8"
    return None
