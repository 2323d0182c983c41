"""`diptych chat`: a dialogue with the served model; shows route, TTFT and ITL of each answer.

On a terminal the lines are typed into `prompt.py`. Without one they come from stdin as they are,
and the output has no colours. `answer.py` asks; this file keeps the dialogue.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import httpx
import typer

from .answer import (
    INTERRUPTED,
    AnswerError,
    AnswerOutput,
    ChatOptions,
    MaxTokens,
    ModelName,
    PieceSink,
    ReceivedAnswer,
    SystemPrompt,
    Temperature,
    ask,
    connect,
    new_answer,
    no_piece,
    one_answer,
    read_files,
)
from .common import HERE, NO_ANSWER, TEXT_OUTPUTS, ApiKey, Endpoint, check_output, fail
from .terminal import AnswerWriter, dimmed, printable

HELP = """\
/route        which workers served the last answer, and what was cached of its prompt
/stats        times and tokens of the last answer, and of the dialogue
/model        which models are served; /model NAME goes on with that one
/save FILE    write the dialogue into a file, as Markdown, or JSON if the name ends in .json
/help         this list
/exit         end; so does ^D

Alt-Enter, or a backslash at the end of a line, begins another line. ^C stops an answer."""
#: A line is a command if it begins so; "/etc/hosts: what is that?" is a question.
COMMAND = re.compile(r"/([a-z]+)(?:\s+(\S.*))?\s*")
LIST_TIMEOUT_S = 10.0  #: For the gateway to list its models.


class Prompt(Protocol):
    """Where the user's lines come from."""

    def read(self) -> str:
        """Return the next message, without the space around it.

        Raises EOFError at the end, and KeyboardInterrupt on ^C.
        """


class StdinPrompt:
    """Reads a message a line, as from a pipe; a backslash at the end of a line adds the next."""

    def read(self) -> str:
        """Return the next message. Raises EOFError at the end of stdin.

        Bytes that are no text end the command with exit code 2.
        """
        lines: list[str] = []
        while True:
            try:
                line = sys.stdin.readline()
            except UnicodeDecodeError:
                fail("stdin is no text in UTF-8", 2)
            if not line and not lines:
                raise EOFError
            text = line.rstrip("\n")
            lines.append(text.removesuffix("\\"))
            if not text.endswith("\\"):
                return "\n".join(lines).strip()


@dataclass(slots=True)
class Dialogue:
    """The messages so far, and what the slash commands tell of them."""

    client: httpx.Client
    options: ChatOptions
    #: OpenAI's messages, the system prompt first if there is one.
    messages: list[dict[str, str]] = field(default_factory=list)
    #: The whole answers, and those that ^C stopped.
    answers: list[ReceivedAnswer] = field(default_factory=list)
    #: What goes before the next question: the text of the files of `--file`.
    prefix: str = ""
    #: Files that `/save` wrote, and may write again.
    saved_files: set[Path] = field(default_factory=set)

    def ask(self, question: str, sink: PieceSink) -> ReceivedAnswer:
        """Return the answer to the question, which has then become part of the dialogue.

        Raises AnswerError; the question is then forgotten. KeyboardInterrupt passes through: the
        question stays with what had arrived of its answer, if something had.
        """
        answer = new_answer()
        user_message = {"role": "user", "content": self.prefix + question}
        try:
            ask(self.client, self.options.body([*self.messages, user_message]), answer, sink)
        except KeyboardInterrupt:
            if answer.text:
                self._add(user_message, answer)
            raise
        self._add(user_message, answer)
        return answer

    def _add(self, user_message: dict[str, str], answer: ReceivedAnswer) -> None:
        self.prefix = ""
        self.messages += [user_message, {"role": "assistant", "content": answer.text}]
        self.answers.append(answer)


def chat(
    question: Annotated[
        str | None, typer.Argument(help="Asked once; without it, a dialogue.")
    ] = None,
    model: ModelName = "",
    system: SystemPrompt = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(help="Its text goes before the first question; may be given again."),
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    output: AnswerOutput = "text",
    endpoint: Endpoint = HERE,
    token: ApiKey = "",
) -> None:
    """Chat with the served model; shows route, TTFT and ITL after each answer."""
    check_output(output, TEXT_OUTPUTS)
    prefix = read_files(file or [])
    messages = [{"role": "system", "content": system}] if system else []
    dialogue = Dialogue(
        client=connect(endpoint, token),
        options=ChatOptions(model=model, max_tokens=max_tokens, temperature=temperature),
        messages=messages,
        prefix=prefix,
    )
    if question:
        _answer_once(dialogue, question, output)
        return
    _converse(dialogue, _prompt(output), output)


def _answer_once(dialogue: Dialogue, question: str, output: str) -> None:
    """Print the answer to one question. What goes wrong ends the command."""
    writer = _writer(output)
    with one_answer(writer):
        answer = dialogue.ask(question, _sink(writer))
    _print_figures(answer, output)


def _converse(dialogue: Dialogue, prompt: Prompt, output: str) -> None:
    """Ask what the prompt reads until its end. An error is a sentence, and the dialogue goes on."""
    for message in _messages(prompt):
        command = COMMAND.fullmatch(message)
        if command:
            if command[1] == "exit":
                return
            typer.echo(_run_command(dialogue, command[1], command[2] or ""))
            continue
        writer = _writer(output)
        try:
            answer = dialogue.ask(message, _sink(writer))
        except AnswerError as error:
            writer.end()
            typer.echo(f"diptych: {error}", err=True)
        except KeyboardInterrupt:
            writer.end()
            if not sys.stdin.isatty():
                raise typer.Exit(INTERRUPTED) from None
            typer.echo(dimmed("stopped"))
        else:
            writer.end()
            _print_figures(answer, output)


def _messages(prompt: Prompt) -> Iterator[str]:
    """Yield what the user says, until ^D; ^C forgets the line."""
    while True:
        try:
            message = prompt.read()
        except EOFError:
            return
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise typer.Exit(INTERRUPTED) from None
            continue
        if message:
            yield message


def _prompt(output: str) -> Prompt:
    """Return the prompt of a terminal if the user has one, and wants no JSON."""
    if output == "json" or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return StdinPrompt()
    # prompt_toolkit is imported for a terminal alone.
    from .prompt import TerminalPrompt

    typer.echo(dimmed("/help lists the commands; ^D ends"))
    return TerminalPrompt()


def _writer(output: str) -> AnswerWriter:
    return AnswerWriter(sys.stdout, silent=output == "json")


def _sink(writer: AnswerWriter) -> PieceSink:
    """Return the sink of an answer; thinking is shown where it can be told from the answer."""
    if not writer.styled:
        return PieceSink(writer.text, no_piece)
    return PieceSink(writer.text, writer.reasoning)


def _print_figures(answer: ReceivedAnswer, output: str) -> None:
    """Print below an answer who served it and how fast; with `-o json` the answer, too."""
    if output == "json":
        typer.echo(json.dumps(answer.summary()))
        return
    typer.echo(f"\n{dimmed(_describe(answer))}")


def _describe(answer: ReceivedAnswer) -> str:
    """Return the line below an answer."""
    route = answer.route.replace(",", " -> ")
    return (
        f"{route}   TTFT {_ms(answer.ttft_ms, 1)}   ITL {_ms(answer.itl_ms, 1)}   "
        f"{answer.tokens} tokens   prefix hit {answer.hit_tokens}"
    )


def _ms(value: float | None, digits: int) -> str:
    """Return milliseconds, or a dash where nothing was measured."""
    return "-" if value is None else f"{value:.{digits}f} ms"


# ---- slash commands ------------------------------------------------------------------------------


def _run_command(dialogue: Dialogue, name: str, argument: str) -> str:
    """Return what a slash command says."""
    match name:
        case "help":
            return HELP
        case "route":
            return _describe_route(dialogue.answers)
        case "stats":
            return _describe_stats(dialogue.answers)
        case "model":
            return _choose_model(dialogue, argument)
        case "save":
            return _save(dialogue, argument)
        case _:
            return f"/{name} is no command; /help lists them"


def _describe_route(answers: list[ReceivedAnswer]) -> str:
    """Return who served the last answer, and the command that says why."""
    if not answers:
        return "no answer yet"
    answer = answers[-1]
    prompt_tokens = answer.usage.get("prompt_tokens", "?")
    return (
        f"{answer.route.replace(',', ' -> ') or 'the server does not say'}; "
        f"{answer.hit_tokens} of {prompt_tokens} prompt tokens were cached\n"
        f"why: diptych explain {answer.request_id}"
    )


def _describe_stats(answers: list[ReceivedAnswer]) -> str:
    """Return times and tokens of the last answer and of all."""
    if not answers:
        return "no answer yet"
    total_tokens = sum(answer.tokens for answer in answers)
    prompt_tokens = sum(answer.usage.get("prompt_tokens", 0) for answer in answers)
    hit_tokens = sum(answer.hit_tokens for answer in answers)
    return (
        f"last: {_describe(answers[-1])}\n"
        f"all:  {len(answers)} answers, {total_tokens} tokens; "
        f"{hit_tokens} of {prompt_tokens} prompt tokens were cached"
    )


def _choose_model(dialogue: Dialogue, name: str) -> str:
    """Return the models that are served, or go on with the model of that name."""
    try:
        response = dialogue.client.get("/v1/models", timeout=LIST_TIMEOUT_S)
        served = [str(model["id"]) for model in response.json()["data"]]
    except (*NO_ANSWER, ValueError, KeyError, TypeError):
        return "the gateway does not say which models it serves"
    if not name:
        current = dialogue.options.model or served[0]
        return "\n".join(f"{'*' if model == current else ' '} {model}" for model in served)
    if name not in served:
        return f"{name} is not served; these are: {', '.join(served)}"
    dialogue.options = ChatOptions(
        model=name,
        max_tokens=dialogue.options.max_tokens,
        temperature=dialogue.options.temperature,
    )
    return f"the next answers are {name}'s"


def _save(dialogue: Dialogue, name: str) -> str:
    """Write the dialogue into a file, and return what was written.

    A file that another program made is left alone.
    """
    if not name:
        return "/save needs the name of a file"
    file = Path(name).expanduser()
    mode = "w" if file in dialogue.saved_files else "x"
    try:
        with file.open(mode) as stream:
            stream.write(_document(dialogue.messages, as_json=file.suffix == ".json"))
    except FileExistsError:
        return f"{file} is there already: give another name"
    except OSError as error:
        return f"cannot write {file}: {error.strerror}"
    dialogue.saved_files.add(file)
    return f"wrote {file}"


def _document(messages: list[dict[str, Any]], *, as_json: bool) -> str:
    """Return the dialogue as a document."""
    if as_json:
        return json.dumps(messages, indent=2) + "\n"
    parts = [f"**{message['role']}**\n\n{printable(message['content'])}\n" for message in messages]
    return "\n".join(parts)
