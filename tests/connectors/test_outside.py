# SPDX-License-Identifier: Apache-2.0
"""Connectors of one's own: found by module and class, made of two halves, and used by every engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import SamplingParams
from paceline.connectors.config import kv_transfer_config
from paceline.core.config import ConfigError
from paceline.runtime.llm import LLM
from tests.eagle3.heads import save_target
from tests.server.harness import environment

COUNT = 8
PAGE = Path(__file__).parents[2] / "docs" / "connectors.md"
HALVES = """
class Half:
    def __getattr__(self, name):
        if name == {lacks!r}:
            raise AttributeError(name)
        return lambda *given: None

class Mine:
    contexts = []

    @classmethod
    def scheduler_half(cls, context):
        cls.contexts.append(context)
        return Half()

    worker_half = scheduler_half

class Ending(Mine):
    ended = []

    @classmethod
    def worker_half(cls, context):
        half = Half()
        half.shutdown = lambda: cls.ended.append(half)
        return half

class Partly:
    scheduler_half = Mine.scheduler_half

def function(): ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the source of a module; the key by which it is named."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def write(source: str) -> str:
        names.append(f"outside_{len(names)}_{tmp_path.name}")
        (tmp_path / f"{names[-1]}.py").write_text(source)
        return names[-1]

    yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("model"))


def complete(llm: LLM, prompt: list[int]) -> Any:
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    [result] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return result.outputs[0]


def test_the_example_of_the_page_keeps_prompts(folder: Path, module: Any) -> None:
    [source] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    chosen = {"kv_connector": "Keeper", "kv_connector_module_path": module(source)}
    plain = LLM(folder, max_model_len=64)
    transfer = {**chosen, "kv_connector_extra_config": {"at_least": 10}}
    llm = LLM(
        folder, max_model_len=64, max_num_batched_tokens=8, enable_prefix_caching=False, kv_transfer_config=transfer
    )
    short, long, other = [5, 6, 7], [(7 * i) % 50 + 1 for i in range(37)], [(3 * i) % 50 + 1 for i in range(20)]
    steps = []
    for prompt in (short, long, other, long, short, other):
        before = llm.stats().steps
        assert complete(llm, prompt).token_ids == complete(plain, prompt).token_ids
        steps.append(llm.stats().steps - before)
    assert steps == [COUNT, COUNT + 4, COUNT + 2, COUNT, COUNT, COUNT], "a prompt that comes again needs no prefill"


def test_halves_are_made_with_what_was_configured(folder: Path, module: Any) -> None:
    path = module(HALVES.format(lacks=None))
    transfer = {
        "kv_connector": "Mine",
        "kv_connector_module_path": path,
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"anything": [1, {"at": "all"}]},
    }
    llm = LLM(folder, max_model_len=64, block_size=8, kv_transfer_config=transfer, seed=5)
    made, again = sys.modules[path].Mine.contexts
    assert made == again
    assert (made.role, made.rank, made.seed) == ("kv_producer", 0, 5)
    assert made.extra_config == {"anything": [1, {"at": "all"}]}
    assert made.engine == llm.config
    assert (made.engine.cache.block_size, made.engine.scheduler.load_failure_policy) == (8, "recompute")


def test_a_call_that_ends_in_an_exception_ends_its_connector(folder: Path, module: Any) -> None:
    """The next call has halves of its own."""
    name = module(HALVES.format(lacks=None))
    transfer = {"kv_connector": "Ending", "kv_connector_module_path": name}
    llm = LLM(folder, max_model_len=64, kv_transfer_config=transfer)
    for calls in (1, 2):
        with pytest.raises(TypeError):  # these halves answer None to everything
            complete(llm, [1, 2, 3])
        assert len(set(sys.modules[name].Ending.ended)) == calls


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"kv_connector": "Absent"}, "kv_connector", "has no class Absent"),
        ({"kv_connector": "function"}, "kv_connector", "has no class function"),
        ({"kv_connector": "Partly"}, "kv_connector", "Partly lacks worker_half"),
        ({"kv_connector": None}, "kv_connector", "must name a class"),
        (
            {"kv_connector_module_path": "no_such_module"},
            "kv_connector_module_path",
            "No module named 'no_such_module'",
        ),
        ({"kv_connector_module_path": ""}, "kv_connector_module_path", "dotted name"),
        ({"kv_connector_module_path": ".here"}, "kv_connector_module_path", "dotted name"),
        ({"kv_connector_module_path": 3}, "kv_connector_module_path", "dotted name"),
        ({"kv_role": "both"}, "kv_role", "kv_producer"),
        ({"kv_connector_extra_config": "x"}, "kv_connector_extra_config", "an object"),
    ],
)
def test_what_is_wrong_is_named(module: Any, changes: dict[str, Any], field: str, words: str) -> None:
    given = {"kv_connector": "Mine", "kv_connector_module_path": module(HALVES.format(lacks=None))}
    assert kv_transfer_config(given) is not None
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        kv_transfer_config(given | changes)
    assert refused.value.field == f"kv_transfer_config.{field}"


def test_a_module_that_fails_to_import_says_why(module: Any) -> None:
    given = {"kv_connector": "Mine", "kv_connector_module_path": module("import of_which_there_is_none")}
    with pytest.raises(ConfigError, match="of_which_there_is_none") as refused:
        kv_transfer_config(given)
    assert refused.value.field == "kv_transfer_config.kv_connector_module_path"


@pytest.mark.parametrize(
    ("lacks", "half"), [("build_connector_meta", "scheduler"), ("get_finished", "worker"), ("shutdown", "worker")]
)
def test_a_half_that_lacks_a_method_is_refused_at_the_start(folder: Path, module: Any, lacks: str, half: str) -> None:
    given = {"kv_connector": "Mine", "kv_connector_module_path": module(HALVES.format(lacks=lacks))}
    with pytest.raises(ConfigError, match=f"the {half} half of Mine lacks {lacks}"):
        LLM(folder, max_model_len=64, kv_transfer_config=given)


def test_a_scheduler_half_needs_no_torch() -> None:
    program = """
import sys
sys.modules["torch"] = None
from paceline.connectors.config import kv_transfer_config
from paceline.connectors.outside import ConnectorContext
from paceline.core.config import EngineConfig
given = {"kv_connector": "ControlledConnector", "kv_connector_module_path": "tests.line.controlled"}
context = ConnectorContext(engine=EngineConfig(), extra_config={"folder": "."})
print(type(kv_transfer_config(given).outside.scheduler_half(context)).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), timeout=60, check=False
    )
    assert done.stdout == "ControlledScheduler\n", done.stderr
