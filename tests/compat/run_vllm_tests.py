"""Run vLLM's own HTTP tests against Diptych: `python -m tests.compat.run_vllm_tests`.

1. Fetch and prepare the tests (`suite`), make a small model (`models`).
2. Start `diptych serve` on free ports, or take the server at `--url`; put the renaming proxy in front of it.
3. Run the tests that the sorting table and the list of passed ones name, 25 s each.
4. Write `build/compat/outcomes.tsv` (test, category, outcome, reason) and `build/compat/refusals.jsonl` (each refused
   body). Print totals against the sorting table, and each offered test that failed. Exit 1 if fewer than 95 % of the
   offered tests pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import httpx

from tests.compat import models, suite
from tests.compat.page import PAGE, dated, write_part
from tests.compat.renaming_proxy import RenamingProxy, renaming_proxy
from tests.compat.sorting import CATEGORIES, OFFERED_CATEGORIES, SortedTest, read_sorting
from tests.support.live import free_port, running

TEST_TIMEOUT_S = 25
REQUIRED_SHARE = 0.95
REASON_CHARS = 160  #: The page shows so much of why a test failed.


@dataclass(frozen=True)
class ServerProfile:
    """How a server is started for some of the tests, which vLLM starts with flags of their own."""

    name: str
    arguments: tuple[str, ...]
    #: Parts of the names of the tests that run on this server; empty for all the others.
    tests: tuple[str, ...] = ()
    #: The kind of model (`make_model`); empty for the one of the command line.
    model: str = ""
    #: How often a test may be tried until it passes.
    attempts: int = 1
    #: A key that the server takes; empty if it asks for none.
    api_key: str = ""
    #: True if each test has a server that has served no other.
    one_test_each: bool = False

    def serves(self, test: str) -> bool:
        return any(part in test for part in self.tests)


CONTEXT_SETTING = ("--set", f"model.max_model_len={models.SERVED_CONTEXT}")
DEFAULT_PROFILE = ServerProfile("default", CONTEXT_SETTING)
SPECIAL_PROFILES = (
    ServerProfile(
        "long-context", ("--set", "model.max_model_len=10100"), ("test_request_cancellation",)
    ),
    # Two draws from ten choices must differ. A random model draws them nearly evenly, so one pair in ten is equal.
    ServerProfile(
        "random",
        CONTEXT_SETTING,
        ("test_chat.py::test_structured_outputs_choice_chat",),
        model="random",
        attempts=3,
    ),
    # Answers that are still being generated when the tests look, unless the machine is busy with something else.
    ServerProfile(
        "talkative",
        CONTEXT_SETTING,
        ("test_server_load", "test_abort_metrics_reset"),
        model="random",
        attempts=3,
    ),
    ServerProfile(
        "fresh",
        CONTEXT_SETTING,
        tuple(
            f"test_metrics_counts[{flag}-text]"
            for flag in ("", "--enable-chunked-prefill", "--show-hidden-metrics-for-version=0.32")
        ),
        model="random",
        one_test_each=True,
    ),
    ServerProfile(
        "thinking",
        CONTEXT_SETTING,
        (
            "test_function_tool_use[plain-True-",
            "responses/test_function_call.py::test_function_tool_use[",
            "test_default_includes_reasoning",
            "test_include_reasoning_true",
            "test_reasoning_tokens_in_usage",
            "test_thinking_token_budget_limits_reasoning",
            "test_reasoning_item",
            "reasoning_tokens_e2e",
        ),
        model="thinking-demo",
    ),
    # The keys of these tests; without a root path their other servers are not offered.
    ServerProfile(
        "keyed",
        (*CONTEXT_SETTING, "--api-key", "abc-123", "--api-key", "test"),
        ("test_chat_session_root_path_with_api_key", "[server0]"),
        api_key="test",
    ),
)


@dataclass(frozen=True)
class TestOutcome:
    """What a test did in this run."""

    name: str
    outcome: str
    reason: str


@contextmanager
def served(arguments: argparse.Namespace, profile: ServerProfile, folder: Path) -> Iterator[str]:
    """Yield the server's URL. The server is started with the model in `folder` unless `--url` is given."""
    if arguments.url:
        yield arguments.url.rstrip("/")
        return
    log = suite.BUILD / f"serve-{profile.name}.log"
    with running(log, str(folder), *profile.arguments, *arguments.serve) as cluster:
        yield cluster.url


def make_model(kind: str, prepared: Path) -> Path:
    """Return the folder of the model of that kind, made unless it is there; a path is returned as it is."""
    folder = suite.BUILD / "models" / kind
    if kind == "closing-demo":
        return models.closing_demo(folder)
    if kind == "thinking-demo":
        return models.thinking_demo(folder)
    if kind == "random":
        return models.random_llama(folder, suite.documents(prepared))
    return Path(kind)


def profiles_with_tests(names: list[str]) -> list[tuple[ServerProfile, list[str]]]:
    """Return each server that is needed, by its profile, with the tests that run on it."""
    by_profile = [
        (profile, [name for name in names if profile.serves(name)]) for profile in SPECIAL_PROFILES
    ]
    special = {name for _, chosen in by_profile for name in chosen}
    by_profile.insert(0, (DEFAULT_PROFILE, [name for name in names if name not in special]))
    servers: list[tuple[ServerProfile, list[str]]] = []
    for profile, chosen in by_profile:
        if profile.one_test_each:
            servers += [(profile, [name]) for name in chosen]
        elif chosen:
            servers.append((profile, chosen))
    return servers


def run_tests(prepared: Path, folder: Path, url: str, names: list[str]) -> dict[str, TestOutcome]:
    """Run the named tests against the proxy at `url` and return their outcomes by name."""
    listed = suite.BUILD / "tests.txt"
    listed.write_text("\n".join(names))
    outcomes = suite.BUILD / "outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{prepared}:{suite.SHIM}",
        "COMPAT_URL": url,
        "COMPAT_MODEL": str(folder),
        "COMPAT_SUITE": str(prepared),
        "COMPAT_TESTS": str(listed),
        "COMPAT_OUTCOMES": str(outcomes),
        "COMPAT_SERVER_VERSION": version("diptych"),
    }
    files = sorted({name.partition("::")[0] for name in names})
    command = [str(suite.suite_python()), "-m", "pytest", "-q", "--tb=native", "-c", "pytest.ini"]
    command += ["-p", "compat_shim.plugin", "-p", "no:cacheprovider", "--rootdir", "."]
    command += ["--timeout", str(TEST_TIMEOUT_S), "--continue-on-collection-errors"]
    if any("tool_use" in file for file in files):
        command += ["--models", "hermes"]
    with (suite.BUILD / "pytest.log").open("a") as log:
        subprocess.run(
            # the option of the folder tool_use comes last: it takes all arguments up to the next option
            [*command[:3], *files, *command[3:]],
            cwd=prepared,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return read_outcomes(outcomes)


def read_outcomes(path: Path) -> dict[str, TestOutcome]:
    """Return the outcomes that the plugin wrote. A test whose end failed after it passed counts as failed."""
    outcomes: dict[str, TestOutcome] = {}
    if not path.exists():
        return outcomes  # the suite has no such tests any more
    for line in path.read_text().splitlines():
        record = json.loads(line)
        previous = outcomes.get(record["test"])
        if previous is None or previous.outcome == "passed":
            outcomes[record["test"]] = TestOutcome(
                record["test"], record["outcome"], record["reason"]
            )
    return outcomes


def write_table(
    outcomes: dict[str, TestOutcome], sorting: dict[str, SortedTest], path: Path
) -> None:
    """Write test, category, outcome and reason, one test a line."""
    with path.open("w") as table:
        table.write("test\tcategory\toutcome\treason\n")
        for name, outcome in sorted(outcomes.items()):
            category = sorting[name].category if name in sorting else "unsorted"
            reason = outcome.reason.replace("\t", " ")
            table.write(f"{name}\t{category}\t{outcome.outcome}\t{reason}\n")


def totals(outcomes: dict[str, TestOutcome], sorting: dict[str, SortedTest]) -> str:
    """Return a table in Markdown of the outcomes in each category."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, test in sorting.items():
        outcome = outcomes[name].outcome if name in outcomes else "not run"
        counts[test.category, outcome] += 1
    kinds = ("passed", "failed", "skipped", "not run")
    lines = ["| category | " + " | ".join(kinds) + " |", "|---" * 5 + "|"]
    for category in CATEGORIES:
        numbers = [str(counts[category, kind]) for kind in kinds]
        lines.append(f"| {category} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


def offered_passes(
    outcomes: dict[str, TestOutcome], sorting: dict[str, SortedTest]
) -> tuple[int, int]:
    """Return how many of the offered tests passed, and how many are offered."""
    offered = [name for name, test in sorting.items() if test.category in OFFERED_CATEGORIES]
    passed = [name for name in offered if has_passed(name, outcomes)]
    return len(passed), len(offered)


def offered_failures(outcomes: dict[str, TestOutcome], sorting: dict[str, SortedTest]) -> str:
    """Return one line of Markdown for each offered test that did not pass: its name, and why."""
    lines = []
    for name, test in sorting.items():
        if test.category not in OFFERED_CATEGORIES or has_passed(name, outcomes):
            continue
        reason = outcomes[name].reason if name in outcomes else "not run"
        shown_reason = " ".join(reason.split())[:REASON_CHARS].replace("`", "'")
        lines.append(f"- {name.partition('::')[2]} ({test.note[:-1]}): `{shown_reason}`")
    return "\n".join(lines)


def has_passed(name: str, outcomes: dict[str, TestOutcome]) -> bool:
    return name in outcomes and outcomes[name].outcome == "passed"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="a running server; its model must be the one of --model")
    parser.add_argument(
        "--model", default="closing-demo", help="closing-demo, thinking-demo, random or a folder"
    )
    parser.add_argument("--match", default="", help="run only tests whose name contains this text")
    parser.add_argument("--category", default="", help="run only tests of this category")
    parser.add_argument("--write", action="store_true", help=f"write the totals to {PAGE.name}")
    parser.add_argument("serve", nargs="*", help="more arguments of `diptych serve`, after --")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    suite.BUILD.mkdir(parents=True, exist_ok=True)
    prepared = suite.prepare()
    sorting = {
        name: test
        for name, test in read_sorting().items()
        if arguments.match in name and arguments.category in test.category
    }
    refusals = suite.BUILD / "refusals.jsonl"
    refusals.unlink(missing_ok=True)
    (suite.BUILD / "pytest.log").unlink(missing_ok=True)
    outcomes: dict[str, TestOutcome] = {}
    for profile, names in profiles_with_tests(list(sorting)):
        folder = make_model(profile.model or arguments.model, prepared)
        with served(arguments, profile, folder) as url:
            headers = {"authorization": f"Bearer {profile.api_key}"} if profile.api_key else {}
            listed = httpx.get(f"{url}/v1/models", headers=headers, timeout=30)
            served_name = listed.json()["data"][0]["id"]
            proxy = RenamingProxy(url, served_name, refusals)
            with renaming_proxy(proxy, free_port()) as proxy_url:
                for _ in range(profile.attempts):
                    names = [name for name in names if not has_passed(name, outcomes)]
                    if names:
                        outcomes |= run_tests(prepared, folder, proxy_url, names)
    write_table(outcomes, sorting, suite.BUILD / "outcomes.tsv")
    passed, offered = offered_passes(outcomes, sorting)
    share = dated(f"{passed} of the {offered} tests of the categories `passed` and `offered` pass.")
    parts = (share, totals(outcomes, sorting), offered_failures(outcomes, sorting))
    text = "\n\n".join(part for part in parts if part)
    print(text)
    if arguments.write:
        write_part("vllm", text)
    print(f"each test: {suite.BUILD / 'outcomes.tsv'}; refused bodies: {refusals}")
    return 0 if passed >= REQUIRED_SHARE * offered else 1


if __name__ == "__main__":
    sys.exit(main())
