"""Which targets each request has: its own, its class's, its tenant's, or the configured ones.

    headers of the request  >  its class (`SloClass`)  >  its tenant (`TenantSlo`)  >  the default

A class says more of a request than a tenant: it is chosen for each request. The TTFT target (until
the first token) is an expression of `protos/targets.py`. What it comes to is computed once, when
the request arrives; the gateway repeats the seconds with each further attempt.
"""

from __future__ import annotations

from ..protos.frames import PlaceAttempt, RequestOutcome
from ..protos.targets import TargetError, TtftTarget, parse_cached
from .config import RouterConfig, ordered_classes


class RequestTargets:
    """The targets of a router's configuration, by class and tenant."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises TargetError if a TTFT target in the configuration cannot be parsed."""
        self._ttft_target = config.ttft_target
        self._itl_s = config.itl_s
        self._ttft_by_class = {
            name: parse_cached(slo_class.ttft)
            for name, slo_class in config.classes.items()
            if slo_class.ttft
        }
        self._ttft_by_tenant = {
            name: parse_cached(tenant.ttft)
            for name, tenant in config.tenants.items()
            if tenant.ttft
        }
        self._itl_s_by_class = {
            name: slo_class.itl_s for name, slo_class in config.classes.items() if slo_class.itl_s
        }
        self._itl_s_by_tenant = {
            name: tenant.itl_s for name, tenant in config.tenants.items() if tenant.itl_s
        }
        self._class_names = config.classes.keys()
        self._default_class = ordered_classes(config.classes, config.default_class)[0]

    def ttft_target(self, request: PlaceAttempt | RequestOutcome) -> TtftTarget:
        """Return the target that the configuration has for a request of this class and tenant."""
        slo_class = self.known_class(request.slo_class)
        target = self._ttft_by_class.get(slo_class)
        if target is None:
            target = self._ttft_by_tenant.get(request.tenant, self._ttft_target)
        return target

    def asked_ttft_target(self, place: PlaceAttempt) -> TtftTarget:
        """Return the target that the request itself names, or else that of `ttft_target`.

        A text that cannot be parsed counts as no target: gateways refuse such texts, so it comes
        only from a gateway of a newer version.
        """
        if place.ttft:
            try:
                return parse_cached(place.ttft)
            except TargetError:
                pass
        return self.ttft_target(place)

    def itl_s(self, request: PlaceAttempt | RequestOutcome) -> float:
        """Return the configured target between two tokens, in seconds."""
        slo_class = self.known_class(request.slo_class)
        itl_s = self._itl_s_by_class.get(slo_class)
        if itl_s is None:
            itl_s = self._itl_s_by_tenant.get(request.tenant, self._itl_s)
        return itl_s

    def known_class(self, name: str) -> str:
        """Return the name of the class that a request counts as: an unknown one as the default."""
        return name if name in self._class_names else self._default_class
