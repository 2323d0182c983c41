"""Who serves: layouts of Diptych and of vLLM by name, and what is started for each (pure).

| name | is |
|---|---|
| `1P1D`, `2M` .. | Diptych with so many prefill workers (P) and decode workers (D or M) |
| `vllm-chunk256` | one vLLM server whose steps take 256 tokens at most |
| `vllm-2x` | two vLLM servers behind round robin, each with half of the cores |
| `vllm-pd` | a prefill and a decode server of vLLM, KV over NIXL |

D and M are started alike: a decode worker computes prompts too where that is better, and all of them
where there is no prefill worker. M, mixed, is the name for the latter.

The servers or workers of a layout share the cores equally; a remainder is given to none of them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from ....simulator.errors import SimulationError
from ....simulator.fleet import Split
from .errors import LiveBenchError

KV_MIB = 2048  #: memory for KV, of each server or worker
MAX_RUNNING = 64  #: sequences that decode together, of each server or worker
VLLM_CHUNK_TOKENS = 2048  #: limit of a step's tokens, for layouts of vLLM whose name has none
VLLM_BLOCK_TOKENS = 128  #: of a KV block: a size that vLLM's attention on CPUs accepts
#: Port at which the first server of `vllm-pd` tells the other one how to reach its KV; the second
#: server has the next port.
NIXL_SIDE_PORTS_BEGIN = 5600
#: What `--against vllm` stands for.
ALL_VLLM = ("vllm-chunk256", "vllm-chunk2048", "vllm-2x", "vllm-pd")


@dataclass(frozen=True, slots=True)
class DiptychLayout:
    """Workers of ours, by role. Each layout's `name` is the one that tables and options have."""

    #: How many prefill, decode and mixed workers; a mixed one is started as a decode worker is.
    split: Split

    @property
    def name(self) -> str:
        """The layout's name, such as `1P1D`."""
        return str(self.split)

    @property
    def replicas(self) -> int:
        """Workers of all roles together."""
        return self.split.replicas


@dataclass(frozen=True, slots=True)
class VllmChunkLayout:
    """One server on all cores."""

    chunk_tokens: int  #: limit of the tokens of one step

    @property
    def name(self) -> str:
        """The layout's name, such as `vllm-chunk2048`."""
        return f"vllm-chunk{self.chunk_tokens}"


@dataclass(frozen=True, slots=True)
class VllmReplicasLayout:
    """Several equal servers behind round robin."""

    replicas: int

    @property
    def name(self) -> str:
        """The layout's name, such as `vllm-2x`."""
        return f"vllm-{self.replicas}x"


@dataclass(frozen=True, slots=True)
class VllmSplitLayout:
    """A prefill and a decode server behind a proxy."""

    @property
    def name(self) -> str:
        """The name of the only layout of this kind."""
        return "vllm-pd"


VllmLayout = VllmChunkLayout | VllmReplicasLayout | VllmSplitLayout
Layout = DiptychLayout | VllmLayout


def parse_vllm_layouts(names: list[str]) -> list[VllmLayout]:
    """Return the layouts that `--against` names; `vllm` is all of `ALL_VLLM`.

    Raises LiveBenchError for an unknown name.
    """
    layouts: dict[str, VllmLayout] = {}
    for name in names:
        for layout_name in ALL_VLLM if name == "vllm" else (name,):
            layouts[layout_name] = _parse_vllm_layout(layout_name)
    return list(layouts.values())


def _parse_vllm_layout(name: str) -> VllmLayout:
    if match := re.fullmatch(r"vllm-chunk([1-9]\d*)", name):
        return VllmChunkLayout(int(match[1]))
    if match := re.fullmatch(r"vllm-([2-9])x", name):
        return VllmReplicasLayout(int(match[1]))
    if name == "vllm-pd":
        return VllmSplitLayout()
    raise LiveBenchError(
        f"--against {name}: expected vllm, {', '.join(ALL_VLLM)}, or another chunk or number"
    )


def parse_diptych_layout(name: str) -> DiptychLayout:
    """Return the layout of a name like `1P1D` or `2M`. Raises LiveBenchError."""
    try:
        split = Split.parse(name)
    except SimulationError as error:
        raise LiveBenchError(f"--layouts {name}: {error}") from None
    if not split.serves_both_phases:
        raise LiveBenchError(f"--layouts {name}: no worker computes prompts, or no worker answers")
    return DiptychLayout(split)


def share_cores(cores: tuple[int, ...], servers: int, name: str) -> list[tuple[int, ...]]:
    """Return equally many cores for each server; `name` is the layout's, for the error.

    Raises LiveBenchError if there are fewer cores than servers.
    """
    each = len(cores) // servers
    if not each:
        raise LiveBenchError(f"{name} needs {servers} cores, and this process has {len(cores)}")
    return [cores[index * each : (index + 1) * each] for index in range(servers)]


# ---- Diptych -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DiptychServing:
    """What all of our layouts are started with."""

    model: Path
    cores: tuple[int, ...]
    max_model_len: int  #: tokens of prompt and answer together
    #: The setting `slo.ttft`, such as `2s` or `max(1s, 3x)`: three times what the prompt takes on an
    #: idle worker, but a second at least.
    ttft: str
    itl_s: float  #: The setting `slo.itl_ms`, in seconds.
    settings: tuple[str, ...] = ()  #: further `KEY=VALUE` of cluster.yaml


def diptych_arguments(layout: DiptychLayout, serving: DiptychServing, log: Path) -> list[str]:
    """Return the arguments of `diptych serve`; the router's log goes to the folder `log`."""
    split = layout.split
    threads = len(share_cores(serving.cores, split.replicas, layout.name)[0])
    is_mixed = split.mixed == split.replicas  # no worker is for one phase only
    settings = [
        f"slo.ttft={serving.ttft}",
        f"slo.itl_ms={serving.itl_s * 1e3:g}",
        f"router.disaggregate={'never' if is_mixed else 'auto'}",
        f"router.log_folder={log}",
    ]
    for pool in ("prefill", "decode"):
        settings += [
            f"pools.{pool}.engine.threads={threads}",
            f"pools.{pool}.engine.kv_mib={KV_MIB}",
            f"pools.{pool}.engine.max_running={MAX_RUNNING}",
        ]
    arguments = [str(serving.model), "--max-model-len", str(serving.max_model_len)]
    # A mixed worker is a decode worker: without prefill workers it computes its prompts itself.
    arguments += ["--prefill", str(split.prefill), "--decode", str(split.decode + split.mixed)]
    for setting in (*settings, *serving.settings):
        arguments += ["--set", setting]
    return arguments


# ---- vLLM ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServing:
    """What all layouts of vLLM are started with."""

    python: Path
    model: Path
    cores: tuple[int, ...]
    max_model_len: int
    prefix_cache: bool
    preload: tuple[str, ...] = ()  #: libraries: tcmalloc and Intel's OpenMP


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A process to start. The command itself binds a server to its cores, by `taskset`."""

    name: str  #: for messages and the name of the log file
    command: tuple[str, ...]
    environment: dict[str, str]  #: variables beside those that the process inherits
    port: int  #: where the process answers HTTP


@dataclass(frozen=True, slots=True)
class VllmCommands:
    """The processes of a layout; the proxy, if there is one, is started when all servers are up."""

    servers: tuple[ServerCommand, ...]
    proxy: ServerCommand | None  #: None: there is one server, and clients talk to it

    @property
    def port(self) -> int:
        """Where clients connect."""
        return self.proxy.port if self.proxy else self.servers[0].port


def server_count(layout: VllmLayout) -> int:
    """Return how many servers the layout has, without its proxy."""
    match layout:
        case VllmChunkLayout():
            return 1
        case VllmReplicasLayout():
            return layout.replicas
        case VllmSplitLayout():
            return 2
        case _:
            assert_never(layout)


def vllm_commands(
    layout: VllmLayout, serving: VllmServing, ports: list[int], proxy_script: Path
) -> VllmCommands:
    """Return what is started; `ports` has one more port than there are servers, the proxy's."""
    count = server_count(layout)
    cores = share_cores(serving.cores, count, layout.name)
    match layout:
        case VllmChunkLayout():
            server = _vllm_server(
                serving, "server", cores=cores[0], port=ports[0], chunk_tokens=layout.chunk_tokens
            )
            return VllmCommands((server,), None)
        case VllmReplicasLayout():
            servers = tuple(
                _vllm_server(serving, f"replica {index}", cores=cores[index], port=ports[index])
                for index in range(count)
            )
            backends = [f"--backend={_url(server.port)}" for server in servers]
        case VllmSplitLayout():
            # Either server may send or receive; the proxy decides by the call's parameters.
            connector = {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_buffer_device": "cpu",
            }
            extra = ("--kv-transfer-config", json.dumps(connector))
            servers = tuple(
                _vllm_server(
                    serving, role, cores=cores[index], port=ports[index], side=index, extra=extra
                )
                for index, role in enumerate(("prefill", "decode"))
            )
            backends = [
                f"--prefill={_url(servers[0].port)}",
                f"--backend={_url(servers[1].port)}",
            ]
        case _:
            assert_never(layout)
    command = (str(serving.python), str(proxy_script), f"--port={ports[-1]}", *backends)
    return VllmCommands(servers, ServerCommand("proxy", command, {}, ports[-1]))


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _vllm_server(
    serving: VllmServing,
    name: str,
    *,
    cores: tuple[int, ...],
    port: int,
    chunk_tokens: int = VLLM_CHUNK_TOKENS,
    side: int = 0,
    extra: tuple[str, ...] = (),
) -> ServerCommand:
    """Return one server, set up as vLLM's documentation recommends for x86.

    `side` numbers the servers that exchange KV, from 0: each needs a side channel of its own.
    """
    core_list = ",".join(map(str, cores))
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_MIB // 1024),  # in GiB
        "VLLM_CPU_OMP_THREADS_BIND": core_list,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(NIXL_SIDE_PORTS_BEGIN + side),
        # TCP on loopback and shared memory: both servers are on this machine.
        "UCX_TLS": "tcp,sm,self,posix,sysv",
        "UCX_NET_DEVICES": "lo",
    }
    if serving.preload:
        environment["LD_PRELOAD"] = ":".join(serving.preload)
    command = (
        *("taskset", "-c", core_list),
        *(str(serving.python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(serving.model), "--served-model-name", "live"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "bfloat16", "--max-model-len", str(serving.max_model_len)),
        *("--block-size", str(VLLM_BLOCK_TOKENS)),
        *("--max-num-batched-tokens", str(chunk_tokens)),
        *("--max-num-seqs", str(MAX_RUNNING)),
        "--no-enable-log-requests",
        "--enable-prefix-caching" if serving.prefix_cache else "--no-enable-prefix-caching",
        *extra,
    )
    return ServerCommand(name, command, environment, port)
