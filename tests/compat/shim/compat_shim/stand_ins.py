"""Stands in for `vllm` and `torch`, so that test modules which import vLLM's internals can be collected.

The few pure names that tests over HTTP need are real here. Every other name is a mock, so a test of vLLM's internals
fails: the sorting table calls such a test an artefact.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import transformers

REPLACED_PACKAGES = ("vllm", "torch")


def local_tokenizer(*positional: object, **named: object) -> transformers.PreTrainedTokenizerFast:
    """Return the served model's tokenizer, whatever model the test names."""
    return transformers.PreTrainedTokenizerFast.from_pretrained(os.environ["COMPAT_MODEL"])


class ServedModelConfig:
    """Takes the place of `vllm.config.ModelConfig`, of which tests ask the vocabulary's size."""

    def __init__(self, **settings: object) -> None:
        self.settings = settings

    def get_vocab_size(self) -> int:
        config = json.loads((Path(os.environ["COMPAT_MODEL"]) / "config.json").read_text())
        return int(config["vocab_size"])


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _previous_minor_version() -> str:
    return "0.32"


def _no_platform() -> SimpleNamespace:
    """Return a platform that is neither ROCm nor XPU nor anything else that a test asks about."""
    platform = MagicMock(name="current_platform")
    for question in ("is_rocm", "is_xpu", "is_tpu", "is_cpu", "is_cuda"):
        getattr(platform, question).return_value = False
    return platform


class ValidationError(ValueError):
    """Takes the place of vLLM's own errors."""


#: module -> names that are real
REAL_NAMES: dict[str, dict[str, Any]] = {
    "vllm": {
        "__version__": os.environ.get("COMPAT_SERVER_VERSION", ""),
        "envs": MagicMock(name="envs", VLLM_USE_RUST_FRONTEND=False),
    },
    "vllm.version": {
        "__version__": os.environ.get("COMPAT_SERVER_VERSION", ""),
        "_prev_minor_version": _previous_minor_version,
    },
    "vllm.tokenizers": {"get_tokenizer": local_tokenizer},
    "vllm.config": {"ModelConfig": ServedModelConfig},
    "vllm.platforms": {"current_platform": _no_platform()},
    "vllm.utils.network_utils": {"get_open_port": free_port},
    "vllm.exceptions": {"VLLMValidationError": ValidationError},
    "vllm.transformers_utils.repo_utils": {
        "hf_api": lambda: SimpleNamespace(snapshot_download=lambda *names, **named: "/nowhere/lora")
    },
    "vllm.model_executor.model_loader.weight_utils": {
        "download_weights_from_hf": lambda name, **named: name
    },
    "torch": {
        "long": "int64",
        "iinfo": lambda kind: SimpleNamespace(min=-(2**63), max=2**63 - 1),
        "float16": "float16",
        "bfloat16": "bfloat16",
        "float32": "float32",
    },
}


class StandInModule(ModuleType):
    """A module whose unknown names are mocks."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        whole_name = f"{self.__name__}.{name}"
        # A module with real names is one, though a test may be the first to import it from here.
        value = (
            import_module(whole_name) if whole_name in REAL_NAMES else MagicMock(name=whole_name)
        )
        setattr(self, name, value)
        return value


class StandInFinder(MetaPathFinder, Loader):
    """Finds every module of the replaced packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in REPLACED_PACKAGES:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(REAL_NAMES.get(module.__name__, {}))


def install() -> Callable[[], None]:
    """Put the stand-ins in front of installed packages; return what takes them away again."""
    finder = StandInFinder()
    sys.meta_path.insert(0, finder)
    transformers.AutoTokenizer.from_pretrained = staticmethod(local_tokenizer)
    return lambda: sys.meta_path.remove(finder)
