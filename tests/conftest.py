"""One thread, as on a laptop's worker: tests share two cores with live clusters.

A test that is a coroutine function runs in an event loop of its own. Property tests try the same examples every time; `--hypothesis-profile default` tries new ones.
"""

import asyncio
import inspect
import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():  # Triton's kernels by its interpreter: read when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True
