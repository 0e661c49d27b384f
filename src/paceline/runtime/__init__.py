# SPDX-License-Identifier: Apache-2.0
"""Puts the parts together: executors behind schedulers, engines in processes, the offline `LLM`."""

from __future__ import annotations

import os

# OpenMP threads spin while they wait for each other. Where the processes of an engine share cores, a spinning thread
# holds the core that the thread it waits for would need, and steps take up to ten times as long. Read when torch is
# loaded, hence here, before anything imports it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
