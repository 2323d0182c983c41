"""Run the client scripts against one server, and print a table: `python -m tests.clients.run`.

Each Python client has a virtual environment of its own, made from its pinned file in `requirements/`; each JavaScript
client a folder made from its `package.json`. Both lie below `build/clients`, which git ignores. `--write` puts the table,
with date and commit, between the markers in docs/compatibility.md. Exit 1 if a feature failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.compat import models
from tests.compat.page import PAGE, dated, write_part
from tests.compat.suite import make_environment
from tests.support.live import running

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
BUILD = ROOT / "build" / "clients"
SCRIPT_TIMEOUT_S = 600
PAGE_ORIGIN = "http://ui.example"  #: Of the page in `browser.mjs`, which asks without a key.
COLUMN_CLIENTS = 3  #: a feature that so many clients have gets a column of its own
WORDS = {True: "yes", False: "**no**", None: ""}


@dataclass(frozen=True)
class Client:
    """A script, and where what it imports comes from."""

    title: str
    script: str
    packages: str = ""  #: what names its packages; "" if it is the script's own name

    @property
    def name(self) -> str:
        return Path(self.script).stem

    @property
    def is_python(self) -> bool:
        return self.script.endswith(".py")


CLIENTS = (
    Client("OpenAI, Python", "openai_sdk.py"),
    Client("OpenAI, JavaScript", "openai_sdk.mjs"),
    Client("Anthropic, Python", "anthropic_sdk.py"),
    Client("Anthropic, JavaScript", "anthropic_sdk.mjs"),
    Client("Vercel AI SDK", "vercel_ai.mjs"),
    Client("openai-agents", "openai_agents.py"),
    Client("a loop as Codex makes it", "codex_style.py", "openai_sdk"),
    Client("a loop as Claude Code makes it", "claude_code_style.py", "anthropic_sdk"),
    Client("pydantic-ai", "pydantic_ai_agents.py"),
    Client("instructor", "instructor_client.py"),
    Client("DSPy", "dspy_client.py"),
    Client("LangChain, Python", "langchain_client.py"),
    Client("LangChain, JavaScript", "langchain_client.mjs"),
    Client("litellm", "litellm_client.py"),
    Client("llm", "llm_client.py"),
    Client("guidance", "guidance_client.py"),
    Client("lm-eval", "lm_eval_client.py"),
    Client("GuideLLM", "guidellm_client.py"),
    Client("AIPerf", "aiperf_client.py"),
    Client("a page of another origin", "browser.mjs", "openai_sdk"),
)


@dataclass(frozen=True)
class FeatureOutcome:
    """What a client's script said of one feature."""

    client: str
    feature: str
    passed: bool
    error: str


def install(client: Client) -> list[str]:
    """Install what the script imports, unless that is done, and return the command that runs the script."""
    packages = client.packages or client.name
    if client.is_python:
        requirements = FOLDER / "requirements" / f"{packages}.txt"
        python = make_environment(BUILD / "python" / packages, ("--requirement", str(requirements)))
        return [str(python), str(FOLDER / "python" / client.script)]
    folder = BUILD / "javascript" / packages
    wanted = FOLDER / "javascript" / "packages" / packages / "package.json"
    installed = folder / "package.json"
    if not installed.exists() or installed.read_text() != wanted.read_text():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(wanted, installed)
        command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run(command, cwd=folder, check=True, timeout=600)
    for script in (FOLDER / "javascript").glob("*.mjs"):
        shutil.copy(script, folder)  # node looks for packages beside the script
    return ["node", str(folder / client.script)]


def run_client(client: Client, url: str, model: str, tokenizer: Path) -> list[FeatureOutcome]:
    """Run the client's script and return its outcomes. A script that cannot run is one failed feature."""
    environment = {
        **os.environ,
        "CLIENT_URL": url,
        "CLIENT_MODEL": model,
        "CLIENT_TOKENIZER": str(tokenizer),
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONPATH", None)
    try:
        command = install(client)
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SCRIPT_TIMEOUT_S,
            check=False,
        )
    except (subprocess.SubprocessError, OSError) as error:
        return [FeatureOutcome(client.title, "script", False, str(error)[-300:])]
    log = BUILD / f"{client.name}{Path(client.script).suffix}.log"
    log.write_text(done.stdout + done.stderr)
    outcomes = []
    for line in done.stdout.splitlines():
        if line.startswith('{"feature"'):
            record = json.loads(line)
            outcomes.append(FeatureOutcome(client.title, **record))
    if not outcomes:
        outcomes.append(FeatureOutcome(client.title, "script", False, done.stderr[-300:]))
    return outcomes


@contextmanager
def served(url: str) -> Iterator[tuple[str, Path]]:
    """Yield a server's URL and its model's folder; a server is started unless `url` says where one is."""
    folder = models.closing_demo(BUILD / "closing-demo")
    if url:
        yield url.rstrip("/"), folder
        return
    context = f"model.max_model_len={models.SERVED_CONTEXT}"
    origins = f"gateway.origins=[{PAGE_ORIGIN}]"
    with running(BUILD / "serve.log", str(folder), "--set", context, "--set", origins) as cluster:
        yield cluster.url, folder


def table(outcomes: list[FeatureOutcome]) -> str:
    """Return the outcomes as a table in Markdown: a client a line, a feature a column.

    Features that fewer than `COLUMN_CLIENTS` clients have share the last column.
    """
    clients_of = Counter(outcome.feature for outcome in outcomes)
    features = [name for name, count in clients_of.items() if count >= COLUMN_CLIENTS]
    lines = [
        "| client | " + " | ".join([*features, "more"]) + " |",
        "|---" * (len(features) + 2) + "|",
    ]
    for client in dict.fromkeys(outcome.client for outcome in outcomes):
        passed = {
            outcome.feature: outcome.passed for outcome in outcomes if outcome.client == client
        }
        cells = [WORDS[passed.get(feature)] for feature in features]
        others = [
            f"{feature}: {WORDS[done]}"
            for feature, done in passed.items()
            if feature not in features
        ]
        lines.append(f"| {client} | " + " | ".join([*cells, ", ".join(others)]) + " |")
    return "\n".join(lines)


def failures(outcomes: list[FeatureOutcome]) -> str:
    """Return one line of Markdown for each feature that failed."""
    lines = []
    for outcome in outcomes:
        if not outcome.passed:
            said = " ".join(outcome.error.split())[:160].replace("`", "'")
            lines.append(f"- {outcome.client}, {outcome.feature}: `{said}`")
    return "\n".join(lines)


def report(outcomes: list[FeatureOutcome]) -> str:
    """Return what stands between the page's markers."""
    passed = sum(outcome.passed for outcome in outcomes)
    heading = dated(f"{passed} of {len(outcomes)} pass.")
    return "\n\n".join(part for part in (heading, table(outcomes), failures(outcomes)) if part)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="", help="a running server, with the model of this run")
    parser.add_argument("--only", default="", help="run only clients whose title contains this")
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.name}")
    arguments = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    outcomes = []
    with served(arguments.url) as (url, folder):
        model = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
        for client in CLIENTS:
            if arguments.only.lower() in client.title.lower():
                found = run_client(client, url, model, folder)
                failed = [outcome.feature for outcome in found if not outcome.passed]
                print(f"{client.title}: {', '.join(failed) or 'all pass'}", file=sys.stderr)
                outcomes += found
    text = report(outcomes)
    print(text)
    (BUILD / "outcomes.jsonl").write_text(
        "".join(json.dumps(vars(outcome)) + "\n" for outcome in outcomes)
    )
    if arguments.write:
        write_part("clients", text)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
