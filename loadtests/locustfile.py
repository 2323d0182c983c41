"""The Locust users, for `locust -f loadtests/locustfile.py --host URL` and `diptych loadtest`.

One class: what a user does is decided by `--load`. An open loop (constant, poisson, burst, ramp,
trace) needs one user a process, which offers every arrival; chat has as many users as wanted.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from diptych.loadtests.plan import Plan
from diptych.loadtests.swarm import Swarm
from locust import User, constant, events, task

SWARM: list[Swarm] = []  #: of this process


@events.init_command_line_parser.add_listener
def _options(parser: Any) -> None:
    group = parser.add_argument_group("load", "What is offered; see loadtests/README.md.")
    for one in fields(Plan):
        if one.name != "users":  # Locust's own -u
            group.add_argument(
                f"--{one.name}",
                dest=f"plan_{one.name}",
                type=type(one.default),
                default=one.default,
                help=one.metadata["help"],
            )
    for name in ("plan_facts", "plan_run"):  # from master to workers
        parser.add_argument(f"--{name.replace('_', '-')}", default="", include_in_web_ui=False)


@events.init.add_listener
def _init(environment: Any, **_: Any) -> None:
    SWARM.append(Swarm(environment))


class Client(User):
    """See `Swarm.act`."""

    wait_time = constant(0)

    @task
    def act(self) -> None:
        SWARM[0].act(self)
