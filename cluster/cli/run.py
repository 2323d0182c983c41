"""`diptych run`: one answer on stdout, and nothing else, for pipes and scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from .answer import (
    INTERRUPTED,
    AnswerError,
    ChatOptions,
    PieceSink,
    ask,
    connect,
    new_turn,
    read_files,
)
from .common import HERE, ApiKey, Endpoint, check_output, fail
from .terminal import AnswerWriter

STDIN = "-"  #: In place of the prompt: it is read from stdin.
STDIN_LIMIT_CHARACTERS = 8 << 20  #: Of a prompt from stdin; a gateway's limit is 8 MiB.


def run(
    prompt: Annotated[str, typer.Argument(help="The question; - reads it from stdin.")],
    model: Annotated[str, typer.Option(help="Model name. Default: the served one.")] = "",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(help="Its text goes before the question; may be given again."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="text or json")] = "text",
    endpoint: Endpoint = HERE,
    token: ApiKey = "",
) -> None:
    """Answer PROMPT on stdout, and print nothing else there.

    Exit code 1 when there is no whole answer, 2 for wrong usage, 130 after ^C.
    """
    check_output(output, "text", "json")
    question = read_files(file or []) + _question(prompt)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    options = ChatOptions(model=model, max_tokens=max_tokens, temperature=temperature)
    writer = AnswerWriter(sys.stdout, silent=output == "json")
    client = connect(endpoint, token)
    turn = new_turn()
    try:
        ask(client, options.body(messages), turn, PieceSink(writer.text))
    except AnswerError as error:
        writer.end()
        fail(str(error))
    except KeyboardInterrupt:
        writer.end()
        raise typer.Exit(INTERRUPTED) from None
    writer.end()
    if output == "json":
        typer.echo(json.dumps(turn.summary()))


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
