# SPDX-License-Identifier: Apache-2.0
"""paceline: an LLM serving engine whose data-parallel decode ranks stay in step, and a laboratory for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paceline.core.request import SamplingParams
    from paceline.runtime.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the engine only when it is asked for: `import paceline` needs no torch and takes no time."""
    if name == "LLM":
        from paceline.runtime.llm import LLM

        return LLM
    if name == "SamplingParams":
        from paceline.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
