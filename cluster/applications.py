"""The Serve applications of a cluster: their names, and how a process finds the router of one.

The front application has gateways and Control. Each model has an application of its own, with its
router and its workers: Serve restarts a whole application when its arguments change, so a model can
come and go only if the others' applications stay as they are.

Serve itself is the register of the models: the arguments of a model's application are the
configuration by which the model is served.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from .config import ClusterConfig

FRONT_APPLICATION = "diptych"  #: With gateways and Control, for all models.
FRONT_BUILDER = "diptych.cluster.app:front_application"
MODEL_BUILDER = "diptych.cluster.app:model_application"
#: Stands for a model in the name of its application, where the configuration has `model:`.
ONLY_MODEL_SLUG = "model"
#: The Serve deployment of each pool.
POOL_DEPLOYMENTS = {"prefill": "PrefillWorker", "decode": "DecodeWorker"}
ROUTER_DEPLOYMENT = "Router"
#: A key of the router's `user_config`, which marks a model that leaves.
LEAVING = "leaving"


def model_application_name(slug: str) -> str:
    """Return the name of a model's application."""
    return f"{FRONT_APPLICATION}-{slug}"


@dataclass(frozen=True, slots=True)
class ModelApplication:
    """A model's application, as it was deployed."""

    name: str
    args: dict[str, Any]  #: The configuration by which the model is served, without the secret.
    #: True: no gateway takes requests for the model any more, and it is deleted soon. Equality leaves
    #: this out: where applications differ, `ModelWatch` takes the model away and adds it anew, which
    #: Control must not do when a model is only marked.
    leaving: bool = field(default=False, compare=False)

    def config(self, front: ClusterConfig) -> ClusterConfig:
        """Return the configuration of the model in a cluster that has the configuration `front`.

        Raises ValidationError.
        """
        return front.with_model(ClusterConfig.model_validate(self.args))


#: Returns the applications of all models there are now. Raises whatever Serve raises.
FindModels = Callable[[], Awaitable[list[ModelApplication]]]


def model_applications(details: dict[str, Any]) -> list[ModelApplication]:
    """Return the models' applications, by name, among the details of Serve's instance."""
    found = []
    for name, application in sorted(details["applications"].items()):
        deployed = application.get("deployed_app_config") or {}
        if deployed.get("import_path") == MODEL_BUILDER:
            leaving = any(
                (deployment.get("user_config") or {}).get(LEAVING, False)
                for deployment in deployed.get("deployments", [])
            )
            found.append(ModelApplication(name, deployed.get("args", {}), leaving))
    return found


def is_of_diptych(application: dict[str, Any]) -> bool:
    """Return whether a Serve application config is that of a front or of a model."""
    return application.get("import_path") in (FRONT_BUILDER, MODEL_BUILDER)


def application_names(details: dict[str, Any]) -> list[str]:
    """Return the names of Diptych's applications among the details of Serve's instance."""
    return [
        name
        for name, application in sorted(details["applications"].items())
        if is_of_diptych(application.get("deployed_app_config") or {})
    ]


async def find_models() -> list[ModelApplication]:
    """Ask Serve which models there are. Raises whatever Serve raises."""
    return model_applications(await serve_details())


async def serve_details() -> dict[str, Any]:
    """Return the details of Serve's instance, as the GET of Serve's REST API has them."""
    details: dict[str, Any] = await serve_controller().get_serve_instance_details.remote()
    return details


def serve_controller() -> Any:
    """Return the actor handle of Serve's controller in this Ray cluster.

    Raises RayServeException if Serve does not run.
    """
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None  # for the type checker: without Serve the call has raised
    return client._controller


def router_finder(application: str) -> Callable[[], Awaitable[str]]:
    """Return what finds the router of one application of Serve.

    It returns the "host:port" of the router that Serve has now, and raises whatever Serve raises.
    """

    async def find_router() -> str:
        from ray import serve

        router = serve.get_deployment_handle(ROUTER_DEPLOYMENT, application)
        address: str = await router.address.remote()
        return address

    return find_router
