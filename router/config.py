"""The router's settings: plain values, which `cluster.router_service` takes from the cluster's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..protos.targets import TtftTarget, parse_cached

#: A queued request is given up after so many times `background_wait_s`: it was let in because a
#: shorter wait was predicted, and the prediction was wrong by then.
GIVE_UP_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class SloClass:
    """A class of requests. A lower `priority` is served first."""

    priority: int = 0
    weight: float = 1.0  #: value of one request when not all can be served in time; no policy asks
    early_reject: bool = False  #: prefers an early 429 to an answer after its target
    #: target to the first token (`protos/targets.py`); "": the tenant's, else the configured one
    ttft: str = ""
    itl_s: float = 0.0  #: target between two tokens; 0: the tenant's, else the configured one

    def __post_init__(self) -> None:
        assert self.weight > 0, self


@dataclass(frozen=True, slots=True)
class TenantSlo:
    """The targets of one tenant's requests, where their class has none."""

    ttft: str = ""  #: to the first token; "": the configured target
    itl_s: float = 0.0  #: between two tokens; 0: the configured target


#: The classes by default, by the name that a request gives.
CLASSES = {
    "interactive": SloClass(),
    "sheddable": SloClass(early_reject=True),
    "batch": SloClass(priority=1),
}


#: The class of requests that name none, where the configuration has a class of this name.
DEFAULT_CLASS = "interactive"


class ClassTerms(Protocol):
    """What decides which class requests that name none have."""

    @property
    def priority(self) -> int: ...

    @property
    def early_reject(self) -> bool: ...


def ordered_classes(classes: Mapping[str, ClassTerms], default_class: str = "") -> list[str]:
    """Return the names of classes; the first is the class of requests that name none.

    The first is `default_class`, if it is set, else `DEFAULT_CLASS`. Where there is no such class
    it is one that refuses nothing early, of these the one that is served first, and of several such
    the first by name. The order of the mapping does not count: what carries a configuration to
    Kubernetes (Helm, KubeRay) sorts its keys.
    """
    wanted_class = default_class or DEFAULT_CLASS

    def place(name: str) -> tuple[bool, bool, int, str]:
        terms = classes[name]
        return name != wanted_class, terms.early_reject, terms.priority, name

    return sorted(classes, key=place)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Times in seconds, room in blocks, lengths in tokens.

    A request of an unknown class counts as one that names none (`ordered_classes`).
    """

    #: Whether a prefill worker computes prompts: always; auto: unless the decode worker had better;
    #: never: decode workers compute all.
    disaggregate: str = "always"
    queue_max: int = 1024  #: requests that wait for a worker
    #: how long a request waits for a worker where none is up, or until its TTFT target if later
    queue_ttl_s: float = 30.0
    #: how long a request that cannot be in time may wait, by prediction: else it is refused at once
    background_wait_s: float = 120.0
    growth_tokens: int = 256  #: what decode reserves behind the prompt, at most
    #: after its first event, a router does not know for so long which workers are missing
    settle_s: float = 3.0
    prior_tokens_per_s: float = 2000.0  #: prefill rate of a worker that says nothing of its speed
    policy: str = "diptych"  #: a key of `policies.POLICIES`
    #: Workers compute the prompts that an early policy places by deadline, as they do under our own
    #: policy, instead of in the order of their arrival.
    deadline_order: bool = False
    ttft_s: float = 2.0  #: target to the first token, of a request that names none; without `ttft`
    itl_s: float = 0.05  #: target between two tokens, of a request that names none
    classes: Mapping[str, SloClass] = field(default_factory=lambda: dict(CLASSES))
    #: a prefix is moved from another worker where that is faster than computing
    fetch: bool = True
    #: to a gateway and back: a worker gets its next prompt this long before it is idle
    rtt_s: float = 0.002
    seed: int = 0  #: of ties and samples
    index_per_worker: int = 65536  #: entries of one worker in the index of prefixes, at most
    predicted_ttl_s: float = 120.0  #: an entry that was predicted and never reported ends then
    decisions: int = 4096  #: decision records kept; 0: none are made
    #: Gateways hold an answer's first token until the second can follow in time (`first_token.py`).
    #: The router itself does not ask: a replay of its log in the simulator does.
    pace_first_token: bool = True
    #: target to the first token, as in `max(1s, 3x)` (`protos/targets.py`); "": `ttft_s`
    ttft: str = ""
    tenants: Mapping[str, TenantSlo] = field(default_factory=dict)  #: by the tenant's name
    default_class: str = ""  #: of requests that name none; "": as `ordered_classes` chooses

    def __post_init__(self) -> None:
        assert self.disaggregate in ("always", "auto", "never"), self.disaggregate
        assert self.queue_max >= 0 and self.queue_ttl_s > 0 and self.classes, self
        assert self.background_wait_s > 0, self
        assert self.ttft_s > 0 and self.itl_s > 0 and self.prior_tokens_per_s > 0, self

    @property
    def ttft_target(self) -> TtftTarget:
        """The target to the first token, of a request that names none."""
        return parse_cached(self.ttft) if self.ttft else TtftTarget.flat(self.ttft_s)
