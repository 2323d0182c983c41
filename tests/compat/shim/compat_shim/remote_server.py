"""Takes the place of vLLM's `tests/utils.py`: its "remote server" is the one that runs already.

The names are those that the tests import. Each client belongs to the proxy at `COMPAT_URL`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

VLLM_PATH = Path(os.environ["COMPAT_SUITE"])
ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}


class RemoteOpenAIServer:
    """A context manager that starts nothing. Server flags are recorded and have no effect."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self, model: str, vllm_serve_args: list[str] | None = None, **options: Any
    ) -> None:
        self.model = model
        self.flags = list(vllm_serve_args or [])
        self.options = options
        self.show_hidden_metrics = False
        address = os.environ["COMPAT_URL"].removeprefix("http://")
        self.host, _, port = address.partition(":")
        self.port = int(port)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the server running: it serves the other tests, too."""

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), **self._with_defaults(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._with_defaults(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url_root, **self._with_defaults(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url_root, **self._with_defaults(options))

    def _with_defaults(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600, **options}


def multi_gpu_only(*, num_gpus: int = 2) -> Callable[[Callable], Callable]:
    """Skip tests that need several GPUs, as vLLM's suite does on a machine without them."""
    return pytest.mark.skip(reason=f"needs {num_gpus} GPUs")


def multi_gpu_test(*, num_gpus: int) -> Callable[[Callable], Callable]:
    return multi_gpu_only(num_gpus=num_gpus)


def create_new_process_for_each_test(method: str | None = None) -> Callable[[Callable], Callable]:
    """Run the test in this process: nothing of vLLM is loaded here."""

    def unchanged(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(*arguments: Any, **named: Any) -> Any:
            return test(*arguments, **named)

        return run

    return unchanged


requires_fp8 = pytest.mark.skip(reason="needs a GPU with FP8")
