"""What UCX's settings leave it to use, told by their text (pure).

UCX is the library below NIXL. `UCX_TLS` names its transports and `UCX_NET_DEVICES` the network
devices, both from the environment of the process. UCX itself tells nobody what it chose.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple


class UcxFamily(NamedTuple):
    """Transports of UCX with one purpose, as UCX_TLS names them.

    Source: UCX's FAQ, "Which transports does UCX use?".
    """

    names: frozenset[str]
    #: Names of groups that contain these transports, and others.
    groups: frozenset[str]


CMA_TRANSPORTS = UcxFamily(frozenset({"cma"}), frozenset({"all", "sm", "shm"}))
CUDA_TRANSPORTS = UcxFamily(frozenset({"cuda"}), frozenset({"all"}))
RDMA_TRANSPORTS = UcxFamily(frozenset({"rc", "dc", "ud"}), frozenset({"all", "ib"}))


def ucx_permits(ucx_tls: str, family: UcxFamily) -> bool:
    """Return whether UCX_TLS leaves UCX a transport of the family.

    UCX_TLS is a list of names, or `^` and the names that are left out; empty permits everything.
    `rc_mlx5` counts as `rc`, and `ud:aux` as `ud`. A group that is left out takes the family with
    it; single names do so only if all of the family's are left out.
    """
    if not ucx_tls:
        return True
    listed = {word.partition(":")[0].partition("_")[0] for word in ucx_tls.lstrip("^").split(",")}
    if ucx_tls.startswith("^"):
        return not (listed & family.groups) and not family.names <= listed
    return bool(listed & (family.names | family.groups))


def ucx_permits_rdma_devices(
    net_devices: str, *, rdma_devices: Set[str], interfaces: Set[str]
) -> bool:
    """Return whether UCX_NET_DEVICES leaves UCX an RDMA device.

    UCX_NET_DEVICES is a list of names, or `^` and the names that are left out; empty, or `all`,
    permits everything. An RDMA device stands there with its port (`mlx5_0:1`), a network interface
    without. `rdma_devices` and `interfaces` are the names of this host's. A listed name that is
    none of the interfaces counts as an RDMA device, so that no spelling of one is overlooked.
    """
    if not net_devices:
        return True
    listed = {word.partition(":")[0] for word in net_devices.lstrip("^").split(",")}
    if net_devices.startswith("^"):
        return not rdma_devices or not rdma_devices <= listed
    return not listed <= interfaces
