"""The configuration of a cluster: one typed tree, loaded from one YAML file.

Lower folders get their own small dataclass made from it, never the tree.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
STEP_SHARE = 0.9  #: of the ITL target for a step; the rest is the way to the client
SECRET = "DIPTYCH_SECRET"  #: environment: the cluster's secret, where no file may hold it
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def host_and_port(host: str, port: int) -> str:
    """Return `host:port` as URLs have it, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ConfigError(Exception):
    """The configuration is wrong; the message says where and what to do."""


Attention = Literal["auto", "fa3", "fa2", "fa4", "flashinfer", "triton", "cpp", "torch"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Section):
    path: str | None = None  #: folder or Hugging Face id; None: the bundled model
    name: str | None = None  #: API name; None: the folder's name, `demo` for the bundled model
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_model_len: Count | None = None  #: tokens; None: the model's, or what the pools hold
    block_tokens: Literal[64, 128, 256] = 64  #: of a KV block; flash-attn 2 knows 256 only


class EngineSettings(Section):
    threads: Count = 1
    kv_mib: Count = 256
    max_step_tokens: Annotated[int, Field(ge=64)] = 512
    max_running: Count = 64
    growth_tokens: Count = 256
    #: longest step with decodes in it: bounds its prefill, but for a block in every eighth step.
    #: None: `STEP_SHARE` of slo.itl_ms
    itl_budget_ms: Positive | None = None
    draft_tokens: Annotated[int, Field(ge=0, le=16)] = 0  #: n-gram guesses verified by a step
    device: Literal["cpu", "cuda"] = "cpu"
    attention: Attention = "auto"  #: the library that computes it; `cpp` and `torch` on a CPU
    exact: bool = False  #: on a GPU: bits do not depend on the batch, as they never do on a CPU
    kv_dtype: Literal["float8_e4m3fn"] | None = None  #: on a GPU; None: model.dtype
    weights: Literal["model", "fp8"] = "model"  #: on a GPU: quantized at load


class PoolConfig(Section):
    replicas: Annotated[int, Field(ge=0)] = 1  #: at start; `diptych scale` changes it
    min_replicas: Count = 1  #: what `diptych scale` goes down to
    max_replicas: Count = 64  #: and up to
    tensor_parallel: Count = 1  #: processes of a replica that share the model
    engine: EngineSettings = EngineSettings()


class Pools(Section):
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()


class ClassSettings(Section):
    """A class of requests; see diptych.router.SloClass."""

    priority: Annotated[int, Field(ge=0)] = 0
    weight: Positive = 1.0
    early_reject: bool = False


class RouterSettings(Section):
    disaggregate: Literal["always", "auto", "never"] = "always"
    queue_max: Count = 1024
    queue_ttl_s: Positive = 30.0
    policy: str = "diptych"  #: one of diptych.router.policies
    classes: dict[str, ClassSettings] = {}  #: empty: those of diptych.router.config
    log_folder: str | None = None  #: on the router's machine: its events, for `diptych replay`
    log_mib: Count = 32  #: of them, at most

    @field_validator("policy")
    @classmethod
    def _known(cls, name: str) -> str:
        from ..router.policies import POLICIES  # numpy: not for every command

        if name not in POLICIES:
            raise ValueError(f"expected one of {', '.join(POLICIES)}")
        return name


class FaultSettings(Section):
    """Damage on purpose, for tests of a live cluster."""

    corrupt_writes: Annotated[int, Field(ge=0)] = 0  #: first writes of each prefill worker


class TierSettings(Section):
    """Where a worker keeps KV blocks that its pool evicts. Sizes are of each worker; 0: none."""

    memory_mib: Annotated[int, Field(ge=0)] = 0
    disk_mib: Annotated[int, Field(ge=0)] = 0  #: several times `memory_mib`, or it helps little
    folder: str | None = None  #: on each machine; each worker takes a folder of its own in it

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.disk_mib and not (self.folder and self.memory_mib):
            raise ValueError("a disk tier needs kv_tiers.folder and kv_tiers.memory_mib")
        return self


class TransferSettings(Section):
    transport: Literal["auto", "nixl", "shm", "tcp"] = "auto"
    timeout_s: Positive = 30.0
    faults: FaultSettings = FaultSettings()


class SloConfig(Section):
    """Targets that a request must meet to count as goodput. The defaults fit a laptop."""

    ttft_ms: Positive = 2000.0
    itl_ms: Positive = 200.0


class GatewaySettings(Section):
    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 9000
    max_attempts: Count = 4  #: placements of one request; the last one does without a transfer
    max_streams: Count = 1024
    api_keys_file: str | None = None  #: on each gateway's machine; `diptych keys` writes it
    body_timeout_s: Positive = 30.0  #: for a client to send its request's body
    resume_s: Annotated[float, Field(ge=0)] = 60.0  #: that a client may come back for its answer
    tls_cert: str | None = None  #: PEM files on each gateway's machine: HTTPS, and TLS for gRPC
    tls_key: str | None = None
    #: who: each gateway on sockets of its own, or Serve's proxies on every node with a replica
    listen: Literal["gateway", "serve"] = "gateway"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.tls_cert and self.listen == "serve":
            raise ValueError("Serve's gRPC proxies know no TLS: no tls_cert, or listen: gateway")
        return self

    @property
    def exposed(self) -> bool:
        """Anybody who reaches the machine can use the models."""
        return self.api_keys_file is None and self.host not in LOOPBACK


class ScalingSettings(Section):
    """The planner (cluster/planner): who changes roles and sizes while load changes."""

    mode: Literal["off", "propose", "act"] = "off"
    interval_s: Positive = 5.0
    replicas: bool = True  #: False: roles only
    gpus: Count | None = None  #: of all replicas together, at most
    flip_dwell_s: Positive = 60.0  #: between two flips
    down_dwell_s: Positive = 180.0  #: for as long as this a smaller pool would have been enough


class RaySettings(Section):
    """Who may talk to Ray's own processes, which run whatever code they are sent."""

    #: disabled: anybody who reaches one of Ray's ports runs code as this user
    auth: Literal["token", "disabled"] = "token"


class ControlSettings(Section):
    """Where operators talk to the cluster. Its APIs change roles and sizes of pools."""

    host: str = "127.0.0.1"
    port: Port = 8001
    grpc_port: Port = 9001
    key_file: str | None = None  #: on the head's machine; its content is the bearer token
    tls_cert: str | None = None  #: PEM files on the head's machine: HTTPS, and TLS for gRPC
    tls_key: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.key_file is None and self.host not in LOOPBACK:
            raise ValueError(f"{self.host} is no loopback address: set control.key_file")
        return self


class ObservabilitySettings(Section):
    """What the processes tell of themselves."""

    metrics_port: Annotated[int, Field(ge=0, le=65000)] = 0  #: the first free one from here; 0: any
    #: each process's exporter listens there; None: the address that Ray knows of its node, which is
    #: 127.0.0.1 with `diptych serve` and no `--ray-address`
    metrics_host: str | None = None
    metrics_compat: tuple[Literal["vllm"], ...] = ()  #: others' names for the same, too
    otlp_endpoint: str | None = None  #: OTLP/HTTP: http://collector:4318; None: nothing is traced
    trace_sample: Annotated[float, Field(ge=0, le=1)] = 0.01  #: of requests without a traceparent
    log: Literal["text", "json"] = "text"

    @field_validator("metrics_host")
    @classmethod
    def _is_reachable(cls, host: str | None) -> str | None:
        if host in ("", "0.0.0.0", "::"):
            raise ValueError("Prometheus is told to go there: give one address of this machine")
        return host


class ClusterConfig(Section):
    model: ModelConfig = ModelConfig()
    pools: Pools = Pools()
    router: RouterSettings = RouterSettings()
    kv_transfer: TransferSettings = TransferSettings()
    kv_tiers: TierSettings = TierSettings()
    slo: SloConfig = SloConfig()
    gateway: GatewaySettings = GatewaySettings()
    control: ControlSettings = ControlSettings()
    ray: RaySettings = RaySettings()
    scaling: ScalingSettings = ScalingSettings()
    observability: ObservabilitySettings = ObservabilitySettings()
    silence_s: Annotated[float, Field(ge=1)] = 3.0  #: a peer as silent as this is dead
    secret: str = Field(default_factory=lambda: secrets.token_hex(16), min_length=1, repr=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pools.decode.replicas == 0:
            raise ValueError("pools.decode.replicas is 0: nobody would answer")
        if self.pools.prefill.replicas == 0 and self.router.disaggregate == "always":
            raise ValueError(
                "pools.prefill.replicas is 0: set router.disaggregate to never, or auto"
            )
        for name, pool in (("prefill", self.pools.prefill), ("decode", self.pools.decode)):
            if pool.engine.max_step_tokens < self.model.block_tokens:
                raise ValueError(
                    f"pools.{name}.engine.max_step_tokens {pool.engine.max_step_tokens} is below "
                    f"model.block_tokens {self.model.block_tokens}: a step computes a block or more"
                )
            if pool.max_replicas < pool.min_replicas:
                raise ValueError(f"pools.{name}.max_replicas is below its min_replicas")
        ranks = max(self.pools.prefill.tensor_parallel, self.pools.decode.tensor_parallel)
        if self.kv_tiers.memory_mib and ranks > 1:
            raise ValueError("kv_tiers work for pools with tensor_parallel 1 only")
        if "cuda" in (self.pools.prefill.engine.device, self.pools.decode.engine.device):
            self._check_gpu()
        return self

    def _check_gpu(self) -> None:
        """What reads KV through host memory cannot read a GPU's."""
        if self.kv_transfer.transport != "nixl":
            raise ValueError("engine.device cuda needs kv_transfer.transport nixl")
        if self.kv_tiers.memory_mib:
            raise ValueError("engine.device cuda does not know kv_tiers yet")


def load_config(path: Path | None, overrides: dict[str, Any]) -> ClusterConfig:
    """YAML file plus overrides ("a.b.c" -> value). Raises ConfigError."""
    tree: dict[str, Any] = {}
    if path:
        try:
            tree = yaml.safe_load(path.read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from None
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} is not a mapping of sections")
    for key, value in overrides.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{section} in {key} is not a section")
        node[last] = value
    try:
        return ClusterConfig.model_validate(tree)
    except ValidationError as error:
        lines = [_told(e["loc"], e["msg"].lower(), e["input"]) for e in error.errors()]
        raise ConfigError("the configuration is wrong:\n  " + "\n  ".join(lines)) from None


def _told(place: tuple[int | str, ...], message: str, given: Any) -> str:
    """The tree as a whole, and its secret, are not said again."""
    if not place or place[0] == "secret":
        return ": ".join([*map(str, place), message])
    return f"{'.'.join(map(str, place))}: {message} (got {given!r})"


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """`a.b=c` pairs of the command line; values are read as YAML."""
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
