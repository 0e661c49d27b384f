# SPDX-License-Identifier: Apache-2.0
"""Python's cyclic garbage collector and the step loop."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Step without the cyclic collector, which would walk every request's lists again and again.

    Scheduling makes no reference cycles: what it drops is freed at once by its reference count.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
