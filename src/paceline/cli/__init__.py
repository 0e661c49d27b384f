# SPDX-License-Identifier: Apache-2.0
"""The command line. Subcommands, and with them everything heavy, are imported when they are run."""

from __future__ import annotations

from paceline.cli.app import app, main

__all__ = ["app", "main"]
