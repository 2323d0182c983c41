"""One thread, as on a laptop's worker: tests share two cores with live clusters.

A test that is a coroutine function runs in an event loop of its own. Property tests try the same
examples every time; `--hypothesis-profile default` tries new ones.
"""

import asyncio
import gc
import inspect
import os
import ssl
from functools import cache
from typing import Any

import httpx._transports.default
import pytest
import torch
from hypothesis import settings

from tests.support.share import files_of_share

if not torch.cuda.is_available():  # Triton's kernels by its interpreter: read when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

#: Files and folders whose tests go to one process, by what they share: a scheduler of xdist sees
#: names, and no marks.
SHARED_PROCESSES = {
    # They start clusters. Most share one, and two that start at once on two cores overload Ray.
    "clusters": (
        "tests/live/",
        "tests/test_readme.py",
        "tests/test_examples.py",
        "tests/test_install.py",
        "tests/cluster/test_bench_live.py",
    ),
    # They import transformers, which takes eight seconds.
    "transformers": (
        "tests/engine/test_errors.py",
        "tests/engine/test_golden.py",
        "tests/engine/test_sampler.py",
        "tests/engine/test_sampling.py",
    ),
    # They calibrate torch's products of the same sizes, once in each process.
    "linears": ("tests/engine/test_kernels.py", "tests/engine/test_linear.py"),
    # They import clients of OpenAI and Anthropic, which take three seconds each.
    "clients": (
        "tests/cluster/test_anthropic.py",
        "tests/cluster/test_lenient.py",
        "tests/cluster/test_published_shapes.py",
        "tests/cluster/test_responses.py",
        "tests/cluster/test_sdks.py",
    ),
}

_make_ssl_context = httpx._transports.default.create_ssl_context
_default_ssl_context = cache(_make_ssl_context)


def _shared_ssl_context(
    verify: Any = True, cert: Any = None, trust_env: bool = True
) -> ssl.SSLContext:
    """Return what httpx makes for a client, the same for all that ask for nothing special.

    Each new client, also for plain HTTP, would read all of the machine's certificates: 36 ms.
    """
    if verify is True and cert is None:
        return _default_ssl_context(trust_env=trust_env)
    return _make_ssl_context(verify=verify, cert=cert, trust_env=trust_env)


httpx._transports.default.create_ssl_context = _shared_ssl_context


@pytest.fixture(scope="module", autouse=True)
def _nothing_old_to_collect() -> None:
    """Keep the garbage collector from all that the tests before this file have left.

    Imported modules and the tests that pytest collected are a million objects. A full collection of these takes 0.6 s, and
    each gateway that starts in a test asks for one.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def _no_cluster_notes(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("runtime"))


@pytest.fixture(autouse=True)
def _without_other_clusters(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _no_cluster_notes: str
) -> None:
    """Commands find no cluster that runs beside the tests: theirs are stand-ins."""
    if not request.node.get_closest_marker("cluster"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", _no_cluster_notes)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process a file at a time, and all files of `SHARED_PROCESSES` that share to one."""
    from xdist.scheduler import LoadFileScheduling

    class SharedProcesses(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            for shared, names in SHARED_PROCESSES.items():
                if nodeid.startswith(names):
                    return shared
            return super()._split_scope(nodeid)

    return SharedProcesses(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", metavar="K/N", help="of the chosen files only the Kth, and every Nth behind it"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the files of other shares, behind what `-m` and `-k` have left out.

    A file stays whole, as its tests may share a cluster.
    """
    share = config.getoption("share")
    if not share:
        return
    chosen = files_of_share({_file_of(item) for item in items}, share)
    config.hook.pytest_deselected(items=[item for item in items if _file_of(item) not in chosen])
    items[:] = [item for item in items if _file_of(item) in chosen]


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True
