"""GuideLLM: a short benchmark of chat completions and of completions."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from features import MODEL, TOKENIZER, URL, feature, run_features


def measure(path: str) -> None:
    folder = Path(tempfile.mkdtemp())
    command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"]
    command += [
        "--backend",
        f"kind=openai_http,target={URL},model={MODEL},request_format={path}",
    ]
    command += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    command += ["--output", f"kind=json,path={folder}/report.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, (done.stderr or done.stdout)[-600:]
    [benchmark] = json.loads((folder / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] >= 1, totals
    assert totals["errored"] == 0, totals


@feature("chat")
def chat() -> None:
    measure("/v1/chat/completions")


@feature("completions")
def completions() -> None:
    measure("/v1/completions")


run_features()
