# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.server.program OPTIONS``: a server with the fake engine; OPTIONS are `ServeOptions` as JSON."""

from __future__ import annotations

import json
import sys

from paceline.server.serve import ServeOptions, serve
from tests.server.fake import FACTORY

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    for name in ("names", "api_keys"):
        given[name] = tuple(given.get(name, ()))
    options = ServeOptions(factory=FACTORY, port=0, **given)
    sys.exit(serve(options, lambda text: print(text, flush=True)))
