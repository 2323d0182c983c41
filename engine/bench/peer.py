"""vLLM on the other end of a pipe: a script for vLLM's own Python. It imports nothing of Diptych.

    python peer.py '{"model": .., "threads": 2, "kv_bytes": .., "max_len": ..}'

The commands are those of the table in this folder's README; `worker.py` takes from here what does
not depend on the engine. The set-up is what vLLM's documentation recommends for x86: tcmalloc and
Intel's OpenMP preloaded, threads bound to cores, a compiled model. The first line that the script
writes names what is missing.

Life: the script starts itself again with the libraries preloaded, makes the engine, writes one line
when that is ready, then answers each line of stdin with one line.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

#: Takes a command's values by name; gives what is answered.
Command = Callable[..., dict[str, Any]]

#: In the environment after the second start: which libraries are missing, or "all" for none.
MARK = "VLLM_PEER_PRELOADED"


def preload(options: dict[str, Any]) -> None:
    """Start this script again, in the same process, under vLLM's recommended environment."""
    cores = sorted(os.sched_getaffinity(0))[: options["threads"]]
    core_list = ",".join(map(str, cores))
    libraries = {"tcmalloc": _tcmalloc(), "Intel OpenMP": _intel_openmp()}
    missing = [name for name, path in libraries.items() if not path]
    kv_gib = -(-options["kv_bytes"] // (1 << 30))
    settings = {
        MARK: ", ".join(missing) or "all",
        "LD_PRELOAD": ":".join(path for path in libraries.values() if path),
        "OMP_NUM_THREADS": str(len(cores)),
        # what vLLM sets for its own worker processes; here the worker is this process
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{core_list}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_CPU_OMP_THREADS_BIND": core_list,
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and model in one process: no IPC
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    if not libraries["Intel OpenMP"]:
        settings["GOMP_CPU_AFFINITY"] = core_list.replace(",", " ")
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)


def _tcmalloc() -> str | None:
    """Return the path of the library that vLLM bundles, or the name of the system's."""
    bundled = sorted(Path(sys.prefix).glob("lib/python*/site-packages/vllm/libs/libtcmalloc*.so*"))
    if bundled:
        return str(bundled[0])
    for name in ("tcmalloc_minimal", "tcmalloc"):
        library = ctypes.util.find_library(name)
        if library:
            return library
    return None


def _intel_openmp() -> str | None:
    path = Path(sys.prefix) / "lib" / "libiomp5.so"
    return str(path) if path.exists() else None


class BenchEngine:
    """What both engines do: the commands are its public methods. A subclass drives its engine."""

    setup: dict[str, Any]  #: What the result says about the engine; a subclass sets it.

    def __init__(self, vocab: int, seed: int) -> None:
        """`vocab` is the number of the model's ids; `seed` decides the random prompts."""
        self._vocab = vocab
        self._random = random.Random(seed)
        self._live: list[Any] = []  #: Keys of the requests that decode.
        self._request_count = 0

    def _add(self, prompt_ids: list[int], max_tokens: int) -> Any:
        """Submit a greedy request; return its key."""
        raise NotImplementedError

    def _step(self) -> list[Any]:
        """Run a step; return the keys of the requests that got a token."""
        raise NotImplementedError

    def _end_all(self) -> None:
        """End the requests that decode."""
        raise NotImplementedError

    def decode(self, batch: int, context: int, room: int) -> dict[str, Any]:
        """Bring `batch` sequences of `context` random tokens to the point where they decode.

        Each may grow by `room` tokens. The prompts are computed once for the prefix cache, then
        again: so all begin to decode within a few steps.
        """
        self._end_all()
        prompts = [self._prompt(context) for _ in range(batch)]
        for max_tokens in (1, room):
            self._live = [self._add(prompt_ids, max_tokens) for prompt_ids in prompts]
            begun: set[Any] = set()
            while len(begun) < batch:
                begun.update(self._step())
        return {}

    def step(self, times: int) -> dict[str, Any]:
        """Return the milliseconds of each of `times` decode steps over all sequences."""
        times_ms: list[float] = []
        for _ in range(times):
            started_at = time.perf_counter()
            keys = self._step()
            times_ms.append((time.perf_counter() - started_at) * 1e3)
            assert len(keys) == len(self._live), (len(keys), len(self._live))
        return {"ms": times_ms}

    def prefill(self, prompt: int, times: int) -> dict[str, Any]:
        """Return the milliseconds from a new random prompt to its first token, `times` times."""
        self._end_all()
        times_ms: list[float] = []
        for _ in range(times):
            prompt_ids = self._prompt(prompt)
            started_at = time.perf_counter()
            self._add(prompt_ids, 1)
            while not self._step():
                pass
            times_ms.append((time.perf_counter() - started_at) * 1e3)
        return {"ms": times_ms}

    def _prompt(self, length: int) -> list[int]:
        """Return random ids; 0 and 1 are special tokens of the random models."""
        return self._random.choices(range(2, self._vocab), k=length)


def answer_commands(
    engine: BenchEngine, commands: TextIO, answers: TextIO, **others: Command
) -> None:
    """Say that the engine is ready, then answer each line of `commands`, until these end.

    `others` are commands that the engine has no method for.
    """
    print(json.dumps({"ready": engine.setup}), file=answers)
    handlers: dict[str, Command] = {
        "decode": engine.decode,
        "step": engine.step,
        "prefill": engine.prefill,
        **others,
    }
    for line in commands:
        command = json.loads(line)
        handler = handlers[command.pop("do")]
        print(json.dumps(handler(**command)), file=answers)


def divert_stdout() -> TextIO:
    """Return the pipe for answers. What libraries print goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


class PeerEngine(BenchEngine):
    """vLLM in this process, greedy, at its own default limits."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Load and compile the model. Raises ImportError where vLLM is not installed."""
        import vllm

        self._make_sampling = vllm.SamplingParams
        self._engine = vllm.LLM(
            model=options["model"],
            dtype="bfloat16",
            max_model_len=options["max_len"],
            skip_tokenizer_init=True,
        ).llm_engine
        super().__init__(self._engine.model_config.get_vocab_size(), options.get("seed", 0))
        self.setup = self._describe(vllm.__version__)

    def _describe(self, version: str) -> dict[str, Any]:
        """Return what the result says about this engine."""
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

    def _add(self, prompt_ids: list[int], max_tokens: int) -> str:
        self._request_count += 1
        request_id = str(self._request_count)
        sampling = self._make_sampling(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(request_id, {"prompt_token_ids": prompt_ids}, sampling)
        return request_id

    def _step(self) -> list[str]:
        return [output.request_id for output in self._engine.step()]

    def _end_all(self) -> None:
        if self._live:
            self._engine.abort_request(self._live)
        self._live = []


def serve(options: dict[str, Any]) -> None:
    """Answer commands until stdin ends."""
    answers = divert_stdout()
    try:
        engine = PeerEngine(options)
    except ImportError as error:
        print(json.dumps({"error": f"{sys.executable} cannot import vLLM: {error}"}), file=answers)
        return
    answer_commands(engine, sys.stdin, answers)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules would hide those of vLLM with the same names
    engine_options = json.loads(sys.argv[1])
    if MARK not in os.environ:
        preload(engine_options)
    serve(engine_options)
