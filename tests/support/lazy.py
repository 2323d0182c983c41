"""Modules that are imported when something of them is first used.

Every process of pytest collects every file. The SDKs and libraries that only a few files use take
seconds to import, and so only those processes pay that run these files.
"""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for a module until one of its public attributes is asked for.

    It has no others: pytest asks everything in a test file for `__test__` and the like.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
