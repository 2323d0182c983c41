"""AIPerf: a short measurement of chat completions and of completions, with the model's tokenizer from a folder."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from features import MODEL, TOKENIZER, URL, feature, run_features


def measure(endpoint: str, *options: str) -> None:
    folder = Path(tempfile.mkdtemp())
    command = [str(Path(sys.executable).parent / "aiperf"), "profile", "--model", MODEL]
    command += ["--url", URL, "--endpoint-type", endpoint, "--tokenizer", TOKENIZER]
    command += ["--request-count", "4", "--concurrency", "1", "--ui-type", "none"]
    command += ["--prompt-input-tokens-mean", "32", "--prompt-output-tokens-mean", "8"]
    command += ["--output-artifact-dir", str(folder), *options]
    # offline, it does not take a tokenizer from a folder either
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    reports = list(folder.rglob("profile_export_aiperf.json"))
    assert reports, (done.stderr or done.stdout)[-600:]
    report = json.loads(reports[0].read_text())
    assert report["request_count"]["avg"] == 4, report["request_count"]
    assert not report.get("error_summary"), report["error_summary"]


@feature("chat")
def chat() -> None:
    measure("chat")


@feature("stream")
def stream() -> None:
    measure("chat", "--streaming")


@feature("usage")
def usage() -> None:
    measure("chat", "--streaming", "--use-server-token-count", "--per-chunk-usage")


@feature("completions")
def completions() -> None:
    measure("completions", "--streaming")


run_features()
