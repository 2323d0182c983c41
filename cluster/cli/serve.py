"""`diptych serve`: a whole cluster, on this machine or on a Ray cluster, until ^C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import fail
from .running import noted

if TYPE_CHECKING:
    from ..launch.local_cluster import LocalCluster
    from ..launch.supervisor import Supervised

WELCOME = """
  HTTP   {url}/v1   (OpenAI-compatible; model {model!r})
  gRPC   {grpc}   (diptych.v1.Inference)
  admin  {admin}   (diptych status, scale, flip, drain, top)
  see    {dashboard}

  try    diptych chat "What is prefill?"
  or     curl {url}/v1/chat/completions -H 'content-type: application/json' \\
           -d '{{"messages": [{{"role": "user", "content": "What is prefill?"}}]}}'

  Ray    {ray}

  ^C stops it
"""
RAY_JOINED = "use `ray` and `serve` as you do for the Ray cluster that was joined"
RAY_STARTED = """ray status, serve status, after
         {export}"""
EXPOSED_WARNING = """
  WARNING  The gateway listens on {host} and asks nobody for a key: whoever reaches it can use it.
           diptych keys add --file keys.yaml --tenant NAME, then --set gateway.api_keys_file=...
           Or: diptych serve --api-key KEY
"""
OPEN_RAY_WARNING = """
  WARNING  Ray asks nobody for a token (ray.auth: disabled): whoever reaches one of its ports can
           run code as this user.
"""


def serve(
    model: Annotated[
        str | None,
        typer.Argument(help="Checkpoint folder or Hugging Face id. Default: the bundled model."),
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers.")] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of HTTP and gRPC. Default: this machine only.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="DIPTYCH_API_KEYS",
            help="A key that clients need; may be given again. See also: diptych keys.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="The model's name in the API; if given again, further names."),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of a prompt and its answer, at most.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A file with a chat template, for the checkpoint's own.")
    ] = None,
    tool_format: Annotated[
        str | None,
        typer.Option(
            "--tool-format",
            "--tool-call-parser",
            help="How the model writes calls. Default: what its chat template shows.",
        ),
    ] = None,
    reasoning_format: Annotated[
        str | None,
        typer.Option(
            "--reasoning-format",
            "--reasoning-parser",
            help="How the model marks its reasoning. Default: what its chat template shows.",
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="What computes the model: diptych or vllm.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            "--lora-modules",
            metavar="NAME=FOLDER",
            help="A LoRA adapter, with --engine vllm; requests name it as the model. Repeatable.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option("-c", "--config", help="cluster.yaml")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Serve on the Ray cluster there, all nodes of it.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value.")
    ] = None,
) -> None:
    """Start a prefill/decode cluster, here or on a Ray cluster, and serve MODEL until ^C."""
    began = time.monotonic()
    flags: dict[str, Any] = {
        "model.path": model,
        "pools.prefill.replicas": prefill,
        "pools.decode.replicas": decode,
        "gateway.host": host,
        "gateway.http_port": port,
        "gateway.grpc_port": grpc_port,
        "gateway.api_key_hashes": _key_hashes(api_key or []) or None,
        "engine.kind": engine,
        "model.adapters": _adapters_of(adapter) if adapter else None,
        "model.max_model_len": max_model_len,
        "model.tool_format": tool_format,
        "model.reasoning_format": reasoning_format,
        "model.chat_template": str(chat_template.absolute()) if chat_template else None,
    }
    if served_model_name:
        flags["model.name"] = served_model_name[0]
        flags["model.served_names"] = served_model_name[1:]
    flags = {key: value for key, value in flags.items() if value is not None}
    cluster = _prepare(config, flags, override or [], ray_address=ray_address)

    def report_progress(line: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be closed
            typer.echo(f"[{time.monotonic() - began:5.1f} s] {line}")

    for served in cluster.models:
        report_progress(f"model {served.checkpoint.name}: {served.checkpoint.folder}")

    def run(supervised: Supervised | None) -> int:
        return _run_until_interrupted(cluster, report_progress, supervised)

    if ray_address:  # others started that Ray, and start it again
        exit_code = run(None)
    else:
        from ..launch.supervisor import supervise

        exit_code = supervise(run, report_progress)
    if exit_code:
        raise typer.Exit(exit_code)
    report_progress("stopped")


def _prepare(
    file: Path | None, flags: dict[str, Any], overrides: list[str], *, ray_address: str | None
) -> LocalCluster:
    """Return the cluster to start, or end the command with what is wrong with the settings.

    The settings are those of the file, over them the flags' by dotted keys, over them `KEY=VALUE`.
    """
    from ..config import ConfigError, load_config, parse_overrides

    try:
        settings = load_config(file, flags | parse_overrides(overrides))
        if settings.lacks_engine_python and not ray_address:
            from ..launch.engine_environment import find_python

            settings = settings.with_engine_python(find_python())
        # Wrong settings fail before this import, which loads gRPC and safetensors.
        from ..launch.local_cluster import prepare

        return prepare(settings, ray_address)
    except ConfigError as error:
        from .settings import with_suggestions

        fail(with_suggestions(str(error)))


def _key_hashes(keys: list[str]) -> list[str]:
    """Return the SHA-256 of keys, as the configuration has them; their text goes nowhere."""
    if not keys:
        return []
    from ..gateway.edge.keys import KEY_CHARS_MAX, sha256_of

    if not all(0 < len(key) <= KEY_CHARS_MAX for key in keys):
        fail(f"--api-key: a key has 1 to {KEY_CHARS_MAX} characters")
    return [sha256_of(key) for key in keys]


def _adapters_of(options: list[str]) -> dict[str, str]:
    """Return folder by name of the options `NAME=FOLDER`. Fails for another form."""
    adapters: dict[str, str] = {}
    for option in options:
        name, _, folder = option.partition("=")
        if not name or not folder:
            fail(f"--adapter {option}: expected NAME=FOLDER")
        if name in adapters:
            fail(f"--adapter: the name {name} is given twice")
        adapters[name] = folder
    return adapters


def _run_until_interrupted(
    cluster: LocalCluster,
    report_progress: Callable[[str], None],
    supervised: Supervised | None,
) -> int:
    """Run the cluster until one of `stop_signals()`, or until it is lost; return an exit code.

    Further signals are ignored while the cluster stops. A cluster is lost as `LocalCluster.watch`
    says; without a supervisor nobody watches for that.
    """
    from ..config import ConfigError
    from ..launch.ray_cluster import StartError
    from ..launch.supervisor import LOST_EXIT_CODE, ChildNote

    _interrupt_at_signal()
    exit_code = 0
    ready = False
    try:
        if supervised is None:
            cluster.start(report_progress)
        else:
            _exit_at_signal(report_progress, supervised)
            cluster.start(report_progress, lambda folder: supervised.tell(ChildNote(folder=folder)))
            supervised.tell(ChildNote(ready=True))
        _interrupt_once()
        ready = True
        report_progress("ready")
        typer.echo(welcome(cluster))
        with noted(
            cluster.models[0].checkpoint.name,
            _reachable(cluster.url),
            _reachable(_admin_url(cluster)),
        ):
            if supervised is None:
                threading.Event().wait()  # for ever: a signal ends it
            else:
                report_progress(cluster.watch(report_progress))
                exit_code = LOST_EXIT_CODE
    except KeyboardInterrupt:
        pass
    except (ConfigError, StartError) as error:
        typer.echo(f"diptych: {error}", err=True)
        exit_code = 1
    finally:
        _ignore_signals()
        with contextlib.suppress(OSError):  # a terminal may be gone
            report_progress("stopping")
        # What is half up, or lost, Ray cannot stop in time: that is the supervisor's work.
        if supervised is None or (ready and exit_code != LOST_EXIT_CODE):
            cluster.stop()
    return exit_code


def _interrupt_at_signal() -> None:
    """Raise KeyboardInterrupt on each signal that stops the cluster.

    While Ray is joined the exception may meet an import or a finalizer, where it is lost. Then the
    next signal raises it again.
    """
    from ..launch.supervisor import stop_signals

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in stop_signals():
        signal.signal(number, interrupt)


def _interrupt_once() -> None:
    """Raise KeyboardInterrupt on the first signal that stops the cluster; ignore further ones."""
    from ..launch.supervisor import stop_signals

    def interrupt(*_: object) -> None:
        _ignore_signals()
        raise KeyboardInterrupt

    for number in stop_signals():
        signal.signal(number, interrupt)


def _exit_at_signal(report_progress: Callable[[str], None], supervised: Supervised) -> None:
    """End this process at once on a signal that stops the cluster.

    Its supervisor ends what this process has started. If the supervisor was killed, which also
    sends a signal, this process does so itself. An exception would not do here: where it meets an
    import or a finalizer of Ray, it is lost.
    """
    from ..launch.supervisor import stop_signals

    def end(*_: object) -> None:
        _ignore_signals()
        # A terminal may be gone, or the signal has come in the middle of another line.
        with contextlib.suppress(OSError, RuntimeError):
            report_progress("stopping")
        supervised.clean_up_if_alone()
        os._exit(0)

    for number in stop_signals():
        signal.signal(number, end)


def _ignore_signals() -> None:
    from ..launch.supervisor import stop_signals

    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


def _admin_url(cluster: LocalCluster) -> str:
    """Return Control's URL."""
    from ..config import host_and_port

    control = cluster.config.control
    scheme = "https" if control.tls_cert else "http"
    return f"{scheme}://{host_and_port(control.host, control.port)}"


def _reachable(url: str) -> str:
    """Return the URL with this machine's own address in place of one that means all interfaces."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def welcome(cluster: LocalCluster) -> str:
    """Return where the cluster is, how to use it, and what is open to anybody."""
    gateway = cluster.config.gateway
    admin_url = _admin_url(cluster)
    ray = RAY_JOINED
    if cluster.ray_access:
        ray = RAY_STARTED.format(export=cluster.ray_access.export_line(admin_url))
    text = WELCOME.format(
        url=cluster.url,
        grpc=cluster.grpc_address,
        admin=admin_url,
        dashboard=f"{_reachable(admin_url)}/dashboard",
        model=cluster.models[0].checkpoint.name,
        ray=ray,
    )
    if gateway.exposed:
        text += EXPOSED_WARNING.format(host=gateway.host)
    if cluster.config.ray.auth == "disabled":
        text += OPEN_RAY_WARNING
    return text
