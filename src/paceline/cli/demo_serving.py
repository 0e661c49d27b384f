# SPDX-License-Identifier: Apache-2.0
"""The served part of ``paceline demo``: a server as a process, a chat through the openai client, a short load."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack

from paceline.bench.served import PACELINE, ServerFailed, server
from paceline.cli.output import CommandError, progress_bar, stdout

MODEL = "smollm2"
QUESTION = "Tell me about the river Nile, in three sentences."
CHAT_TOKENS = 80
BENCH = ("--prompt-token-ids", "--ignore-eos", "--random-input-len", "128", "--random-output-len", "32",
         "--max-concurrency", "8", "--num-prompts", "16")  # fmt: skip
"""Of the load; the server is asked for all of it at once, eight requests at a time."""


def show_server() -> None:
    """Serve the model, stream one chat, send a short load, and end the server.

    Raises:
        CommandError: the server does not start, or the load fails.
    """
    console = stdout()
    console.print("\n[bold]3. The same again behind the OpenAI API[/bold]\n")
    console.print(f"$ paceline serve {MODEL} --port 0")
    with ExitStack() as running:
        try:
            with progress_bar("starting the server"):
                url, ready_s = running.enter_context(server((MODEL,)))
        except ServerFailed as error:
            raise CommandError(str(error)) from error
        console.print(f"ready at {url} after {ready_s} s\n")
        chat(url)
        console.print(f"\n$ paceline bench serve --base-url {url} {' '.join(BENCH)}", soft_wrap=True)
        sys.stdout.flush()
        done = subprocess.run([*PACELINE, "bench", "serve", "--base-url", url, *BENCH], check=False)
        if done.returncode:
            raise CommandError(f"the load ended with status {done.returncode}")
    console.print("The server has ended.")


def chat(url: str) -> None:
    """Stream the answer to one question through the openai client; without that package, say so.

    Raises:
        CommandError: the server answers with an error, or not at all.
    """
    try:
        import openai
    except ModuleNotFoundError:
        print("No chat is streamed: that takes the client package openai (pip install openai).")
        return
    print(f"openai.OpenAI(base_url={url + '/v1'!r}).chat.completions.create(..., stream=True)\n> {QUESTION}")
    began, first, tokens = time.perf_counter(), 0.0, 0
    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": QUESTION}],
                temperature=0.0,
                max_tokens=CHAT_TOKENS,
                stream=True,
                stream_options={"include_usage": True},
            )
            for chunk in stream:
                first = first or time.perf_counter()
                for choice in chunk.choices:
                    print(choice.delta.content or "", end="", flush=True)
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    except openai.OpenAIError as error:
        raise CommandError(f"the chat failed: {error}") from error
    ended = time.perf_counter()
    print(f"\n[{tokens} tokens; the first after {first - began:.2f} s, all after {ended - began:.2f} s]")
