"""Starts a container as a process in namespaces of its own, on an overlay of this machine's root."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from . import settings
from .api import Object
from .images import Image
from .volumes import Volume

HIDDEN_FOLDERS = ("/tmp", "/run", "/work")  #: A pod has its own ones.
NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")


class SandboxError(Exception):
    """A container cannot be started as its pod wants. The message says why."""


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=check, capture_output=True, text=True)


@dataclass(slots=True)
class Network:
    """A pod's network namespace on the box's bridge."""

    number: int  #: The last number of the pod's address.
    name: str = field(init=False)
    address: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"{settings.NAMESPACE}-{self.number}"
        self.address = f"{settings.SUBNET}.{self.number}"

    @property
    def _host_end(self) -> str:
        return f"kpod{self.number}"

    def make(self) -> None:
        self.remove()
        run("ip", "netns", "add", self.name)
        end = ("type", "veth", "peer", "name", "eth0", "netns", self.name)
        run("ip", "link", "add", self._host_end, *end)
        run("ip", "link", "set", self._host_end, "master", settings.BRIDGE, "up")
        self._inside("addr", "add", f"{self.address}/24", "dev", "eth0")
        self._inside("link", "set", "eth0", "up")
        self._inside("link", "set", "lo", "up")
        self._inside("route", "add", "default", "via", settings.GATEWAY)

    def _inside(self, *command: str) -> None:
        run("ip", "-n", self.name, *command)

    def remove(self) -> None:
        """End every process in it and take it away."""
        for process_id in run("ip", "netns", "pids", self.name, check=False).stdout.split():
            run("kill", "-KILL", process_id, check=False)
        run("ip", "netns", "del", self.name, check=False)
        run("ip", "link", "del", self._host_end, check=False)

    def exists(self) -> bool:
        return Path(f"/run/netns/{self.name}").exists()


@dataclass(frozen=True, slots=True)
class ContainerOrder:
    """Everything that a container's start needs."""

    container: Object
    pod: Object
    image: Image
    network: Network
    volumes: dict[str, Volume]
    environment: dict[str, str]
    folder: Path  #: For the container's own layer; made anew for every start.


def user_options(pod: Object, container: Object, image: Image) -> list[str]:
    """Return the command that takes on the container's user, groups and capabilities.

    Raises SandboxError if the container must not run as root and would.
    """
    pod_security = pod["spec"].get("securityContext") or {}
    security = pod_security | (container.get("securityContext") or {})
    user = security.get("runAsUser", image.user)
    if security.get("runAsNonRoot") and user == 0:
        raise SandboxError("container has runAsNonRoot and image will run as root")

    group = security.get("runAsGroup", user)
    options = ["setpriv", "--reuid", str(user), "--regid", str(group)]
    groups = [str(number) for number in pod_security.get("supplementalGroups", [])]
    if "fsGroup" in pod_security:
        groups.append(str(pod_security["fsGroup"]))
    options += ["--groups", ",".join(groups)] if groups else ["--clear-groups"]

    if security.get("allowPrivilegeEscalation") is False:
        options.append("--no-new-privs")
    capabilities = security.get("capabilities") or {}
    if "ALL" in capabilities.get("drop", []):
        kept = [f"+{name.lower()}" for name in capabilities.get("add", [])]
        bounding = ",".join(["-all", *kept])
        options += ["--inh-caps=-all", f"--bounding-set={bounding}"]
    return options


def start(order: ContainerOrder, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the container and return the process whose child is the container's first process."""
    script = _root_script(order)
    in_network = ["nsenter", f"--net=/run/netns/{order.network.name}"]
    isolated = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
    return subprocess.Popen(
        [*in_network, *isolated, "bash", "-c", script],
        env=order.environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def first_process(starter: subprocess.Popen[bytes]) -> int | None:
    """Return the container's first process, once it has a root of its own."""
    children = Path(f"/proc/{starter.pid}/task/{starter.pid}/children")
    try:
        process_id = int(children.read_text().split()[0])
        has_own_root = os.readlink(f"/proc/{process_id}/root") != "/"
    except (OSError, IndexError):
        return None
    return process_id if has_own_root else None


def enter_command(process_id: int) -> list[str]:
    """Return the command that runs another one beside a container's first process, as root."""
    return ["nsenter", "--target", str(process_id), *NAMESPACES, "--root", "--wd"]


def command_line(container: Object, environment: dict[str, str]) -> list[str]:
    """Return the container's command, with $(NAME) replaced as Kubernetes does."""
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    if not words:
        raise SandboxError("the container names no command, and the box knows none of its image")
    return [expand(word, environment) for word in words]


def expand(text: str, environment: dict[str, str]) -> str:
    for name, value in environment.items():
        text = text.replace(f"$({name})", value)
    return text


def _root_script(order: ContainerOrder) -> str:
    """Return the shell script that mounts the container's root and becomes its first process."""
    shutil.rmtree(order.folder, ignore_errors=True)
    for name in ("upper", "work", "root"):
        (order.folder / name).mkdir(parents=True)
    (order.folder / "upper").chmod(0o755)
    root = str(order.folder / "root")
    lines = [
        "set -e",
        *_base_lines(order, root),
        *_image_lines(order.image, root),
        *_name_lines(order, root),
    ]
    for mount in sorted(order.container.get("volumeMounts") or [], key=_mount_path):
        lines += _volume_lines(order.volumes[mount["name"]], mount, root)
    security = order.container.get("securityContext") or {}
    if security.get("readOnlyRootFilesystem"):
        lines.append(f"mount -o remount,bind,ro {root}")

    command = command_line(order.container, order.environment)
    options = user_options(order.pod, order.container, order.image)
    working_folder = order.container.get("workingDir", order.image.home)
    shell = ["sh", "-c", 'cd "$0" && exec "$@"', working_folder, *command]
    lines.append(f"exec chroot {root} {shlex.join([*options, *shell])}")
    return "\n".join(lines)


def _mount_path(mount: Object) -> str:
    return mount["mountPath"]


def _base_lines(order: ContainerOrder, root: str) -> list[str]:
    layers = f"lowerdir=/,upperdir={order.folder}/upper,workdir={order.folder}/work"
    lines = [
        "mount --make-rprivate /",
        f"mount -t overlay overlay -o {layers} {root}",
        f"mount -t proc proc {root}/proc",
        f"mount --rbind /dev {root}/dev",
        f"mount -t tmpfs -o size=64m,mode=1777 tmpfs {root}/dev/shm",
        # A new one shows the pod's own network devices. UCX takes only those that it finds there.
        f"mount -t sysfs -o ro sysfs {root}/sys",
        f"mount --rbind /sys/fs/cgroup {root}/sys/fs/cgroup",
    ]
    for folder in HIDDEN_FOLDERS:
        lines.append(f"mkdir -p {root}{folder}")
        lines.append(f"mount -t tmpfs -o mode=1777 tmpfs {root}{folder}")
    return lines


def _image_lines(image: Image, root: str) -> list[str]:
    lines: list[str] = []
    for target, source in image.shown.items():
        place = shlex.quote(f"{root}{target}")
        lines.append(f"mkdir -p $(dirname {place})")
        lines.append(f"mkdir -p {place}" if source.is_dir() else f"touch {place}")
        lines.append(f"mount --bind -o ro {shlex.quote(str(source))} {place}")
    # Python may lie in root's home, which others must not enter.
    lines.append(f"chmod a+x {root}/root")
    for path, text in image.programs.items():
        lines.append(f"rm -f {root}{path}")
        lines.append(f"printf %s {shlex.quote(text)} > {root}{path}")
        lines.append(f"chmod 755 {root}{path}")
    if image.home != "/":
        lines.append(f"mkdir -p {root}{image.home}")
        for path, source in image.copied.items():
            lines.append(f"install -D {shlex.quote(str(source))} {root}{path}")
        lines.append(f"chown -R {image.user}:{image.user} {root}{image.home}")
    return lines


def _name_lines(order: ContainerOrder, root: str) -> list[str]:
    name = order.pod["metadata"]["name"]
    domain = "svc.cluster.local"
    search = f"{order.pod['metadata']['namespace']}.{domain} {domain} cluster.local"
    resolver = f"nameserver {settings.GATEWAY}\nsearch {search}\noptions ndots:5\n"
    hosts = f"127.0.0.1 localhost\n{order.network.address} {name}\n"
    texts = {"resolv.conf": resolver, "hosts": hosts, "hostname": f"{name}\n"}
    lines = [f"hostname {name}"]
    for file, text in texts.items():
        lines.append(f"rm -f {root}/etc/{file}")
        lines.append(f"printf %s {shlex.quote(text)} > {root}/etc/{file}")
    return lines


def _volume_lines(volume: Volume, mount: Object, root: str) -> list[str]:
    source = str(volume.folder / mount.get("subPath", ""))
    path = shlex.quote(mount["mountPath"])
    # Links such as /var/run lead where they lead in the pod, not on this machine.
    lines = [f"place={root}$(chroot {root} realpath -m {path})"]
    if os.path.isdir(source):
        lines.append('mkdir -p "$place"')
    else:
        lines.append('mkdir -p "$(dirname "$place")"')
        lines.append('touch "$place"')
    if volume.memory_size:
        lines.append(f'mount -t tmpfs -o size={volume.memory_size},mode=1777 tmpfs "$place"')
    elif volume.writable and not mount.get("readOnly"):
        lines.append(f'mount --bind {shlex.quote(source)} "$place"')
    else:
        lines.append(f'mount --bind -o ro {shlex.quote(source)} "$place"')
    return lines
