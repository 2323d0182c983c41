"""vLLM on the other end of a pipe: a script for vLLM's own Python. It imports nothing of Diptych.

    python peer.py '{"model": .., "threads": 2, "kv_bytes": .., "max_len": ..}'

It answers JSON lines as `worker.py` does (see the table in this folder's README). The set-up is
what vLLM's documentation recommends for x86: tcmalloc and Intel's OpenMP preloaded, threads bound
to cores, compiled model. What is missing is named in the first line it writes.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

MARK = "VLLM_PEER_PRELOADED"  #: in the environment after the start with the libraries preloaded


def preload(options: dict[str, Any]) -> None:
    """Starts this script again, in the same process, under vLLM's recommended environment."""
    cores = sorted(os.sched_getaffinity(0))[: options["threads"]]
    listed = ",".join(map(str, cores))
    found = {"tcmalloc": _tcmalloc(), "Intel OpenMP": _intel_openmp()}
    libraries = [path for path in found.values() if path]
    missing = [name for name, path in found.items() if not path]
    gib = -(-options["kv_bytes"] // (1 << 30))
    settings = {
        MARK: ", ".join(missing) or "all",
        "LD_PRELOAD": ":".join(libraries),
        "OMP_NUM_THREADS": str(len(cores)),
        # what vLLM sets for its own worker processes; here the worker is this process
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{listed}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_CPU_OMP_THREADS_BIND": listed,
        "VLLM_CPU_KVCACHE_SPACE": str(gib),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and model in one process: no IPC
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    if not found["Intel OpenMP"]:
        settings["GOMP_CPU_AFFINITY"] = listed.replace(",", " ")
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)


def _tcmalloc() -> str | None:
    bundled = sorted(Path(sys.prefix).glob("lib/python*/site-packages/vllm/libs/libtcmalloc*.so*"))
    names = ("tcmalloc_minimal", "tcmalloc")
    system = [name for name in map(ctypes.util.find_library, names) if name]
    return str(bundled[0]) if bundled else next(iter(system), None)


def _intel_openmp() -> str | None:
    path = Path(sys.prefix) / "lib" / "libiomp5.so"
    return str(path) if path.exists() else None


class Peer:
    """vLLM in this process, greedy, at its own default limits."""

    def __init__(self, options: dict[str, Any]) -> None:
        import vllm

        self._sampling = vllm.SamplingParams
        self._engine = vllm.LLM(
            model=options["model"],
            dtype="bfloat16",
            max_model_len=options["max_len"],
            skip_tokenizer_init=True,
        ).llm_engine
        self._random = random.Random(options.get("seed", 0))
        self._vocab = self._engine.model_config.get_vocab_size()
        self._live: list[str] = []
        self._count = 0
        self.setup = self._describe(vllm.__version__)

    def _describe(self, version: str) -> dict[str, Any]:
        import torch

        config = self._engine.vllm_config
        missing = os.environ[MARK]
        return {
            "name": f"vLLM {version}",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "preload": os.environ["LD_PRELOAD"].split(":"),
            "missing": [] if missing == "all" else missing.split(", "),
            "environment": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(("KMP_", "OMP_", "GOMP_", "VLLM_CPU_"))
            },
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "block_size": config.cache_config.block_size,
            "compilation": config.compilation_config.mode.name,
        }

    def decode(self, batch: int, context: int, room: int) -> dict[str, Any]:
        """`batch` sequences of `context` random tokens, in their KV and ready to decode.

        Once for the prefix cache, then again: so all begin to decode within a few steps.
        """
        self._clear()
        prompts = [self._prompt(context) for _ in range(batch)]
        for tokens in (1, room):
            self._live = [self._add(ids, tokens) for ids in prompts]
            begun: set[str] = set()
            while len(begun) < batch:
                begun.update(output.request_id for output in self._engine.step())
        return {}

    def step(self, times: int) -> dict[str, Any]:
        """Milliseconds of each of `times` decode steps over all sequences."""
        took = []
        for _ in range(times):
            began = time.perf_counter()
            outputs = self._engine.step()
            took.append((time.perf_counter() - began) * 1e3)
            assert len(outputs) == len(self._live), (len(outputs), len(self._live))
        return {"ms": took}

    def prefill(self, prompt: int, times: int) -> dict[str, Any]:
        """Milliseconds from a new random prompt to its first token, `times` times."""
        self._clear()
        took = []
        for _ in range(times):
            ids = self._prompt(prompt)
            began = time.perf_counter()
            self._add(ids, 1)
            while not self._engine.step():
                pass
            took.append((time.perf_counter() - began) * 1e3)
        return {"ms": took}

    def _prompt(self, length: int) -> list[int]:
        return self._random.choices(range(2, self._vocab), k=length)

    def _add(self, ids: list[int], tokens: int) -> str:
        self._count += 1
        name = str(self._count)
        params = self._sampling(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": ids}, params)
        return name

    def _clear(self) -> None:
        if self._live:
            self._engine.abort_request(self._live)
        self._live = []


def serve(options: dict[str, Any]) -> None:
    """Answers commands until stdin ends. What vLLM prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        peer = Peer(options)
    except ImportError as error:
        print(json.dumps({"error": f"{sys.executable} cannot import vLLM: {error}"}), file=answers)
        return
    print(json.dumps({"ready": peer.setup}), file=answers)
    commands: dict[str, Any] = {"decode": peer.decode, "step": peer.step, "prefill": peer.prefill}
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(commands[command.pop("do")](**command)), file=answers)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its names are no modules of vLLM's
    chosen = json.loads(sys.argv[1])
    if MARK not in os.environ:
        preload(chosen)
    serve(chosen)
