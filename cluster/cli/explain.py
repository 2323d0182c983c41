"""`diptych explain`: why a request went where it went; `replay`: what another policy does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import DEFAULT_ADMIN, Admin, AdminUrl, Token, fail

Output = Annotated[str, typer.Option("-o", "--output", help="text or json")]


def explain(
    request_id: Annotated[str, typer.Argument(help="As in x-request-id, or an answer's id.")],
    output: Output = "text",
    admin: AdminUrl = DEFAULT_ADMIN,
    token: Token = "",
) -> None:
    """Why a request went where it went: who waited, the candidates, prediction and outcome."""
    if output not in ("text", "json"):
        fail(f"-o {output}: expected text or json", 2)
    decisions = Admin(admin, token).get(f"/admin/v1/requests/{request_id}/explain")["decisions"]
    if output == "json":
        typer.echo(json.dumps({"request": request_id, "decisions": decisions}, indent=2))
        return
    typer.echo("\n\n".join(_text(decision) for decision in decisions))


def _text(one: dict[str, Any]) -> str:
    request, attempt = one["key"]
    to = " -> ".join(name for name in (one["prefill"], one["decode"]) if name) or one["note"]
    kind = {"push": "it chose its worker", "pull": "a worker with credit chose it"}
    lines = [
        f"{request}, attempt {attempt}: {to}",
        f"  decision {one['number']} of policy {one['policy']}, {one['kind']}"
        + (f": {kind[one['kind']]}" if one["kind"] in kind else ""),
        f"  {one['prompt_tokens']} prompt tokens, {one['hit_tokens']} cached there; class "
        f"{one['slo_class']}, targets {_ms(one['ttft_target_s'])} and {_ms(one['itl_target_s'])}",
        f"  {_ms(one['waited_s'])} old when decided; {one['waiting']} others waited",
    ]
    if one["session"]:
        lines.append(f"  session {one['session']}")
    if one["fetch"]:
        lines.append(f"  most of the prefix comes from {one['fetch']}")
    for name, due_s, why in one["passed_over"]:
        lines.append(f"    passed over {name}, due in {_ms(due_s)}: {why}")
    for stage in ("prefill", "decode"):
        for rank, (worker, score, terms) in enumerate(one[f"{stage}_options"]):
            named = ", ".join(f"{name} {_ms(value)}" for name, value in terms.items())
            mark = "*" if rank == 0 else " "
            lines.append(f"  {mark} {stage:8}{worker}  score {score:.6g}  ({named})")
    if one["others"] > 0:
        lines.append(f"    and {one['others']} other decode workers")
    lines.append(f"  {'':12}{'PREDICTED':>12}{'OBSERVED':>12}")
    seen = one["observed"]
    for label, name in (("TTFT", "ttft"), ("ITL", "itl"), ("exposed", "exposed")):
        observed = seen.get({"itl": "itl_p99_ms"}.get(name, f"{name}_ms"))
        shown = "-" if observed is None else f"{observed:.1f} ms"
        lines.append(f"  {label:12}{_ms(one[f'{name}_s']):>12}{shown:>12}")
    if "reason" in seen:
        lines.append(f"  ended: {seen['reason']} after {seen['tokens']} tokens")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def replay(
    log: Annotated[Path, typer.Argument(help="A router's log: see router.log_folder.")],
    policy: Annotated[str, typer.Option(help="The policy to compare with.")] = "min_ttft",
    output: Output = "text",
) -> None:
    """Run a router's log through another policy, with the very code that serves."""
    from ...router.policies import POLICIES
    from ...router.replay import LogError, read
    from ...router.replay import replay as run

    if output not in ("text", "json"):
        fail(f"-o {output}: expected text or json", 2)
    if policy not in POLICIES:
        fail(f"--policy {policy}: expected one of {', '.join(POLICIES)}", 2)
    try:
        with log.open("rb") as lines:
            found = run(read(lines), policy)
    except (OSError, LogError) as error:
        fail(f"cannot replay {log}: {error}")
    if output == "json":
        typer.echo(
            json.dumps(
                {
                    "requests": found.requests,
                    "decided": found.decided,
                    "equal": found.equal,
                    "policies": found.policies,
                },
                indent=2,
            )
        )
        return
    typer.echo(
        f"{found.requests} requests, {found.decided} decided by both, {found.equal:.1%} to the same"
        " workers; predictions:"
    )
    columns = sorted({name for table in found.policies.values() for name in table})
    typer.echo(f"{'POLICY':28}" + "".join(f"{name.upper():>14}" for name in columns))
    for name, table in found.policies.items():
        typer.echo(f"{name:28}" + "".join(f"{table.get(c, 0):>14g}" for c in columns))
