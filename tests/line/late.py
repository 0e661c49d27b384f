# SPDX-License-Identifier: Apache-2.0
"""A real engine of which the last rank is slow to load and to warm up, or hangs in a step."""

from __future__ import annotations

import threading
import time
from typing import Any

from paceline.core.lockstep import Agreement
from paceline.core.plan import StepPlan
from paceline.engine.rank import Rank
from paceline.execution.runner import ModelExecutor
from paceline.runtime import serving
from paceline.runtime.engine_process import BuiltEngine

FACTORY = f"{__name__}:build"


class Hanging(ModelExecutor):
    """Hangs in its third step with rows, as a load that never ends would, while its process lives."""

    left = 3

    def launch(self, plan: StepPlan, agreement: Agreement | None = None) -> None:
        self.left -= bool(plan.rows)
        if not self.left:
            threading.Event().wait()
        super().launch(plan, agreement)


def build(options: dict[str, Any]) -> BuiltEngine:
    """See `serving.build_engine`; ``late_s``: how much longer the last rank loads and warms up, each; ``hangs``."""
    chosen = dict(options)
    late_s, hangs = chosen.pop("late_s", 0.0), chosen.pop("hangs", False)
    place = chosen["data_parallel"]
    if place["rank"] < place["size"] - 1:
        return serving.build_engine(chosen)
    load, warm_up = serving.load_model, serving.warm_up

    def late_load(*args: Any, **named: Any) -> Any:
        time.sleep(late_s)
        return load(*args, **named)

    def late_warm_up(*args: Any, **named: Any) -> None:
        time.sleep(late_s)
        warm_up(*args, **named)

    serving.load_model, serving.warm_up = late_load, late_warm_up
    engine = serving.build_engine(chosen)
    if hangs:
        assert isinstance(engine.rank, Rank)
        engine.rank.executor.__class__ = Hanging
    return engine
