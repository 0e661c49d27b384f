# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.line.node OPTIONS RANKS``: a node without a server, with the fake engine; OPTIONS are JSON."""

from __future__ import annotations

import json
import sys

from paceline.runtime.engine_group import EngineFailed, EngineRefused
from paceline.runtime.headless import run_headless
from tests.server.fake import FACTORY


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(run_headless(FACTORY, json.loads(sys.argv[1]), int(sys.argv[2]), say))
    except (EngineRefused, EngineFailed) as error:
        say(str(error))
        sys.exit(1)
