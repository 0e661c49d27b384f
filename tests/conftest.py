# SPDX-License-Identifier: Apache-2.0
"""For all tests: torch's worker threads sleep between operations instead of spinning on cores that others need."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
