"""`LLM` and batch files: a cluster's answers in this process, in any company, and each error in its place."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import diptych
import pytest
from diptych import LLM, RequestError
from diptych.cluster import config, offline
from diptych.cluster.batch_file import (
    BatchFileError,
    BatchRequest,
    answer_line,
    answered_ids,
    read_requests,
)
from diptych.cluster.cli import app
from diptych.cluster.config import ConfigError
from diptych.engine.demo import CHECKPOINT
from diptych.engine.options import EngineOptions
from diptych.protos import frames as f
from typer.testing import CliRunner

from tests.support.fleet import Reference
from tests.support.live import BIN

QUESTION = [{"role": "user", "content": "What is prefill?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(engine_settings={"threads": 1, "kv_mib": 32}) as made:
        yield made


def ids_of(answer: dict[str, Any], choice: int = 0) -> list[int]:
    return answer["choices"][choice]["token_ids"]


def test_tokens_are_those_of_an_engine_alone_whatever_is_computed_beside_them(llm: LLM) -> None:
    prompts = [[3 + (7 * number + at) % 400 for at in range(5 + 9 * number)] for number in range(6)]
    parameters = {"max_tokens": 24, "temperature": 0.8, "seed": 11, "ignore_eos": True}
    answers = llm.generate(prompts, return_token_ids=True, **parameters)
    reference = Reference(CHECKPOINT)
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = reference.answer(prompt, f.Sampling(24, 0.8, seed=11))
        assert ids_of(answer) == [token.id for token in alone]
    assert (
        llm.generate(prompts[:1], return_token_ids=True, **parameters)[0]["choices"][0]
        == (answers[0]["choices"][0])
    )


def test_the_readmes_example_says_what_it_says_there(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parent.parent.parent / "README.md").read_text()
    example = readme.split("```python\n")[1].split("```")[0]
    exec(example, {})
    assert capsys.readouterr().out.startswith("Prefill is the first phase")


def test_a_chat_is_an_object_of_openais_api(llm: LLM) -> None:
    greedy, sampled = llm.run(
        [
            {"messages": QUESTION, "max_tokens": 16, "stop": ["phase"]},
            {"messages": QUESTION, "max_tokens": 6, "n": 3, "temperature": 2.0, "logprobs": True},
        ]
    )
    assert greedy["object"] == "chat.completion" and greedy["model"] == "demo"
    assert greedy["choices"][0]["message"]["content"] == "Prefill is the first "
    assert greedy["choices"][0]["finish_reason"] == "stop"
    assert [choice["index"] for choice in sampled["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in sampled["choices"]}) > 1
    assert sampled["usage"]["completion_tokens"] == sum(
        len(choice["logprobs"]["content"]) for choice in sampled["choices"]
    )


def test_a_grammar_binds_the_answer(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    (answer,) = llm.chat([QUESTION], response_format=form, max_tokens=40)
    text = answer["choices"][0]["message"]["content"]
    assert text.lstrip().startswith("{")


def test_more_prompts_than_the_engine_runs_at_a_time_all_end(llm: LLM) -> None:
    answers = llm.generate(([5 + number] for number in range(150)), max_tokens=2, ignore_eos=True)
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [2] * 150


def test_a_wrong_body_is_refused_before_anything_is_computed(llm: LLM) -> None:
    with pytest.raises(RequestError, match="max_tokens") as error:
        llm.chat([QUESTION], max_tokens=-1)
    assert error.value.code == "invalid_request"
    with pytest.raises(RequestError) as error:
        llm.generate([[5] * 100_000])
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="a body of its own"):
        llm.run([{"prompt": ["a", "b"]}])


def test_bodies_are_read_as_http_reads_them(llm: LLM) -> None:
    odd = {"max_tokens": 2, "temperature": None, "unheard_of": 1, "stop": None, "model": "demo"}
    (answer,) = llm.chat([[{**QUESTION[0], "name": None, "mood": "odd"}]], **odd)
    assert answer["usage"]["completion_tokens"] == 2
    with pytest.raises(RequestError, match="no model 'gpt' here, only demo") as error:
        llm.generate(["a"], model="gpt")
    assert error.value.code == "model_not_found"
    with pytest.raises(RequestError, match="is no JSON"):
        llm.generate(["a"], seed={1, 2})


def test_who_iterates_gets_each_error_in_its_place_and_may_leave(llm: LLM) -> None:
    bodies = [{"prompt": "a", "max_tokens": 2}, {"messages": []}, {"prompt": "b", "max_tokens": 3}]
    answers = dict(llm.iterate(bodies))
    assert answers[1]["error"]["code"] == "invalid_request"
    assert answers[2]["usage"]["completion_tokens"] == 3
    left = llm.iterate([{"prompt": "a", "max_tokens": 2}, {"prompt": "b", "max_tokens": 200}])
    assert next(left)[0] == 0
    left.close()
    assert llm.generate(["c"], max_tokens=1)[0]["usage"]["completion_tokens"] == 1


def test_others_may_be_asked_while_an_iteration_is_under_way(llm: LLM) -> None:
    bodies = [{"prompt": text, "max_tokens": 3 + 9 * index} for index, text in enumerate("ab")]
    alone = dict(llm.iterate(bodies))
    first, second = llm.iterate(bodies), llm.iterate(bodies)
    answers = [dict([next(first)]), dict([next(second)])]
    assert llm.generate(["c"], max_tokens=40)[0]["usage"]["completion_tokens"] == 40
    for found, iteration in zip(answers, (first, second), strict=True):
        found.update(iteration)
        texts = [found[index]["choices"][0]["text"] for index in range(2)]
        assert texts == [alone[index]["choices"][0]["text"] for index in range(2)]


def test_prompts_that_differ_within_a_large_block_share_nothing() -> None:
    shared = [3 + at % 400 for at in range(64)]
    prompts = [shared + [5] * 80, shared + [7] * 80]
    parameters = {"max_tokens": 8, "return_token_ids": True, "ignore_eos": True}
    large = {"engine_settings": {"threads": 1}, "model_settings": {"block_tokens": 128}}
    with LLM(**large) as llm:
        together = [llm.generate([prompt], **parameters)[0] for prompt in prompts]
    with LLM(**large) as llm:
        alone = llm.generate(prompts[1:], **parameters)[0]
    assert ids_of(together[1]) == ids_of(alone)
    assert together[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_context_is_what_the_engine_s_own_pool_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is as small beside the demo model here as 256 MiB are beside a large one."""
    monkeypatch.setattr(config, "DEFAULT_KV_BYTES", 1 << 20)
    with LLM(engine_settings={"threads": 1}) as llm:
        of_default = llm._files.limits.max_model_len
        assert of_default == llm._engine.max_model_len
    with LLM(engine_settings={"threads": 1, "kv_mib": 32}) as llm:
        assert llm._files.limits.max_model_len == llm._engine.max_model_len > of_default
        (answer,) = llm.generate([[3] * of_default], max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == of_default


def test_a_gpu_is_asked_for_by_its_device_alone_and_bounds_the_context_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU sizes its pool at the start, so only the engine knows how much fits."""
    asked: list[EngineOptions] = []

    class Gpu:
        max_model_len = 192

        def __init__(self, options: EngineOptions) -> None:
            asked.append(options)

        def close(self) -> None: ...

    monkeypatch.setattr(offline, "Engine", Gpu)
    with (
        LLM(engine_settings={"device": "cuda"}) as llm,
        pytest.raises(RequestError, match="192") as refused,
    ):
        llm.generate([[3] * 192])
    assert refused.value.code == "context_length_exceeded"
    assert (asked[0].device, asked[0].kv_bytes) == ("cuda", None)


def test_wrong_settings_and_models_are_a_sentence() -> None:
    with pytest.raises(ConfigError, match="thread_count"):
        LLM(engine_settings={"thread_count": 2})
    with pytest.raises(ConfigError, match="is not a folder"):
        LLM("./missing")
    with pytest.raises(AttributeError, match="LLN"):
        diptych.LLN  # noqa: B018


# ---- batch files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [None, QUESTION])
def test_a_line_of_completions_is_one_whatever_else_its_body_has(
    messages: Any, llm: LLM, tmp_path: Path
) -> None:
    body = {"prompt": "hi", "messages": messages, "max_tokens": 2}
    file = tmp_path / "in.jsonl"
    fields = {"custom_id": "a", "url": "/v1/completions", "body": body}
    file.write_text(json.dumps(fields) + "\n")
    (request,) = read_requests(file)
    (answer,) = llm.run([request.body])
    assert answer["object"] == "text_completion"


def test_answers_may_go_into_a_pipe(tmp_path: Path) -> None:
    """What was answered before is looked up in files only: a pipe would have to be read first."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)
    with ThreadPoolExecutor(1) as thread:
        try:
            assert thread.submit(answered_ids, pipe).result(timeout=5) == frozenset()
        finally:
            os.close(writer)  # a read ends now, which would wait for ever
            os.close(reader)


def line(custom_id: Any, **fields: Any) -> str:
    body = {"prompt": "a", "max_tokens": 2}
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps({**request, **fields}) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", ":1: the line is not JSON"),
        ("[]", ":1: a line must be a JSON object"),
        (line(3), ":1: custom_id must be a text"),
        (line("a") + line("a"), ":2: custom_id 'a' occurs twice"),
        (line("a", url="/v1/embeddings"), ":1: url is '/v1/embeddings'"),
        (line("a", url=[]), r":1: url is \[\]"),
        (line("\ud800"), ":1: custom_id must be a text"),
        (line("a", method="GET"), ":1: method is 'GET'"),
        (line("a", body={"messages": []}), ":1: body must be an object with prompt"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_by_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text)
    with pytest.raises(BatchFileError, match=message):
        read_requests(path)


@pytest.mark.parametrize("fields", [{}, {"seed": None}])
def test_a_request_without_a_seed_has_always_the_same(fields: dict[str, Any]) -> None:
    one, again, other = (BatchRequest(name, fields).seeded_body["seed"] for name in "aab")
    assert one == again != other
    assert BatchRequest("a", {"seed": 0}).seeded_body == {"seed": 0}


def test_a_half_written_line_of_answers_is_taken_off(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    assert not answered_ids(path)
    whole = answer_line(1, "a", {"id": "x", "choices": []}) + "\n"
    for half in ("{", '{"id": "batch_req_2", "custom_id": "b", "resp'):
        path.write_text(whole + half)
        assert answered_ids(path) == {"a"}
        assert path.read_text() == whole


@pytest.mark.parametrize(
    "text",
    [
        "something else\n",
        "something else without a line end",
        '{"custom_id": "a", "body": {}}\n',
        '{"custom_id": ["a"], "response": {}}\n',
        '[{"custom_id": "a", "response": {}}]\n',
        '{"id": "batch_req_1", "custom_id": "a", "response": {}}\nsomething else',
    ],
)
def test_a_file_of_something_else_is_no_file_of_answers_and_stays(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text(text)
    with pytest.raises(BatchFileError, match="no line of answers"):
        answered_ids(path)
    assert path.read_text() == text


def test_the_answers_may_not_go_into_the_file_of_the_requests(tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    text = line("a") + line("b").rstrip()
    requests.write_text(text)
    link = tmp_path / "link.jsonl"
    link.symlink_to(requests)
    for answers in (requests, link):
        done = CliRunner().invoke(app, ["batch", str(requests), str(answers)])
        assert done.exit_code == 2 and "is the file of the requests" in done.output
        assert requests.read_text() == text


@pytest.mark.slow
def test_a_full_disk_ends_the_command_with_a_sentence_and_loses_nothing(tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    answers = tmp_path / "answers.jsonl"
    requests.write_text("".join(line(f"request-{number}") for number in range(6)))
    command = [str(BIN / "diptych"), "batch", str(requests), str(answers), "--threads", "1"]

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, preexec_fn=limit_files
    )
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert f"cannot write {answers}: File too large" in done.stderr
    whole = answered_ids(answers)
    assert 0 < len(whole) < 6
    again = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert "6 of 6 answered, 0 with an error" in again.stderr
    assert len(answers.read_text().splitlines()) == 6 and len(answered_ids(answers)) == 6


def test_the_command_answers_what_is_missing_and_nothing_twice(tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    answers = tmp_path / "answers.jsonl"
    requests.write_text(line("a") + line("bad", body={"prompt": "x", "max_tokens": -1}) + line("c"))
    answers.write_text(answer_line(1, "a", {"id": "x"}) + "\n")
    command = [str(BIN / "diptych"), "batch", str(requests), str(answers), "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert "3 of 3 answered, 1 with an error" in done.stderr and not done.stdout
    lines = [json.loads(one) for one in answers.read_text().splitlines()]
    assert {one["custom_id"]: one["response"]["status_code"] for one in lines} == {
        "a": 200,
        "bad": 400,
        "c": 200,
    }
    before = answers.read_text()
    again = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert "answered already" in again.stderr and answers.read_text() == before
