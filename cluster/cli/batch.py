"""`diptych batch`: a file of requests in OpenAI's batch format, answered without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import fail
from .progress import count_progress

EVERY_ANSWERS = 100  #: So often a line says how far it is, where there is no terminal.


def batch(
    requests: Annotated[Path, typer.Argument(help="JSON lines, as OpenAI's batch API takes them.")],
    answers: Annotated[
        Path, typer.Argument(help="Gets the answers; those that it has are not made again.")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder or Hugging Face id. Default: the bundled model."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Further names by which requests may call the model; may be repeated."),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of a prompt and its answer, at most.")
    ] = None,
    kv_mib: Annotated[int | None, typer.Option(help="Memory for KV, in MiB.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads. Default: one a core.")] = None,
) -> None:
    """Answer all REQUESTS in this process, and write each answer when it has ended.

    Stopped half-way, the same command goes on with what is missing. Exit code 1 where a file cannot
    be read or written or a model cannot be loaded, 2 where both files are one, 130 after ^C;
    answers that failed say so in their lines.
    """
    from ..batch_file import BatchFileError, answer_line, answered_ids, read_requests
    from ..config import ConfigError

    try:
        all_requests = read_requests(requests)
        if answers.exists() and answers.samefile(requests):
            fail(f"{answers} is the file of the requests: name another for the answers", 2)
        answered = answered_ids(answers)
    except BatchFileError as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot read {error.filename}: {error.strerror}")
    missing = [request for request in all_requests if request.custom_id not in answered]
    if not missing:
        typer.echo(f"{len(all_requests)} of {len(all_requests)} answered already", err=True)
        return

    from ...engine.errors import EngineError
    from ..offline import LLM

    model_settings = {"max_model_len": max_model_len, "served_names": served_model_name}
    engine_settings = {"kv_mib": kv_mib, "threads": threads}
    failed = 0
    done = len(all_requests) - len(missing)
    try:
        with (
            answers.open("a", encoding="utf-8") as file,
            LLM(
                model,
                model_settings=_given(model_settings),
                engine_settings=_given(engine_settings),
            ) as llm,
            count_progress("answers", len(missing), EVERY_ANSWERS) as count_answer,
        ):
            for position, answer in llm.iterate(request.seeded_body for request in missing):
                done += 1
                failed += "error" in answer
                file.write(answer_line(done, missing[position].custom_id, answer) + "\n")
                file.flush()
                count_answer()
    except (ConfigError, EngineError) as error:
        fail(str(error))
    except OSError as error:
        # A write that fails names no file; a model's file that cannot be read has its own name.
        if error.filename in (None, str(answers)):
            fail(
                f"cannot write {answers}: {error.strerror}; the same command goes on with the rest"
            )
        fail(f"stopped: {error}; the same command goes on with the rest")
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on with the rest", 130)
    typer.echo(f"{done} of {len(all_requests)} answered, {failed} with an error", err=True)


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that the command line gives."""
    return {name: value for name, value in settings.items() if value is not None}
