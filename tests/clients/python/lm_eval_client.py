"""lm-eval: its command line on a task made here, by completions (logprobs of the prompt) and by chat."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from features import MODEL, TOKENIZER, V1_URL, feature, run_features

folder = Path(tempfile.mkdtemp())
(folder / "data.jsonl").write_text(
    "\n".join(
        json.dumps({"question": question, "choices": ["yes", "no"], "label": 0})
        for question in ("Is prefill parallel?", "Is decode serial?", "Is KV a cache?")
    )
)
COMMON = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
(folder / "choose.yaml").write_text(
    f"task: choose\noutput_type: multiple_choice\n{COMMON}doc_to_choice: choices\ndoc_to_target: label\n"
)
(folder / "write.yaml").write_text(
    f"task: write\noutput_type: generate_until\n{COMMON}doc_to_target: 'yes'\n"
    "generation_kwargs: {until: ['.'], max_gen_toks: 30}\n"
)


def evaluate(kind: str, path: str, task: str, *options: str) -> None:
    settings = [
        f"model={MODEL}",
        f"base_url={V1_URL}/{path}",
        "tokenizer_backend=huggingface",
        f"tokenizer={TOKENIZER}",
        "num_concurrent=1",
        "max_retries=1",
    ]
    command = [str(Path(sys.executable).parent / "lm_eval"), "--model", kind]
    command += ["--model_args", ",".join(settings), "--tasks", task]
    command += ["--include_path", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-600:]
    assert f"|{task}" in done.stdout, done.stdout[-300:]


@feature("logprobs")
def logprobs() -> None:
    evaluate("local-completions", "completions", "choose")


@feature("completions")
def completions() -> None:
    evaluate("local-completions", "completions", "write")


@feature("chat")
def chat() -> None:
    evaluate("local-chat-completions", "chat/completions", "write", "--apply_chat_template")


run_features()
