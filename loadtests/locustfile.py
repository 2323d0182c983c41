"""The Locust users, for `locust -f loadtests/locustfile.py --host URL` and `diptych loadtest`.

Locust loads this file in every process, finds the user classes in it, and runs their tasks. There
is one class: what a user does is decided by `--load`. An open loop (constant, poisson, burst, ramp,
trace) needs one user a process, which offers every arrival; chat has as many users as it is given.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from diptych.loadtests.plan import LoadPlan
from diptych.loadtests.swarm import Swarm
from locust import User, constant, events, task

SWARMS: list[Swarm] = []  #: the one of this process


@events.init_command_line_parser.add_listener
def _add_options(parser: Any) -> None:
    group = parser.add_argument_group("load", "What is offered; see loadtests/README.md.")
    for option in fields(LoadPlan):
        if option.name == "users":  # Locust's own -u
            continue
        group.add_argument(
            f"--{option.name}",
            dest=f"plan_{option.name}",
            type=type(option.default),
            default=option.default,
            help=option.metadata["help"],
        )
    # Not for people: the master passes what it found of the endpoint, and the run's name, to the
    # workers by these.
    for name in ("plan_facts", "plan_run"):
        parser.add_argument(f"--{name.replace('_', '-')}", default="", include_in_web_ui=False)


@events.init.add_listener
def _make_swarm(environment: Any, **_: Any) -> None:
    SWARMS.append(Swarm(environment))


class LoadUser(User):
    """A user as Locust runs it; `Swarm.act` says what a user does."""

    wait_time = constant(0)

    @task
    def act(self) -> None:
        SWARMS[0].act(self)
