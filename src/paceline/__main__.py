# SPDX-License-Identifier: Apache-2.0
"""``python -m paceline`` is ``paceline``."""

from __future__ import annotations

import sys

from paceline.cli import main

if __name__ == "__main__":
    sys.exit(main())
