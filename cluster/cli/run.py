"""`diptych run`: one answer on stdout, and nothing else, for pipes and scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .answer import (
    INTERRUPTED,
    AnswerOutput,
    ChatOptions,
    MaxTokens,
    ModelName,
    PieceSink,
    SystemPrompt,
    Temperature,
    ask,
    connect,
    new_answer,
    one_answer,
    read_files,
)
from .common import HERE, TEXT_OUTPUTS, ApiKey, Endpoint, check_output, fail
from .terminal import AnswerWriter

STDIN = "-"  #: In place of the prompt: it is read from stdin.
STDIN_LIMIT_CHARACTERS = 8 << 20  #: Of a prompt from stdin; a gateway's limit is 8 MiB.


def run(
    prompt: Annotated[str, typer.Argument(help="The question; - reads it from stdin.")],
    model: ModelName = "",
    system: SystemPrompt = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(help="Its text goes before the question; may be given again."),
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    output: AnswerOutput = "text",
    endpoint: Endpoint = HERE,
    token: ApiKey = "",
) -> None:
    """Answer PROMPT on stdout, and print nothing else there.

    Exit code 1 when there is no whole answer, 2 for wrong usage, 130 after ^C.
    """
    check_output(output, TEXT_OUTPUTS)
    question = read_files(file or []) + _question(prompt)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    options = ChatOptions(model=model, max_tokens=max_tokens, temperature=temperature)
    writer = AnswerWriter(sys.stdout, silent=output == "json")
    client = connect(endpoint, token)
    answer = new_answer()
    with one_answer(writer):
        ask(client, options.body(messages), answer, PieceSink(writer.text))
    if output == "json":
        typer.echo(json.dumps(answer.summary()))


def _question(prompt: str) -> str:
    """Return the prompt, which may come from stdin. Fails if it is empty or too long."""
    if prompt != STDIN:
        question = prompt
    else:
        try:
            question = sys.stdin.read(STDIN_LIMIT_CHARACTERS + 1)
        except UnicodeDecodeError:
            fail("stdin is no text in UTF-8", 2)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    if len(question) > STDIN_LIMIT_CHARACTERS:
        fail(f"the prompt is longer than {STDIN_LIMIT_CHARACTERS >> 20} Mi characters", 2)
    if not question.strip():
        fail("the prompt is empty", 2)
    return question
