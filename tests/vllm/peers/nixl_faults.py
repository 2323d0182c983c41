"""What vLLM's own NixlConnector does when a transfer goes wrong, on a CPU. On demand, no test.

    OMP_NUM_THREADS=1 python -m tests.vllm.peers.nixl_faults --work /tmp/nixl_faults [--policy recompute] [--only kill]

Two processes run vLLM's `EngineCore` with that connector, one prefills (P) and one decodes (D), and
this one plays the proxy between them. The proxy's reference to P's blocks (`kv_transfer_params`) is
wrong, stale or used twice, or P is frozen or killed while D reads. Each case prints what a client
would get: why the answer ended (vLLM's HTTP server makes status 500 of `error`, and 200 of all
others), whose text it was, and how many blocks were still in use on each side. Nothing is judged.

The prompts end alike, as chat templates make them: an answer depends on the KV of all that is
before.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import make
from tests.support.live import free_port

BLOCK_TOKENS = 64
POOL_BLOCKS = 41  #: With vLLM's null block. A prompt of 8 blocks comes round every fifth time.
BLOCK_BYTES = 4 * BLOCK_TOKENS * 2 * 8 * 64 * 2  #: Of the model below, in bfloat16.
PROMPT_TOKENS = 8 * BLOCK_TOKENS
ANSWER_TOKENS = 16
LEASE_S = 8  #: vLLM's default is 30.
ANSWER_LIMIT_S = 40.0  #: Later it counts as a hang.
START_LIMIT_S = 300.0
MODEL = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
COMMON_END = [11, 12, 13, 14]  #: Of all prompts.
PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    # Copies by the kernel (CMA) would read a frozen process too, and in one call.
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "lo",
}
Reference = dict[str, Any]  #: vLLM's `kv_transfer_params`


@dataclass
class Question:
    """A prompt for a server; `reference` {}: without any transfer."""

    number: int
    prompt: list[int]
    reference: Reference
    tokens: int


@dataclass
class Reply:
    """What a client got."""

    ended: str  #: vLLM's finish reason, or that none came.
    token_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    reference: Reference = field(default_factory=dict)
    number: int = 0
    blocks_in_use: int = 0  #: When the answer ended.


@dataclass
class Finding:
    """One line of the table."""

    case: str
    ended: str
    outcome: str
    seconds: float
    prefill_blocks: int | str  #: In use after `settle`.
    decode_blocks: int | str
    remark: str = ""


# ---- the process that computes -------------------------------------------------------------------


def serve(pipe: Connection, model: Path, work: Path, policy: str, log: Path) -> None:
    """Runs vLLM's engine in a forked process, until the pipe is closed."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
    os.environ["DAMAGE_FILE"] = str(work / "damage")
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    logging.getLogger("vllm").addHandler(logging.StreamHandler())
    arguments = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        block_size=BLOCK_TOKENS,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=POOL_BLOCKS * BLOCK_BYTES,
        enable_prefix_caching=False,
        enforce_eager=True,
        async_scheduling=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="DamagingNixlConnector",
            kv_connector_module_path="tests.vllm.peers.damaging_connector",
            kv_role="kv_both",
            kv_buffer_device="cpu",
            kv_load_failure_policy=policy,  # type: ignore[arg-type]
            kv_connector_extra_config={"kv_lease_duration": LEASE_S},
        ),
    )
    config = arguments.create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    block_pool = core.scheduler.kv_cache_manager.block_pool  # type: ignore[attr-defined]
    all_free = block_pool.get_num_free_blocks()
    replies: dict[str, Reply] = {}
    pipe.send(Reply("ready"))
    while True:
        # As vLLM's own loop: it sleeps while there is nothing to do, and looks in between.
        has_work = core.scheduler.has_requests()
        while pipe.poll(0 if has_work else None):
            add_request(core, pipe.recv(), replies)
            has_work = True
        outputs_by_client, computed = core.step_fn()
        core.post_step(computed)
        for outputs in (outputs_by_client or {}).values():
            for output in outputs.outputs:
                reply = replies[output.request_id]
                reply.token_ids += output.new_token_ids
                reply.reference = output.kv_transfer_params or reply.reference
                if output.finished:
                    reply.ended = str(output.finish_reason)
                    reply.blocks_in_use = all_free - block_pool.get_num_free_blocks()
                    pipe.send(replies.pop(output.request_id))
        if not computed:
            time.sleep(0.001)


def add_request(core: Any, question: Question, replies: dict[str, Reply]) -> None:
    """Gives a question to the engine, as vLLM's front end would."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    request_id = f"request-{question.number}"
    replies[request_id] = Reply("", number=question.number)
    extra = {"kv_transfer_params": question.reference} if question.reference else None
    asked = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=question.prompt,
        mm_features=None,
        sampling_params=SamplingParams(
            temperature=0.0, max_tokens=question.tokens, ignore_eos=True, extra_args=extra
        ),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    core.add_request(*core.preprocess_add_request(asked))


class Server:
    """A process with an engine, as the proxy sees it."""

    numbers = itertools.count()

    def __init__(self, name: str, model: Path, work: Path, policy: str) -> None:
        self.name = name
        self._log = work / f"{name}-{next(self.numbers)}.log"
        self._pipe, childs_end = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(
            target=serve, args=(childs_end, model, work, policy, self._log), daemon=True
        )
        self.process.start()
        childs_end.close()
        self._waiting: dict[int, Future[Reply]] = {}
        self._ready: Future[Reply] = Future()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Takes replies until the process has ended; then nothing that is asked gets one."""
        try:
            while True:
                reply: Reply = self._pipe.recv()
                future = (
                    self._waiting.pop(reply.number, None) if self._ready.done() else self._ready
                )
                if future is not None:
                    future.set_result(reply)
        except (EOFError, OSError):
            for future in [self._ready, *self._waiting.values()]:
                if not future.done():
                    future.set_result(Reply(f"the process of {self.name} has ended"))

    def wait(self) -> None:
        """Waits until the engine is there; raises RuntimeError."""
        reply = self._ready.result(START_LIMIT_S)
        if reply.ended != "ready":
            raise RuntimeError(f"{self.name}: {reply.ended}: see {self._log}")

    def begin(
        self, prompt: list[int], reference: Reference, tokens: int = ANSWER_TOKENS
    ) -> Future[Reply]:
        """Asks, and returns where the reply comes."""
        question = Question(next(self.numbers), prompt, copy.deepcopy(reference), tokens)
        future: Future[Reply] = Future()
        self._waiting[question.number] = future
        try:
            self._pipe.send(question)
        except OSError:
            future.set_result(Reply(f"the process of {self.name} has ended"))
        return future

    def ask(self, prompt: list[int], reference: Reference, tokens: int = ANSWER_TOKENS) -> Reply:
        """Has a prompt answered greedily; waits as long as a client does."""
        return finish(self.begin(prompt, reference, tokens))

    def blocks_in_use(self) -> int | str:
        """Returns the blocks that are not free, by the end of steps that are made for it."""
        for _ in range(2):
            reply = self.ask([5], {}, tokens=1)
            if reply.ended != "length":
                return "does not serve"
        return reply.blocks_in_use

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid or 0, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def finish(future: Future[Reply]) -> Reply:
    """Waits for a reply as long as a client does."""
    began = time.monotonic()
    try:
        reply = future.result(ANSWER_LIMIT_S)
    except LateError:
        reply = Reply(f"no answer in {ANSWER_LIMIT_S:.0f} s")
    reply.seconds = time.monotonic() - began
    return reply


# ---- the proxy -----------------------------------------------------------------------------------


class Bench:
    """Both servers, and what each prompt's answer is without any transfer."""

    def __init__(self, work: Path, policy: str) -> None:
        self.work, self.policy = work, policy
        self.model = make(work / "model", "llama", **MODEL)
        self.prompts = [prompt(seed) for seed in range(3)]
        self.prefill = Server("prefill", self.model, work, policy)
        self.decode = Server("decode", self.model, work, policy)

    def start(self) -> None:
        """Waits for both servers, and has each prompt answered without a transfer."""
        self.prefill.wait()
        self.decode.wait()
        self.expected = [self.decode.ask(ids, {}).token_ids for ids in self.prompts]
        if len({tuple(answer) for answer in self.expected}) < 3:
            raise RuntimeError("the answers to the prompts do not differ: nothing could be seen")

    def restart_prefill(self) -> None:
        """Replaces P by a new process."""
        self.prefill.kill()
        self.prefill = Server("prefill", self.model, self.work, self.policy)
        self.prefill.wait()

    def restart_the_dead(self) -> str:
        """Replaces a process that a case has ended; returns what to remark of it."""
        remark = ""
        if not self.prefill.process.is_alive():
            self.restart_prefill()
            remark += "; P's process has ended"
        if not self.decode.process.is_alive():
            self.decode = Server("decode", self.model, self.work, self.policy)
            self.decode.wait()
            remark += "; D's process has ended"
        return remark

    def reference(self, index: int) -> Reference:
        """Has P compute a prompt; returns the reference that P gives to the proxy."""
        reply = self.prefill.ask(self.prompts[index], PREFILL_ONLY, tokens=1)
        if reply.ended != "length" or not reply.reference:
            raise RuntimeError(f"P gave no reference: {reply}")
        return reply.reference

    def whose(self, reply: Reply, index: int) -> str:
        """Says what came out, for a client who asked prompt `index`."""
        if reply.ended != "length":
            return f"{len(reply.token_ids)} tokens"
        if reply.token_ids == self.expected[index]:
            return "right text"
        for other, answer in enumerate(self.expected):
            if reply.token_ids == answer:
                return f"another's text: the answer to prompt {other}"
        same = [one == two for one, two in zip(reply.token_ids, self.expected[index], strict=False)]
        return f"wrong text: {same.count(False)} of {len(same)} ids differ"

    def settle(self) -> tuple[int | str, int | str]:
        """Waits until no block is in use, at most for two leases; returns what is in use then."""
        deadline = time.monotonic() + 2 * LEASE_S
        while True:
            left = self.prefill.blocks_in_use(), self.decode.blocks_in_use()
            if left == (0, 0) or time.monotonic() > deadline:
                return left
            time.sleep(1)

    def play(self, case: Callable[[Bench], tuple[Reply, int, str]]) -> Finding:
        """Plays a case, and describes what came of it."""
        reply, index, remark = case(self)
        outcome = self.whose(reply, index)
        prefill_blocks, decode_blocks = self.settle()
        remark += self.restart_the_dead()
        return Finding(
            (case.__doc__ or "").strip().rstrip("."),
            reply.ended,
            outcome,
            round(reply.seconds, 2),
            prefill_blocks,
            decode_blocks,
            remark,
        )


def prompt(seed: int) -> list[int]:
    """Returns a prompt whose last ids are every prompt's."""
    draw = random.Random(seed)
    return draw.choices(range(20, 500), k=PROMPT_TOKENS - len(COMMON_END)) + COMMON_END


# ---- cases: each returns the reply, whose prompt it was, and a remark ----------------------------


def undisturbed(bench: Bench) -> tuple[Reply, int, str]:
    """A reference as it should be."""
    return bench.decode.ask(bench.prompts[0], bench.reference(0)), 0, ""


def unknown_request(bench: Bench) -> tuple[Reply, int, str]:
    """A request that P does not know; the blocks are right."""
    reference = bench.reference(0) | {"remote_request_id": "nobody"}
    return bench.decode.ask(bench.prompts[0], reference), 0, ""


def unknown_request_with_anothers_blocks(bench: Bench) -> tuple[Reply, int, str]:
    """A request that P does not know, with another's blocks that are in use."""
    reference = bench.reference(1) | {"remote_request_id": "nobody"}
    return bench.decode.ask(bench.prompts[0], reference), 0, "the blocks hold prompt 1"


def no_blocks(bench: Bench) -> tuple[Reply, int, str]:
    """A reference without blocks."""
    reference = bench.reference(0) | {"remote_block_ids": None}
    return bench.decode.ask(bench.prompts[0], reference), 0, ""


def out_of_range_blocks(bench: Bench) -> tuple[Reply, int, str]:
    """Blocks that P does not have."""
    reference = bench.reference(0)
    reference["remote_block_ids"] = [
        [100_000 + block for block in group] for group in reference["remote_block_ids"]
    ]
    return bench.decode.ask(bench.prompts[0], reference), 0, ""


def used_twice(bench: Bench) -> tuple[Reply, int, str]:
    """The reference used a second time at once."""
    reference = bench.reference(0)
    first = bench.decode.ask(bench.prompts[0], reference)
    again = bench.decode.ask(bench.prompts[0], reference)
    return again, 0, f"first use: {bench.whose(first, 0)}"


def stale_after_reuse(bench: Bench) -> tuple[Reply, int, str]:
    """The reference used again when its blocks hold another prompt."""
    reference = bench.reference(0)
    bench.decode.ask(bench.prompts[0], reference)
    wanted = reference["remote_block_ids"]
    for round_number in range(60):
        other = bench.reference(1)
        same_blocks = other["remote_block_ids"] == wanted
        bench.decode.ask(bench.prompts[1], other)  # frees them on P
        if same_blocks:
            reply = bench.decode.ask(bench.prompts[0], reference)
            return reply, 0, f"P's blocks held prompt 1 (after {round_number + 1} prompts)"
    reply = bench.decode.ask(bench.prompts[0], reference)
    return reply, 0, "P's blocks held prompt 1 in another order (60 prompts)"


def of_another_prompt(bench: Bench) -> tuple[Reply, int, str]:
    """Another request's valid reference."""
    reply = bench.decode.ask(bench.prompts[0], bench.reference(1))
    return reply, 0, "the reference was of prompt 1"


def expired(bench: Bench) -> tuple[Reply, int, str]:
    """The reference used after its lease."""
    reference = bench.reference(0)
    time.sleep(LEASE_S + 4)
    return bench.decode.ask(bench.prompts[0], reference), 0, f"lease {LEASE_S} s, waited 4 s more"


def expired_and_reused(bench: Bench) -> tuple[Reply, int, str]:
    """The reference used after its lease, when its blocks hold another prompt."""
    reference = bench.reference(0)
    wanted = reference["remote_block_ids"]
    time.sleep(LEASE_S + 4)
    for round_number in range(60):
        other = bench.reference(1)
        same_blocks = other["remote_block_ids"] == wanted
        bench.decode.ask(bench.prompts[1], other)
        if same_blocks:
            reply = bench.decode.ask(bench.prompts[0], reference)
            return reply, 0, f"P's blocks held prompt 1 (after {round_number + 1} prompts)"
    reply = bench.decode.ask(bench.prompts[0], reference)
    return reply, 0, "P's blocks held prompt 1 in another order (60 prompts)"


def flipped_bit(bench: Bench) -> tuple[Reply, int, str]:
    """One bit flipped on the way."""
    reference = bench.reference(0)
    switch = bench.work / "damage"
    switch.touch()
    reply = bench.decode.ask(bench.prompts[0], reference)
    switch.unlink()
    return reply, 0, "exponent bit of one number"


def frozen(bench: Bench) -> tuple[Reply, int, str]:
    """P frozen while D reads, for longer than a client waits."""
    reference = bench.reference(0)
    bench.prefill.signal(signal.SIGSTOP)
    reply = bench.decode.ask(bench.prompts[0], reference)
    beside = bench.decode.ask(bench.prompts[1], {})
    bench.prefill.signal(signal.SIGCONT)
    held = beside.blocks_in_use
    return (
        reply,
        0,
        f"meanwhile another prompt on D: {bench.whose(beside, 1)}; D holds {held} blocks",
    )


def frozen_for_a_while(bench: Bench) -> tuple[Reply, int, str]:
    """P frozen while D reads, for longer than the lease; then P wakes up."""
    reference = bench.reference(0)
    bench.prefill.signal(signal.SIGSTOP)
    asked = bench.decode.begin(bench.prompts[0], reference)
    time.sleep(LEASE_S + 4)
    early = "; answered meanwhile" if asked.done() else ""
    bench.prefill.signal(signal.SIGCONT)
    return finish(asked), 0, f"frozen for {LEASE_S + 4} s{early}"


def killed_in_mid_read(bench: Bench) -> tuple[Reply, int, str]:
    """P killed while D reads."""
    reference = bench.reference(0)
    bench.prefill.signal(signal.SIGSTOP)
    asked = bench.decode.begin(bench.prompts[0], reference)
    time.sleep(2)
    early = "; answered before" if asked.done() else ""
    bench.prefill.kill()
    reply = finish(asked)
    bench.restart_prefill()
    return reply, 0, f"stopped, 2 s later killed{early}"


def killed_before(bench: Bench) -> tuple[Reply, int, str]:
    """P killed before D reads."""
    reference = bench.reference(0)
    bench.prefill.kill()
    reply = bench.decode.ask(bench.prompts[0], reference)
    bench.restart_prefill()
    return reply, 0, ""


CASES: tuple[Callable[[Bench], tuple[Reply, int, str]], ...] = (
    undisturbed,
    unknown_request,
    unknown_request_with_anothers_blocks,
    no_blocks,
    out_of_range_blocks,
    used_twice,
    stale_after_reuse,
    of_another_prompt,
    expired,
    expired_and_reused,
    flipped_bit,
    frozen_for_a_while,
    frozen,
    killed_before,
    killed_in_mid_read,
    undisturbed,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for model and logs")
    parser.add_argument("--policy", default="fail", choices=("fail", "recompute"))
    parser.add_argument("--only", default="", help="cases whose function has this in its name")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)  # a fork of a process with a pool of threads would wait for them
    import vllm.v1.engine.core  # noqa: F401  once for all processes, which are forks of this one

    bench = Bench(options.work, options.policy)
    try:
        bench.start()
        for case in CASES:
            if options.only in case.__name__:
                print(json.dumps(asdict(bench.play(case))), flush=True)
    finally:
        bench.prefill.kill()
        bench.decode.kill()


if __name__ == "__main__":
    main()
