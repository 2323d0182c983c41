"""`diptych explain` says why a request went where it went; `replay`, what another policy does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...protos.targets import TtftTarget
from .common import HERE, AdminClient, AdminUrl, Token, check_output, fail

if TYPE_CHECKING:
    from ...router.events import RouterEvent
    from ...router.replay import LogHead

#: How a decision came about, by its kind: "it" is the request. Other kinds say it by their name.
KIND_MEANINGS = {"push": "it chose its worker", "pull": "a worker with credit chose it"}
#: Why a first token went out when it did, by `router.first_token.ReleaseReason`.
RELEASE_MEANINGS = {
    "in_time": "the second token was expected within the ITL target",
    "second_expected": "from then on the second token was expected within the ITL target",
    "second_came": "the second token came before it was expected",
    "ttft_target": "the TTFT target allowed no longer wait",
    "answer_ended": "the answer was complete without a second token",
    "attempt_failed": "the attempt failed before the second token",
}
OUTPUTS = ("text", "json")
Output = Annotated[str, typer.Option("-o", "--output", help="text or json")]


def explain(
    request_id: Annotated[str, typer.Argument(help="As in x-request-id, or an answer's id.")],
    output: Output = "text",
    admin: AdminUrl = HERE,
    token: Token = "",
) -> None:
    """Why a request went where it went: who waited, the candidates, prediction and outcome."""
    check_output(output, OUTPUTS)
    answer = AdminClient(admin, token).get(f"/admin/v1/requests/{request_id}/explain")
    decisions = answer["decisions"]
    if output == "json":
        typer.echo(json.dumps({"request": request_id, "decisions": decisions}, indent=2))
        return
    typer.echo("\n\n".join(_describe(decision) for decision in decisions))


def _describe(decision: dict[str, Any]) -> str:
    """Return a decision as text: what was decided, by what, and what was observed."""
    lines = [
        *_summary_lines(decision),
        *_option_lines(decision),
        *_outcome_lines(decision),
    ]
    return "\n".join(lines)


def _summary_lines(decision: dict[str, Any]) -> Iterator[str]:
    """Yield which attempt went where, by which policy, and which more urgent ones had to wait for it.

    A decision without workers, as when the request is refused, has its reason in `note`.
    `hit_tokens` are those that the worker which computes the prompt has in its pool or in the tiers
    below (`loaded_tokens` of them), or gets from the worker named as `fetch`.
    """
    request_id, attempt = decision["key"]
    workers = [name for name in (decision["prefill"], decision["decode"]) if name]
    yield f"{request_id}, attempt {attempt}: {' -> '.join(workers) or decision['note']}"

    meaning = KIND_MEANINGS.get(decision["kind"])
    suffix = f": {meaning}" if meaning else ""
    yield (
        f"  decision {decision['number']} of policy {decision['policy']}, "
        f"{decision['kind']}{suffix}"
    )
    cached = f"{decision['hit_tokens']} of them cached"
    if decision.get("loaded_tokens"):  # records of an older router have no such field
        cached += f" ({decision['loaded_tokens']} in host memory or on disk, to be loaded)"
    yield (
        f"  {decision['prompt_tokens']} prompt tokens, {cached}; "
        f"class {decision['slo_class']}, targets TTFT {_ttft_target(decision)} and "
        f"ITL {_ms(decision['itl_target_s'])}"
    )
    yield (f"  {_ms(decision['waited_s'])} old when decided; {decision['waiting']} others waited")
    if decision["session"]:
        yield f"  session {decision['session']}"
    if decision["fetch"]:
        yield f"  most of what is cached comes from {decision['fetch']}"
    for name, deadline_s, reason in decision["passed_over"]:
        yield f"    passed over {name}, due in {_ms(deadline_s)}: {reason}"


def _ttft_target(decision: dict[str, Any]) -> str:
    """Return the TTFT target: what it came to, and the words that it was computed from.

    A target is the largest of one or several sums, as in `max(1s, 500ms + 3x)`, where `3x` is three
    times what the prompt takes on an idle worker. Records of an older router have no words.
    """
    words = decision.get("ttft_target")
    target = _ms(decision["ttft_target_s"])
    if not words:
        return target
    isolated_s = decision.get("isolated_s", 0.0)
    if not isolated_s:
        return f"{words} = {target}"
    part = TtftTarget.parse(words).deciding_sum(decision["prompt_tokens"], isolated_s)
    return f"{words} = {target}, by {part} (the whole prompt alone takes {_ms(isolated_s)})"


def _option_lines(decision: dict[str, Any]) -> Iterator[str]:
    """Yield the workers that were compared: the chosen one first, with a star, then the others.

    A low score is better; what it counts differs among policies. Its terms are shown in ms.
    """
    for stage in ("prefill", "decode"):
        for rank, (worker, score, terms) in enumerate(decision[f"{stage}_options"]):
            described_terms = ", ".join(f"{name} {_ms(value)}" for name, value in terms.items())
            mark = "*" if rank == 0 else " "
            yield f"  {mark} {stage:8}{worker}  score {score:.6g}  ({described_terms})"
    if decision["others"] > 0:
        yield f"    and {decision['others']} other decode workers"


def _outcome_lines(decision: dict[str, Any]) -> Iterator[str]:
    """Yield a table, in ms, of what the router predicted and what the attempt was like.

    The record has predictions in seconds, and observations in ms. Predicted is the usual gap between
    tokens, observed the 99th percentile of them. `exposed` is the part of the KV transfer that was
    not hidden behind the prefill.
    """
    observed = decision["observed"]
    yield f"  {'':12}{'PREDICTED':>12}{'OBSERVED':>12}"
    for label, predicted_key, observed_key in (
        ("TTFT", "ttft_s", "ttft_ms"),
        ("ITL", "itl_s", "itl_p99_ms"),
        ("exposed", "exposed_s", "exposed_ms"),
    ):
        observed_ms = observed.get(observed_key)
        shown = "-" if observed_ms is None else f"{observed_ms:.1f} ms"
        yield f"  {label:12}{_ms(decision[predicted_key]):>12}{shown:>12}"
    release = observed.get("first_token_release")
    if release:
        held_ms = observed["first_token_held_ms"]
        reason = RELEASE_MEANINGS.get(release, release)
        yield f"  first token held for {held_ms:.1f} ms: {reason}"
    if "reason" in observed:
        yield f"  ended: {observed['reason']} after {observed['tokens']} tokens"


def _ms(seconds: float) -> str:
    """Return seconds as milliseconds."""
    return f"{1e3 * seconds:.1f} ms"


def replay(
    log: Annotated[
        Path,
        typer.Argument(help="A router's log, or the folder of its logs: see router.log_folder."),
    ],
    policy: Annotated[str, typer.Option(help="The policy to compare with.")] = "min_ttft",
    output: Output = "text",
) -> None:
    """Run a router's log through another policy, with the very code that serves."""
    from ...router.policies import POLICIES
    from ...router.replay import LogError
    from ...router.replay import replay as run

    check_output(output, OUTPUTS)
    if policy not in POLICIES:
        fail(f"--policy {policy}: expected one of {', '.join(POLICIES)}", 2)
    try:
        comparison = run(_logged_events(log), policy)
    except (OSError, LogError) as error:
        fail(f"cannot replay {log}: {error}")
    if output == "json":
        result = {
            "requests": comparison.requests,
            "decided": comparison.decided,
            "equal": comparison.equal,
            "policies": comparison.policies,
        }
        typer.echo(json.dumps(result, indent=2))
        return
    typer.echo(
        f"{comparison.requests} requests, {comparison.decided} decided by both, "
        f"{comparison.equal:.1%} to the same workers; predictions:"
    )
    columns = sorted({name for values in comparison.policies.values() for name in values})
    typer.echo(f"{'POLICY':28}" + "".join(f"{name.upper():>14}" for name in columns))
    for policy_name, values in comparison.policies.items():
        cells = "".join(f"{values.get(column, 0):>14g}" for column in columns)
        typer.echo(f"{policy_name:28}{cells}")


def _logged_events(log: Path) -> Iterator[tuple[float, LogHead | RouterEvent]]:
    """Yield what is in a router's log; of a folder, what is in its older and in its newer file.

    Each file begins with what the router knew of its workers and gateways, so that it can be replayed
    alone; requests that were queued then are not in it. Raises OSError, and LogError.
    """
    from ...router.replay import LogError, read
    from ..event_log import FILE_NAME, OLD_SUFFIX

    files = [log]
    if log.is_dir():
        newer = log / FILE_NAME
        files = [file for file in (newer.with_suffix(OLD_SUFFIX), newer) if file.exists()]
    if not files:
        raise LogError(f"there is no {FILE_NAME} in this folder")
    for file in files:
        with file.open("rb") as lines:
            try:
                yield from read(lines)
            except LogError as error:
                raise LogError(f"{file.name}, {error}") from None
