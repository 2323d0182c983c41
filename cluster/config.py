"""The configuration of a cluster: one typed tree, loaded from one YAML file.

The tree is checked as a whole when it is loaded, so a process that starts has a configuration that
works together. Each part of the code gets a small dataclass of its own that is made from the tree,
never the tree itself.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..engine.options import (
    BLOCK_TOKENS,
    BlockTokens,
    ComputeSettings,
    Count,
    Dtype,
    EngineOptions,
    SchedulerSettings,
)

Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[float, Field(gt=0)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FormatName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,40}$")]
ModelName = Annotated[str, Field(min_length=1, max_length=200)]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s*]+)$")]
HostName = Annotated[str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)$")]
#: The share of the ITL target that an engine's step may take by default; the rest is for the
#: token's way to the client.
STEP_SHARE = 0.9
#: Environment variable with the cluster's secret, for where no file may hold the secret.
SECRET = "DIPTYCH_SECRET"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def host_and_port(host: str, port: int) -> str:
    """Return `host:port` as URLs have it, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ConfigError(Exception):
    """The configuration is wrong; the message says where and what to do."""


class ConfigSection(BaseModel):
    """The base of every section: frozen, and it refuses keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(ConfigSection):
    #: A folder or a Hugging Face id; None: the bundled model.
    path: str | None = None
    #: The name in the API; None: the folder's name, and `demo` for the bundled model.
    name: str | None = None
    #: Further names: the API lists them, takes them, and answers under `name`.
    served_names: tuple[ModelName, ...] = ()
    #: A file with the chat template (Jinja), on each gateway's machine; None: the checkpoint's.
    chat_template: str | None = None
    #: How the model writes tool calls, and how it marks its reasoning: `auto` (what the chat
    #: template shows), `none`, or a name of docs/formats.md; vLLM's names are taken, too.
    tool_format: FormatName = "auto"
    reasoning_format: FormatName = "auto"
    dtype: Dtype = EngineOptions.dtype
    #: Tokens of a prompt and its answer; None: what the model allows, or what the pools hold.
    max_model_len: Count | None = EngineOptions.max_model_len
    #: Tokens of a KV block; flash-attn 2 supports 256 only.
    block_tokens: BlockTokens = BLOCK_TOKENS


# A section is frozen by its `model_config`, which mypy does not read.
class EngineSettings(ConfigSection, SchedulerSettings, ComputeSettings):  # type: ignore[misc]
    """The engines of a pool. Each field of the two structs of `engine/options.py` is a setting."""

    #: MiB of the KV pool of each process; a replica has `tensor_parallel` processes.
    kv_mib: Count = EngineOptions.kv_bytes >> 20
    #: The longest step that decodes answers: it bounds the prefill in such a step, except for one
    #: block in every eighth step. None: `STEP_SHARE` of slo.itl_ms.
    itl_budget_ms: Positive | None = None


class PoolConfig(ConfigSection):
    #: Replicas at the start; `diptych scale` changes their number.
    replicas: Annotated[int, Field(ge=0)] = 1
    #: The bounds of `diptych scale`.
    min_replicas: Count = 1
    max_replicas: Count = 64
    #: Processes of a replica that share the model.
    tensor_parallel: Count = EngineOptions.tensor_parallel
    engine: EngineSettings = EngineSettings()

    @property
    def replicas_minimum(self) -> int:
        """Return how many replicas the pool keeps at least.

        That is `min_replicas`, or `replicas` where the pool was started with fewer.
        """
        return min(self.min_replicas, self.replicas)


class PoolsConfig(ConfigSection):
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()

    def of(self, pool: str) -> PoolConfig:
        """Return the settings of the pool of that name, `prefill` or `decode`."""
        return {"prefill": self.prefill, "decode": self.decode}[pool]


class ClassSettings(ConfigSection):
    """A class of requests; see diptych.router.SloClass."""

    #: The class with the lowest number is served first.
    priority: Annotated[int, Field(ge=0)] = 0
    #: What one request is worth when not all of them can be served in time.
    weight: Positive = 1.0
    #: True: a request that would miss its target is refused early, with status 429.
    early_reject: bool = False


class RouterSettings(ConfigSection):
    #: Whether another worker than the decode worker computes a prompt. With `auto` the router
    #: chooses for each request, by the times that it predicts.
    disaggregate: Literal["always", "auto", "never"] = "always"
    #: Requests that wait for a worker.
    queue_max: Count = 1024
    #: How long a request waits for a worker, or until its TTFT target if that is longer.
    queue_ttl_s: Positive = 30.0
    #: How long a request that cannot be in time may wait, by prediction; else it is refused at once.
    background_wait_s: Positive = 120.0
    #: One of diptych.router.policies.
    policy: str = "diptych"
    #: Classes of requests by name; empty: those of diptych.router.config.
    classes: dict[str, ClassSettings] = {}
    #: On the router's machine: where its events are written for `diptych replay`.
    log_folder: str | None = None
    #: MiB of events that are kept.
    log_mib: Count = 32

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, name: str) -> str:
        from ..router.policies import POLICIES  # loads numpy, which not every command needs

        if name not in POLICIES:
            raise ValueError(f"expected one of {', '.join(POLICIES)}")
        return name


class FaultSettings(ConfigSection):
    """Damage on purpose, for tests of a live cluster."""

    #: How many of the first writes of each prefill worker are damaged.
    corrupt_writes: Annotated[int, Field(ge=0)] = 0


class TierSettings(ConfigSection):
    """Where a worker keeps KV blocks that its pool evicts. Sizes are of each worker; 0: none."""

    memory_mib: Annotated[int, Field(ge=0)] = 0
    #: Several times `memory_mib`, or the disk helps little.
    disk_mib: Annotated[int, Field(ge=0)] = 0
    #: On each machine; each worker makes a folder of its own in it.
    folder: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.disk_mib and not (self.folder and self.memory_mib):
            raise ValueError("a disk tier needs kv_tiers.folder and kv_tiers.memory_mib")
        return self


class TransferSettings(ConfigSection):
    #: `auto` is NIXL where it can run, else TCP. It is one transport for all pairs of workers.
    transport: Literal["auto", "nixl", "shm", "tcp"] = "auto"
    #: From a worker's offer of blocks until all KV has arrived; a slower transfer fails.
    timeout_s: Positive = 30.0
    faults: FaultSettings = FaultSettings()


class SloConfig(ConfigSection):
    """Targets that a request must meet to count as goodput. The defaults fit a laptop."""

    ttft_ms: Positive = 2000.0
    itl_ms: Positive = 200.0


class GatewaySettings(ConfigSection):
    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 9000
    #: Placements of one request; the last one does without a transfer.
    max_attempts: Count = 4
    max_streams: Count = 1024
    #: On each gateway's machine; `diptych keys` writes the file.
    api_keys_file: str | None = None
    #: SHA-256, in hex, of more keys: without limits, of the tenant `default`
    #: (`diptych serve --api-key`).
    api_key_hashes: tuple[Sha256, ...] = ()
    #: True: a field that the gateway has nothing to set by is refused, not ignored
    #: (docs/http.md).
    strict: bool = False
    #: Origins of web pages that may ask, and read answers (CORS); `*`: all, where keys are needed.
    #: Cookies never count. None: all where keys are needed; else this machine's own pages, which
    #: may always (docs/http.md).
    origins: tuple[Origin, ...] | None = None
    #: Where no key is needed: names by which clients call the gateway, beside addresses and
    #: `localhost`; `*.example.com` is all of them in a domain, `*` any name (docs/http.md).
    hosts: tuple[HostName, ...] = ()
    #: For a client to send its request's body.
    body_timeout_s: Positive = 30.0
    #: For this long a client may come back for its answer.
    resume_s: Annotated[float, Field(ge=0)] = 60.0
    #: How many responses of `/v1/responses` a gateway keeps for `previous_response_id`; 0: none.
    stored_responses: Annotated[int, Field(ge=0)] = 4096
    #: What they may take of the gateway's memory, in MiB.
    stored_responses_mib: Count = 64
    #: For this long after its last use a response is kept.
    stored_responses_s: Positive = 21600.0
    #: PEM files on each gateway's machine: HTTPS, and TLS for gRPC.
    tls_cert: str | None = None
    tls_key: str | None = None
    #: Who listens: each gateway on sockets of its own, or Serve's proxies on every node that has a
    #: replica.
    listen: Literal["gateway", "serve"] = "gateway"

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_tls_files(self.tls_cert, self.tls_key)
        if self.tls_cert and self.listen == "serve":
            raise ValueError("Serve's gRPC proxies know no TLS: no tls_cert, or listen: gateway")
        if "*" in (self.origins or ()) and not self.asks_for_keys:
            raise ValueError(
                "origins: * without keys lets every web page use the models: name the origins, or "
                "set api_keys_file"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _name_the_new_setting(cls, values: Any) -> Any:
        if isinstance(values, dict) and "cors_origins" in values:
            raise ValueError("cors_origins is called origins now")
        return values

    @property
    def asks_for_keys(self) -> bool:
        """Return whether clients need a key."""
        return self.api_keys_file is not None or bool(self.api_key_hashes)

    @property
    def exposed(self) -> bool:
        """Return whether anybody who reaches the machine can use the models."""
        return not self.asks_for_keys and self.host not in LOOPBACK


class ScalingSettings(ConfigSection):
    """The planner (cluster/planner): who changes roles and sizes while load changes."""

    mode: Literal["off", "propose", "act"] = "off"
    interval_s: Positive = 5.0
    #: False: the planner changes roles only.
    replicas: bool = True
    #: GPUs of all replicas together; None: no limit.
    gpus: Count | None = None
    #: Between two flips.
    flip_dwell_s: Positive = 60.0
    #: For this long a smaller pool must have been enough before the pool shrinks.
    down_dwell_s: Positive = 180.0


class RaySettings(ConfigSection):
    """Who may talk to Ray's own processes, which run whatever code they are sent."""

    #: `disabled`: anybody who reaches one of Ray's ports runs code as this user.
    auth: Literal["token", "disabled"] = "token"


class ControlSettings(ConfigSection):
    """Where operators talk to the cluster. Its APIs change roles and sizes of pools."""

    host: str = "127.0.0.1"
    port: Port = 8001
    grpc_port: Port = 9001
    #: On the head's machine; the file's content is the bearer token.
    key_file: str | None = None
    #: PEM files on the head's machine: HTTPS, and TLS for gRPC.
    tls_cert: str | None = None
    tls_key: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_tls_files(self.tls_cert, self.tls_key)
        if self.key_file is None and self.host not in LOOPBACK:
            raise ValueError(f"{self.host} is no loopback address: set control.key_file")
        return self


def _check_tls_files(certificate: str | None, key: str | None) -> None:
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
    log: Literal["text", "json"] = "text"

    @field_validator("metrics_host")
    @classmethod
    def _is_reachable(cls, host: str | None) -> str | None:
        if host in ("", "0.0.0.0", "::"):
            raise ValueError("Prometheus is told to go there: give one address of this machine")
        return host


class ClusterConfig(ConfigSection):
    model: ModelSettings = ModelSettings()
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
    #: A peer that sent nothing for this long counts as dead.
    silence_s: Annotated[float, Field(ge=1)] = 3.0
    #: What the cluster's processes prove to each other that they know.
    secret: str = Field(default_factory=lambda: secrets.token_hex(16), min_length=1, repr=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_replicas()
        for name in ("prefill", "decode"):
            self._check_pool(name, self.pools.of(name))
        ranks = max(self.pools.prefill.tensor_parallel, self.pools.decode.tensor_parallel)
        if self.kv_tiers.memory_mib and ranks > 1:
            raise ValueError("kv_tiers work for pools with tensor_parallel 1 only")
        if "cuda" in (self.pools.prefill.engine.device, self.pools.decode.engine.device):
            self._check_gpu()
        return self

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
    tree = _read_tree(path) if path else {}
    for key, value in overrides.items():
        _override(tree, key, value)
    try:
        return ClusterConfig.model_validate(tree)
    except ValidationError as error:
        lines = [
            _describe_mistake(mistake["loc"], mistake["msg"].lower(), mistake["input"])
            for mistake in error.errors()
        ]
        raise ConfigError("the configuration is wrong:\n  " + "\n  ".join(lines)) from None


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a mapping of sections")
    return tree


def _override(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key in the tree, which may lack the key's sections."""
    *section_names, name = key.split(".")
    section = tree
    for section_name in section_names:
        section = section.setdefault(section_name, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{section_name} in {key} is not a section")
    section[name] = value


def _describe_mistake(place: tuple[int | str, ...], message: str, value: Any) -> str:
    """Return one line about a mistake; the whole tree and the secret are never repeated."""
    if not place or place[0] == "secret":
        return ": ".join([*map(str, place), message])
    return f"{'.'.join(map(str, place))}: {message} (got {value!r})"


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """Return the values of `a.b=c` pairs by key; values are read as YAML. Raises ConfigError."""
    values = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise ConfigError(f"--set {pair}: expected KEY=VALUE, for example router.queue_max=64")
        try:
            values[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--set {pair}: the value is not valid YAML") from None
    return values
