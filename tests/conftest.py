# SPDX-License-Identifier: Apache-2.0
"""For all tests: torch's worker threads sleep between operations instead of spinning on cores that others need; and
programs under test hear an interrupt, which a shell has what it runs in the background ignore."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
