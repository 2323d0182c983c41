"""The configuration of a cluster: one typed tree, loaded from one YAML file and single values.

The tree is checked as a whole when it is loaded, so that settings which do not work together are
refused before a process starts. The shells of the processes read the tree; each pure core gets a
small dataclass of its own that is made from it (`router_config`, `planner_config`,
`engine_config`).

A field's unit is in its name (`_ms`, `_s`, `_mib`), and its dotted path is its key: `slo.itl_ms`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from ..engine.options import (
    BLOCK_TOKENS,
    DEFAULT_KV_BYTES,
    BlockTokens,
    ComputeSettings,
    Count,
    Dtype,
    EngineOptions,
    SchedulerSettings,
)
from ..protos.targets import TtftTarget, parse_cached
from .model_entries import MODEL_SECTIONS, complete_entries, find_repeated, slug_of

Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _checked_target(text: str) -> str:
    """Return the text of a TTFT target as it is printed everywhere. Raises ValueError."""
    return str(TtftTarget.parse(text))


def _checked_origin(text: str) -> str:
    """Return an origin as browsers send it. Raises ValueError."""
    if text != text.lower():
        raise ValueError(f"browsers send origins in lower case: {text.lower()}")
    return text


#: A TTFT target such as `2s`, `max(1s, 3x)` or `500ms + 300ms/1k` (`protos/targets.py`).
TargetText = Annotated[str, AfterValidator(_checked_target)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FormatName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,40}$")]
ModelName = Annotated[str, Field(min_length=1, max_length=200)]
#: A file that protects something. An empty name, as of a variable that is not set, would be taken
#: for no file here and for a file there, so it is refused.
FileName = Annotated[str, Field(min_length=1)]
#: `*`; a scheme and a host with an optional port and without a path, as browsers and apps send it
#: (`https://ui.example`, `tauri://localhost`); or `null`, which pages without an origin send.
Origin = Annotated[
    str,
    Field(pattern=r"^(\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/\s*]+)$"),
    AfterValidator(_checked_origin),
]
#: `*`, a host's name, or `*.` and a domain.
HostName = Annotated[str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)$")]
#: The share of the ITL target (the time between two tokens of an answer) that an engine's step may
#: take by default; the rest is for the token's way to the client.
STEP_SHARE = 0.9
DEFAULT_TTFT_S = 2.0  #: the TTFT target where the configuration has none
#: Environment variable with the cluster's secret, for where no file may hold the secret.
SECRET = "DIPTYCH_SECRET"
#: Hosts that only this machine's programs reach.
LOOPBACK = ("127.0.0.1", "::1", "localhost")


#: Settings of a pool's engine that vLLM does not have, and what to do instead.
VLLM_LACKS = {
    "draft_tokens": "vLLM refuses speculation beside Diptych's sampling",
    "weights": "set engine.vllm.quantization",
    "kv_dtype": "its KV has the type of model.dtype",
    "exact": "its results depend on the batch",
    "attention": "it has kernels of its own",
}


def host_and_port(host: str, port: int) -> str:
    """Return `host:port` as URLs have it, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ConfigError(Exception):
    """The configuration is wrong; the message says where and what to do."""


class ConfigSection(BaseModel):
    """The base of every section: frozen, and it refuses keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(ConfigSection):
    """The model that the cluster serves, and how its texts are written."""

    #: A folder or a Hugging Face id; None: the bundled model.
    path: str | None = None
    #: The name in the API; None: the folder's name, and `demo` for the bundled model.
    name: str | None = None
    #: Further names: the API lists them, takes them, and answers under `name`.
    served_names: tuple[ModelName, ...] = ()
    #: LoRA adapters by name, each a folder as PEFT saves it or a Hugging Face id. A request names
    #: an adapter in place of the model. With `engine.kind: vllm` only.
    adapters: dict[ModelName, str] = {}
    #: A file with the chat template (Jinja), on each gateway's machine; None: the checkpoint's.
    chat_template: str | None = None
    #: How the model writes tool calls, and how it marks its reasoning: `auto` (what the chat
    #: template shows), `none`, or a name of docs/formats.md; vLLM's names are taken, too.
    tool_format: FormatName = "auto"
    reasoning_format: FormatName = "auto"
    #: The type of the weights and of what is computed.
    dtype: Dtype = EngineOptions.dtype
    #: Tokens of a prompt and its answer together; None: what the model allows, or what a pool of KV
    #: blocks holds if that is less.
    max_model_len: Count | None = EngineOptions.max_model_len
    #: Tokens of a KV block; flash-attn 2 supports 256 only.
    block_tokens: BlockTokens = BLOCK_TOKENS

    @property
    def further_names(self) -> tuple[str, ...]:
        """The names beside `name` that a request may have: the model's own, and its adapters'."""
        return (*self.served_names, *self.adapters)


# A section is frozen by its `model_config`, which mypy does not read.
class EngineSettings(ConfigSection, SchedulerSettings, ComputeSettings):  # type: ignore[misc]
    """The engines of a pool.

    Each field of the two dataclasses of `engine/options.py` is a setting here, too.
    """

    #: MiB of the KV pool of each process; a replica has `tensor_parallel` processes. None: 256, or
    #: on a GPU what `gpu_memory_share` leaves beside the weights and the largest step.
    kv_mib: Count | None = None
    #: How long a step that decodes answers may take. It bounds how much of a prompt is computed in
    #: such a step. So that prompts do not starve, one block is computed in every eighth step in any
    #: case. None: `STEP_SHARE` of slo.itl_ms. With `engine.kind: vllm` it is refused: vLLM's steps
    #: have no limit of time.
    itl_budget_ms: Positive | None = None

    @property
    def kv_bytes(self) -> int | None:
        """Bytes of each process's KV pool; None: of a GPU, which sizes it at start."""
        if self.kv_mib is not None:
            return self.kv_mib << 20
        return None if self.device == "cuda" else DEFAULT_KV_BYTES


class EngineKindSettings(ConfigSection):
    """Which engine computes the model, in both pools."""

    #: `diptych`: our own. `vllm`: vLLM, inside of the workers' processes (engine/vllm/README.md).
    kind: Literal["diptych", "vllm"] = "diptych"
    #: The python in whose environment the workers run, on each of their machines; None: the one
    #: that serves. vLLM has pins of its own: `diptych install-engine vllm` makes an environment.
    python: str | None = None
    #: With `kind: vllm`: arguments of vLLM by its own names, such as `quantization`. Those that
    #: Diptych sets itself are refused.
    vllm: dict[str, Any] = Field(default_factory=dict)

    def with_python(self, python: str | None) -> Self:
        """Return these settings with `python`, if vLLM computes and no python is named."""
        if self.kind != "vllm" or self.python is not None:
            return self
        return self.model_copy(update={"python": python})


class PoolConfig(ConfigSection):
    """One of the two deployments of workers. A replica is one worker."""

    #: Replicas at the start; `diptych scale` and the planner change their number.
    replicas: Annotated[int, Field(ge=0)] = 1
    #: The bounds of `diptych scale` and of the planner.
    min_replicas: Count = 1
    max_replicas: Count = 64
    #: Processes of a replica that share the model, each with its part of the weights and of the KV.
    tensor_parallel: Count = EngineOptions.tensor_parallel
    engine: EngineSettings = EngineSettings()

    @property
    def replicas_minimum(self) -> int:
        """How many replicas the pool keeps at least.

        That is `min_replicas`, or `replicas` where the pool was started with fewer: otherwise
        nobody could order the size that the pool has.
        """
        return min(self.min_replicas, self.replicas)

    @property
    def replicas_maximum(self) -> int:
        """How many replicas the pool may have: `max_replicas`, or `replicas` if that is more.

        The reason is that of `replicas_minimum`.
        """
        return max(self.max_replicas, self.replicas)


class PoolsConfig(ConfigSection):
    """The pools by name. Workers of `prefill` compute prompts, those of `decode` the answers."""

    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()

    def of(self, pool: str) -> PoolConfig:
        """Return the settings of the pool of that name, `prefill` or `decode`."""
        return {"prefill": self.prefill, "decode": self.decode}[pool]


class ClassSettings(ConfigSection):
    """A class of requests, which a client names in the request."""

    #: The class with the lowest number is served first.
    priority: Annotated[int, Field(ge=0)] = 0
    #: What one request is worth, beside others, when not all of them can be served in time.
    weight: Positive = 1.0
    #: True: a request that would miss its target is refused early, with status 429.
    early_reject: bool = False
    #: The TTFT target of the class's requests, as `slo.ttft`; None: that of their tenant, else of
    #: `slo`.
    ttft: TargetText | None = None
    #: Their target between two tokens, as `slo.itl_ms`; None as for `ttft`.
    itl_ms: Positive | None = None


class RouterSettings(ConfigSection):
    """How the router places requests on workers, and how long they may wait for that."""

    #: Whether another worker than the decode worker computes a prompt. With `auto` the router
    #: chooses for each request, by the times that it predicts.
    disaggregate: Literal["always", "auto", "never"] = "always"
    #: Requests that may wait for a worker; further ones are refused.
    queue_max: Count = 1024
    #: How long a request waits for a worker where none is up, or until its TTFT target (the time to
    #: its first token) if that is longer.
    queue_ttl_s: Positive = 30.0
    #: How long a request that cannot meet its targets may wait, by prediction. One that would wait
    #: for longer is refused at once.
    background_wait_s: Positive = 120.0
    #: How workers are chosen: a key of `diptych.router.policies.POLICIES`.
    policy: str = "diptych"
    #: Classes of requests by name; empty: `interactive`, `sheddable` and `batch` of
    #: diptych.router.config. A request that names none has its API key's class, else the default.
    classes: dict[str, ClassSettings] = {}
    #: The class by default; None: `interactive`, else the one with the lowest `priority` (of several
    #: the first by name) of those without `early_reject`, if there are such.
    default_class: str | None = None
    #: On the router's machine: where its events are written for `diptych replay`; None: nowhere.
    log_folder: str | None = None
    #: MiB of events that are kept, the newest ones.
    log_mib: Count = 32

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, name: str) -> str:
        from ..router.policies import POLICIES  # loads numpy, which not every command needs

        if name not in POLICIES:
            raise ValueError(f"expected one of {', '.join(POLICIES)}")
        return name

    @model_validator(mode="after")
    def _check_default_class(self) -> Self:
        if self.default_class is not None:
            from ..router.config import CLASSES

            names = self.classes or CLASSES
            if self.default_class not in names:
                raise ValueError(f"default_class is none of the classes {', '.join(names)}")
        return self


class FaultSettings(ConfigSection):
    """Damage on purpose, for tests of a live cluster."""

    #: How many of the first writes of each prefill worker are damaged.
    corrupt_writes: Annotated[int, Field(ge=0)] = 0


class TierSettings(ConfigSection):
    """Where a worker keeps KV blocks that its pool evicts. Sizes are of each worker; 0: none."""

    memory_mib: Annotated[int, Field(ge=0)] = 0
    #: Should be several times `memory_mib`, else the disk holds little that memory does not.
    disk_mib: Annotated[int, Field(ge=0)] = 0
    #: On each machine; each worker makes a folder of its own in it.
    folder: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.disk_mib and not (self.folder and self.memory_mib):
            raise ValueError("a disk tier needs kv_tiers.folder and kv_tiers.memory_mib")
        # A relative folder would be one of wherever each worker happens to run.
        if self.folder and not self.folder.startswith(("/", "~")):
            raise ValueError(f"kv_tiers.folder must begin with / or ~, and is {self.folder!r}")
        return self


class TransferSettings(ConfigSection):
    """How KV moves between workers."""

    #: `auto` is NIXL where it can run, else TCP; `shm` is memory that workers of one machine share.
    #: It is one transport for all pairs of workers.
    transport: Literal["auto", "nixl", "shm", "tcp"] = "auto"
    #: From a worker's offer of blocks until KV comes, and from each piece of it to the next; a slower
    #: transfer fails.
    timeout_s: Positive = 60.0
    faults: FaultSettings = FaultSettings()


class TenantTargets(ConfigSection):
    """Targets of one tenant's requests, in place of those of `slo`."""

    #: As `slo.ttft`; None: that one.
    ttft: TargetText | None = None
    #: As `slo.itl_ms`; None: that one.
    itl_ms: Positive | None = None


class SloConfig(ConfigSection):
    """Targets that a request must meet to count as goodput. The defaults fit a laptop.

    A request's own headers come first, then its class (`router.classes`), then its tenant.
    """

    #: From a request's arrival to its first token: `2s`, `1500ms`; `3x`, of the request's isolated
    #: prefill; `500ms + 300ms/1k`, by the 1,000 prompt tokens; or the largest of such parts,
    #: `max(1s, 3x)`. None: `ttft_ms`, or 2s without it.
    ttft: TargetText | None = None
    #: The same as a plain time: `1500` is `ttft: 1500ms`.
    ttft_ms: Positive | None = None
    #: Between two tokens of an answer.
    itl_ms: Positive = 200.0
    #: A gateway holds an answer's first token until the second can follow within its target, as far
    #: as the first one's target allows (`router/first_token.py`).
    pace_first_token: bool = True
    #: Targets by tenant, as `diptych keys` names the tenant of a key.
    tenants: dict[str, TenantTargets] = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ttft is not None and self.ttft_ms is not None:
            raise ValueError("ttft and ttft_ms are both set, and say the same thing: keep one")
        if self.ttft_ms is not None:
            _checked_target(str(self.ttft_target))  # the router reads what is printed
        return self

    @property
    def ttft_target(self) -> TtftTarget:
        """The target for the time to the first token, of requests that have no other one."""
        if self.ttft is not None:
            return parse_cached(self.ttft)
        if self.ttft_ms is not None:
            return TtftTarget.flat(self.ttft_ms / 1e3)
        return TtftTarget.flat(DEFAULT_TTFT_S)

    def summary(self) -> dict[str, Any]:
        """Return the targets for people and programs: as text, and its fixed part in ms."""
        target = self.ttft_target
        return {
            "ttft": str(target),
            "ttft_ms": target.least_s * 1e3,
            "itl_ms": self.itl_ms,
            "tenants": {name: tenant.model_dump() for name, tenant in self.tenants.items()},
        }


class ModelEntry(ConfigSection):
    """One of several models. What its sections leave out is as in those of the top level."""

    model: ModelSettings = ModelSettings()
    engine: EngineKindSettings = EngineKindSettings()
    pools: PoolsConfig = PoolsConfig()
    router: RouterSettings = RouterSettings()
    kv_transfer: TransferSettings = TransferSettings()
    kv_tiers: TierSettings = TierSettings()
    slo: SloConfig = SloConfig()


#: Each gateway keeps a connection to every other one.
GATEWAYS_MAX = 64
GatewayReplicas = Annotated[int, Field(ge=1, le=GATEWAYS_MAX)]


class GatewaySettings(ConfigSection):
    """Where clients talk to the cluster, who may, and what a gateway keeps for them."""

    #: The address to listen on; the default admits this machine's programs only.
    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 9000
    #: How many gateways there are. Those on one machine share its ports, and the kernel gives each
    #: connection to one of them. One runs on the node of Ray's head; several run on any nodes, so
    #: `host` must be an address of each of these, as `0.0.0.0` is.
    replicas: GatewayReplicas = 1
    #: Placements of one request, the first included. The last one does without a transfer: one
    #: worker computes the prompt and the answer.
    max_attempts: Count = 4
    #: Requests that a gateway serves at once; further ones are refused.
    max_streams: Count = 1024
    #: On each gateway's machine: the clients' keys; `diptych keys` writes the file. Without this
    #: file and `api_key_hashes` no client needs a key. All gateways share a key's limits: together
    #: they exceed one by less than `replicas`.
    api_keys_file: FileName | None = None
    #: SHA-256, in hex, of more keys: without limits, of the tenant `default`
    #: (`diptych serve --api-key`).
    api_key_hashes: tuple[Sha256, ...] = ()
    #: True: a field that the gateway has nothing to set by is refused, not ignored
    #: (docs/http.md).
    strict: bool = False
    #: Whether each gateway asks every model a few questions of its own before it says that it is
    #: ready, so that the first client waits no longer than later ones.
    rehearsal: bool = True
    #: Origins of web pages that may ask, and read answers (CORS); `*`: all, where keys are needed.
    #: Cookies never count. None: all where keys are needed; else this machine's own pages, which
    #: may always (docs/http.md).
    origins: tuple[Origin, ...] | None = None
    #: Where no key is needed: names by which clients call the gateway, beside addresses and
    #: `localhost`; `*.example.com` is all of them in a domain, `*` any name (docs/http.md).
    hosts: tuple[HostName, ...] = ()
    #: For a client to send its request's body.
    body_timeout_s: Positive = 30.0
    #: For this long after a client's connection broke the client may come back for its answer.
    resume_s: Annotated[float, Field(ge=0)] = 60.0
    #: What may wait of one stream for a client that lags, in MiB; then the stream is cut off, and the
    #: client may come back for the rest (`resume_s`).
    unread_mib: Count = 1
    #: What all answers of a gateway may take of its memory, in MiB: tokens of those that run, what
    #: clients have not read, and what is kept for clients that come back, which has a quarter of it
    #: for each model. Above it these are given up; if that is not enough, new requests are refused.
    answers_mib: Count = 256
    #: How many responses of `/v1/responses` a gateway keeps for `previous_response_id`; 0: none.
    stored_responses: Annotated[int, Field(ge=0)] = 4096
    #: What the kept responses may take of the gateway's memory, in MiB.
    stored_responses_mib: Count = 64
    #: For this long after its last use a response is kept: six hours.
    stored_responses_s: Positive = 21600.0
    #: PEM files on each gateway's machine: HTTPS, and TLS for gRPC.
    tls_cert: FileName | None = None
    tls_key: FileName | None = None
    #: Who listens: each gateway on sockets of its own, or Serve's proxies on every node that has a
    #: replica.
    listen: Literal["gateway", "serve"] = "gateway"

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_tls_files(self.tls_cert, self.tls_key)
        if self.unread_mib > self.answers_mib:
            raise ValueError(
                f"unread_mib={self.unread_mib} for one stream exceeds answers_mib="
                f"{self.answers_mib} for all of them"
            )
        if self.tls_cert and self.listen == "serve":
            raise ValueError("Serve's gRPC proxies know no TLS: no tls_cert, or listen: gateway")
        for origin in ("*", "null"):  # any page can be without an origin, in a frame
            if origin in (self.origins or ()) and not self.asks_for_keys:
                raise ValueError(
                    f"origins: {origin} without keys lets every web page use the models: name the "
                    "origins, or set api_keys_file"
                )
        return self

    @model_validator(mode="before")
    @classmethod
    def _name_the_new_setting(cls, values: Any) -> Any:
        """Refuse the old name of `origins` with a sentence that says the new one."""
        if isinstance(values, dict) and "cors_origins" in values:
            raise ValueError("cors_origins is called origins now")
        return values

    @property
    def asks_for_keys(self) -> bool:
        """Whether clients need a key."""
        return self.api_keys_file is not None or bool(self.api_key_hashes)

    @property
    def exposed(self) -> bool:
        """Whether anybody who reaches the machine can use the models."""
        return not self.asks_for_keys and self.host not in LOOPBACK


class ScalingSettings(ConfigSection):
    """The planner (cluster/planner), which changes roles and sizes of pools while load changes."""

    #: `propose` records what the planner would order; `act` orders it.
    mode: Literal["off", "propose", "act"] = "off"
    #: Between two looks of the planner at the fleet.
    interval_s: Positive = 5.0
    #: False: the planner changes roles only.
    replicas: bool = True
    #: GPUs of all replicas together; None: no limit.
    gpus: Count | None = None
    #: At least this time lies between two flips (changes of a worker's role).
    flip_dwell_s: Positive = 60.0
    #: For this long a smaller pool must have been enough before the pool shrinks.
    down_dwell_s: Positive = 180.0


class RaySettings(ConfigSection):
    """Who may talk to Ray's own processes, which run whatever code they are sent; how they start."""

    #: `token`: Ray's processes refuse callers without a token. `disabled`: anybody who reaches one
    #: of Ray's ports runs code as this user.
    auth: Literal["token", "disabled"] = "token"
    #: `diptych serve` forks Ray's processes from one that has imported everything already, which
    #: halves the time until the cluster serves. false: each imports for itself. A Ray that others
    #: started, as on Kubernetes, does not have it.
    fork_server: bool = True


class ControlSettings(ConfigSection):
    """Where operators talk to the cluster. Its APIs change roles and sizes of pools."""

    host: str = "127.0.0.1"
    port: Port = 8001
    grpc_port: Port = 9001
    #: On the machine of Ray's head; the file's content is the bearer token that callers must send.
    #: None: this machine's programs may call without one, so `host` must be a loopback address.
    key_file: FileName | None = None
    #: PEM files on the head's machine: HTTPS, and TLS for gRPC.
    tls_cert: FileName | None = None
    tls_key: FileName | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_tls_files(self.tls_cert, self.tls_key)
        if self.key_file is None and self.host not in LOOPBACK:
            raise ValueError(f"{self.host} is no loopback address: set control.key_file")
        return self


def _check_tls_files(certificate: str | None, key: str | None) -> None:
    """Raise ValueError if only one of the two files is named."""
    if (certificate is None) != (key is None):
        raise ValueError("tls_cert and tls_key go together")


class ObservabilitySettings(ConfigSection):
    """What the processes tell of themselves."""

    #: Each process's exporter takes the first free port from here on; 0: any port.
    metrics_port: Annotated[int, Field(ge=0, le=65000)] = 0
    #: Where each process's exporter listens. None: the address that Ray knows of its node, which is
    #: 127.0.0.1 with `diptych serve` and no `--ray-address`.
    metrics_host: str | None = None
    #: Other systems' names under which the same metrics are exported too.
    metrics_compat: tuple[Literal["vllm"], ...] = ()
    #: OTLP over HTTP, as in http://collector:4318; None: nothing is traced.
    otlp_endpoint: str | None = None
    #: Of requests without a traceparent, the share that is traced.
    trace_sample: Annotated[float, Field(ge=0, le=1)] = 0.01
    #: `text` is warnings and worse, for people; `json` also has information, one object a line.
    log: Literal["text", "json"] = "text"

    @field_validator("metrics_host")
    @classmethod
    def _is_reachable(cls, host: str | None) -> str | None:
        """Refuse an address that means all interfaces: it names no place that others can reach."""
        if host in ("", "0.0.0.0", "::"):
            raise ValueError("Prometheus is told to go there: give one address of this machine")
        return host


class ClusterConfig(ConfigSection):
    """The whole tree: the sections of the YAML file, and two settings beside them.

    With `models` the sections that each model has of its own (`ModelEntry`) are defaults here, and
    `of_model` returns the tree that one of the models is served by.
    """

    model: ModelSettings = ModelSettings()
    #: Several models by name, in place of `model`. An entry is a path, or has sections of its own.
    models: dict[ModelName, ModelEntry] = {}
    engine: EngineKindSettings = EngineKindSettings()
    pools: PoolsConfig = PoolsConfig()
    router: RouterSettings = RouterSettings()
    kv_transfer: TransferSettings = TransferSettings()
    kv_tiers: TierSettings = TierSettings()
    slo: SloConfig = SloConfig()
    gateway: GatewaySettings = GatewaySettings()
    control: ControlSettings = ControlSettings()
    ray: RaySettings = RaySettings()
    scaling: ScalingSettings = ScalingSettings()
    observability: ObservabilitySettings = ObservabilitySettings()
    #: A process of the cluster that sent its peer nothing for this long counts as dead. Idle
    #: connections carry heartbeats.
    silence_s: Annotated[float, Field(ge=1)] = 3.0
    #: What the cluster's processes prove to each other that they know. It is random unless it is
    #: given (in a Ray of others: drawn once, and kept by it), and is shown nowhere (`repr`, error
    #: messages).
    secret: str = Field(default_factory=lambda: secrets.token_hex(16), min_length=1, repr=False)

    @model_validator(mode="before")
    @classmethod
    def _complete_entries(cls, tree: Any) -> Any:
        return complete_entries(tree) if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.models:
            self._check_model()
            return self
        self._check_names()
        for name in self.models:
            try:
                self.of_model(name)._check_model()
            except ValueError as error:
                raise ValueError(f"models.{name}: {error}") from None
        return self

    def of_model(self, name: str) -> Self:
        """Return the tree by which one entry of `models` is served: that of a single model.

        Folders that the models would share get one more folder, with the model's slug. Raises
        KeyError.
        """
        entry = self.models[name]
        slug = slug_of(name)
        tiers = entry.kv_tiers
        if tiers.folder is not None:
            tiers = tiers.model_copy(update={"folder": str(Path(tiers.folder) / slug)})
        router = entry.router
        if router.log_folder is not None:
            log_folder = str(Path(router.log_folder) / slug)
            router = router.model_copy(update={"log_folder": log_folder})
        sections = {
            "models": {},
            "model": entry.model.model_copy(update={"name": name}),
            "engine": entry.engine,
            "pools": entry.pools,
            "router": router,
            "kv_transfer": entry.kv_transfer,
            "kv_tiers": tiers,
            "slo": entry.slo,
        }
        return self.model_copy(update=sections)

    def named(self, name: str) -> Self:
        """Return this tree of one model with the model's name."""
        return self.model_copy(update={"model": self.model.model_copy(update={"name": name})})

    def with_model(self, model: ClusterConfig) -> Self:
        """Return this tree with the sections of `model`'s tree that are a model's own."""
        sections = {name: getattr(model, name) for name in MODEL_SECTIONS}
        return self.model_copy(update={"models": {}, **sections})

    def with_replicas(self, counts: Mapping[str, int]) -> Self:
        """Return this tree with these counts, by pool, as the pools' `replicas`.

        On Kubernetes the Helm values have the counts, and the tree has none.
        """
        pools = {
            pool: self.pools.of(pool).model_copy(update={"replicas": count})
            for pool, count in counts.items()
        }
        return self.model_copy(update={"pools": self.pools.model_copy(update=pools)})

    def _check_names(self) -> None:
        """Raise ValueError for names by which two models, or none, would be meant."""
        if self.model != ModelSettings():
            raise ValueError("model and models are both set: make model an entry of models")
        for name, entry in self.models.items():
            if entry.model.name not in (None, name):
                raise ValueError(f"models.{name}.model.name: the entry's own name is the model's")
            if entry.router.classes != self.router.classes:
                raise ValueError(
                    f"models.{name}.router.classes: classes are the whole cluster's; set them in "
                    "router.classes"
                )
            if not slug_of(name):
                raise ValueError(f"models: {name!r} has neither a letter nor a digit")
        slug = find_repeated(slug_of(name) for name in self.models)
        if slug is not None:
            raise ValueError(f"models: two names become {slug!r} where only a-z, 0-9 and - may be")
        repeated_name = find_repeated(
            model_name
            for name, entry in self.models.items()
            for model_name in (name, *entry.model.further_names)
        )
        if repeated_name is not None:
            raise ValueError(f"models: the name {repeated_name!r} is given twice")

    def _check_model(self) -> None:
        """Raise ValueError for settings of one model that do not work together."""
        self._check_replicas()
        name_twice = find_repeated(self.model.further_names)
        if name_twice is not None:
            raise ValueError(
                f"model.served_names, model.adapters: the name {name_twice!r} is given twice"
            )
        for name in ("prefill", "decode"):
            self._check_pool(name, self.pools.of(name))
        ranks = max(self.pools.prefill.tensor_parallel, self.pools.decode.tensor_parallel)
        if self.kv_tiers.memory_mib and ranks > 1:
            raise ValueError("kv_tiers work for pools with tensor_parallel 1 only")
        if "cuda" in (self.pools.prefill.engine.device, self.pools.decode.engine.device):
            self._check_gpu()
        if self.engine.kind == "vllm":
            self._check_vllm(ranks)
            return
        if self.engine.vllm:
            raise ValueError("engine.vllm is set, and engine.kind is diptych: set it to vllm")
        if self.model.adapters:
            raise ValueError(
                "model.adapters is set, and Diptych's own engine computes no adapters: set "
                "engine.kind to vllm, or merge the adapter into its model's weights"
            )

    @property
    def lacks_engine_python(self) -> bool:
        """Whether vLLM computes a model and no python is named whose environment has vLLM."""
        engines = [entry.engine for entry in self.models.values()] or [self.engine]
        return any(engine.kind == "vllm" and engine.python is None for engine in engines)

    def with_engine_python(self, python: str | None) -> Self:
        """Return this configuration with vLLM's workers in the environment of another python.

        Models whose python is named keep theirs.
        """
        engine = self.engine.model_copy(update={"python": python})
        models = {
            name: entry.model_copy(update={"engine": entry.engine.with_python(python)})
            for name, entry in self.models.items()
        }
        return self.model_copy(update={"engine": engine, "models": models})

    def _check_vllm(self, ranks: int) -> None:
        """Raise ValueError for what does not work with vLLM as the engine."""
        from ..engine.vllm.arguments import find_refusal

        refusal = find_refusal(self.engine.vllm)
        if refusal is not None:
            raise ValueError(refusal)
        for name in ("prefill", "decode"):
            if self.pools.of(name).engine.itl_budget_ms is not None:
                raise ValueError(
                    f"pools.{name}.engine.itl_budget_ms: engine.kind vllm plans its steps without "
                    f"a limit of time; set pools.{name}.engine.max_step_tokens, which bounds the "
                    "prefill of a step"
                )
            self._check_vllm_has(name)
        if ranks > 1:
            raise ValueError("engine.kind vllm works for pools with tensor_parallel 1 only so far")
        if self.kv_tiers.memory_mib:
            raise ValueError("engine.kind vllm does not know kv_tiers yet")
        if self.kv_transfer.transport == "shm":
            raise ValueError("engine.kind vllm needs kv_transfer.transport nixl or tcp")
        if "cuda" in (self.pools.prefill.engine.device, self.pools.decode.engine.device):
            raise ValueError(
                "engine.kind vllm runs on CPUs only so far: moving blocks out of its GPU memory has "
                "not been proven"
            )

    def _check_vllm_has(self, pool_name: str) -> None:
        """Raise ValueError for a setting of a pool that vLLM would not follow."""
        settings = self.pools.of(pool_name).engine
        defaults = EngineSettings()
        for name, instead in VLLM_LACKS.items():
            if getattr(settings, name) != getattr(defaults, name):
                raise ValueError(
                    f"pools.{pool_name}.engine.{name} cannot be set with engine.kind vllm: {instead}"
                )

    def _check_replicas(self) -> None:
        if self.pools.decode.replicas == 0:
            raise ValueError("pools.decode.replicas is 0: nobody would answer")
        if self.pools.prefill.replicas == 0 and self.router.disaggregate == "always":
            raise ValueError(
                "pools.prefill.replicas is 0: set router.disaggregate to never, or auto"
            )

    def _check_pool(self, name: str, pool: PoolConfig) -> None:
        if pool.engine.max_step_tokens < self.model.block_tokens:
            raise ValueError(
                f"pools.{name}.engine.max_step_tokens {pool.engine.max_step_tokens} is below "
                f"model.block_tokens {self.model.block_tokens}: a step computes a block or more"
            )
        if pool.max_replicas < pool.min_replicas:
            raise ValueError(f"pools.{name}.max_replicas is below its min_replicas")

    def _check_gpu(self) -> None:
        """Raise ValueError for settings that read KV in host memory, where a GPU's KV is not."""
        if self.kv_transfer.transport != "nixl":
            raise ValueError("engine.device cuda needs kv_transfer.transport nixl")
        if self.kv_tiers.memory_mib:
            raise ValueError("engine.device cuda does not know kv_tiers yet")


# ---- loading -------------------------------------------------------------------------------------


def load_config(path: Path | None, overrides: dict[str, Any]) -> ClusterConfig:
    """Return the configuration of a YAML file (None: the defaults) with some values replaced.

    `overrides` maps dotted keys ("a.b.c") to values. Raises ConfigError.
    """
    tree = read_tree(path) if path else {}
    for key, value in overrides.items():
        _override(tree, key, value)
    try:
        return ClusterConfig.model_validate(tree)
    except ValidationError as error:
        lines = [_describe_mistake(mistake) for mistake in error.errors()]
        raise ConfigError("the configuration is wrong:\n  " + "\n  ".join(lines)) from None


def read_tree(path: Path) -> dict[str, Any]:
    """Return what a file itself says, without defaults and unchecked.

    Raises:
        ConfigError: the file cannot be read, or is no YAML mapping. The text quotes nothing of it.
    """
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except yaml.MarkedYAMLError as error:  # its text quotes the line, which may hold the secret
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"cannot read {path}: no valid YAML at line {line}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a mapping of sections")
    return tree


def _override(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key in the tree, which may lack the key's sections.

    Each section on the way is replaced by a copy of it: with an alias, YAML puts one section at
    several places, and the others are to stay as they are.
    """
    *section_names, name = _split_key(tree, key)
    section = tree
    for section_name in section_names:  # sections may lie in sections
        previous_section = section.get(section_name, {})
        if not isinstance(previous_section, dict):
            raise ConfigError(f"{section_name} in {key} is not a section")
        section[section_name] = dict(previous_section)
        section = section[section_name]
    section[name] = value


def _split_key(tree: dict[str, Any], key: str) -> list[str]:
    """Return the names in a dotted key. A model's name may have dots: the longest one counts."""
    section_name, _, rest = key.partition(".")
    entries = tree.get(section_name)
    if section_name != "models" or not isinstance(entries, dict):
        return key.split(".")
    names = [str(name) for name in entries if f"{rest}.".startswith(f"{name}.")]
    if not names:
        return key.split(".")
    model_name = max(names, key=len)
    names_below = rest[len(model_name) + 1 :]
    return [section_name, model_name, *(names_below.split(".") if names_below else [])]


def _describe_mistake(mistake: ErrorDetails) -> str:
    """Return one line about a mistake, without what may be the secret or contain it.

    So the value is repeated only if its key is known, and if it is a single value. A mistake of the
    tree as a whole has no key.
    """
    place = mistake["loc"]
    value = mistake["input"]
    message = describe_message(mistake)
    line = ": ".join([".".join(map(str, place)), message] if place else [message])
    is_repeated = (
        place
        and "secret" not in place
        and mistake["type"] != "extra_forbidden"
        and not isinstance(value, dict | list | tuple)
    )
    return f"{line} (got {value!r})" if is_repeated else line


def describe_message(mistake: ErrorDetails) -> str:
    """Return what pydantic says of a mistake, to stand behind a key; its names stay as they are."""
    message = mistake["msg"]
    return message[:1].lower() + message[1:]


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """Return the values of `a.b=c` pairs by key; values are read as YAML. Raises ConfigError."""
    values = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            # What stands behind the key is not repeated: it may be the secret.
            first_word = re.split(r"[:=\s]", pair, maxsplit=1)[0]
            raise ConfigError(
                f"--set {first_word}: expected KEY=VALUE, for example router.queue_max=64"
            )
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--set {key}: the value is not valid YAML") from None
    return values
