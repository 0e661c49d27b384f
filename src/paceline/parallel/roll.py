# SPDX-License-Identifier: Apache-2.0
"""Who has come to a collective that does not complete: torch.distributed does not say."""

from __future__ import annotations

from typing import Protocol

SIGN_AFTER_S = 1.0
"""How long a rank waits for others, where it can do so in two parts, before it signs the roll."""


class Roll(Protocol):
    """Where ranks say that they wait for the others. ``what``: a kind of collective, ``number``: which of them."""

    def sign(self, what: str, number: int) -> None:
        """This rank has come there, and waits."""
        ...

    def absent(self, what: str, number: int) -> str:
        """Who has not come there, in words to add to an error; nothing if that is not known."""
        ...


def first_line(error: BaseException) -> str:
    """What an exception of torch.distributed says, without the stack that it may carry."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
