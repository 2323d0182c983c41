"""What a neighbour's idle core is worth to an engine: a prompt and an answer, with and without it.

    python -m diptych.engine.bench.lent_core

The model is a random Llama of 205 M parameters. The engine has the first core that this process may
use. The second one is lent and taken back in turns, as an engine there would do it.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path

from ...protos.frames import Sampling
from .. import core_sharing
from ..engine import Engine
from ..kernels import native_ops
from ..options import EngineOptions
from ..priority import leave_cores_to_messages
from ..sequence import Sequence
from .models import write_checkpoint

PROMPT_TOKENS = 1_024
ANSWER_TOKENS = 40
ROUNDS = 5
KV_BYTES = 1 << 30
#: Ids that every model has, and that end no answer by themselves in usual vocabularies.
TOKEN_IDS = range(3, 250)


def main() -> None:
    """Print TTFT and the mean gap of each round, and how many steps had help."""
    own, *others = sorted(os.sched_getaffinity(0))
    if not others:
        sys.exit("this needs two cores: one of them is lent")
    other = others[0]
    core_sharing.ALONE_SHARE = 0.0  # the warm-up has the steps without help
    with tempfile.TemporaryDirectory() as folder:
        states_file = Path(folder) / "states"
        model = write_checkpoint("205M", Path(folder) / "model")
        options = EngineOptions(model, kv_bytes=KV_BYTES, cores=(own,), core_states=states_file)
        engine = Engine(options)
        if engine.core_sharing is None:
            sys.exit(f"only our own kernels share cores; here computes {engine.kernels}")
        ops = native_ops(engine.spec.head_dim, threads=1)
        neighbour = core_sharing.CoreSharing(states_file, [other], ops)
        os.sched_setaffinity(0, {own})
        leave_cores_to_messages()
        _answer(engine, "warm-up")
        for number in range(ROUNDS):
            for is_lent in (False, True):
                if is_lent:
                    neighbour.lend()
                else:
                    neighbour.take_back()
                helped_before = engine.counters.helped_steps
                ttft_s, gap_s = _answer(engine, f"{number} {is_lent}")
                helped = engine.counters.helped_steps - helped_before
                print(
                    f"{'with a lent core' if is_lent else 'alone':>16}: prompt of {PROMPT_TOKENS}"
                    f" {ttft_s * 1e3:.0f} ms, gap {gap_s * 1e3:.1f} ms, {helped} steps with help",
                    flush=True,
                )
        engine.close()


def _answer(engine: Engine, name: str) -> tuple[float, float]:
    """Return the seconds to the first token of an answer, and the mean gap behind it."""
    ids = random.Random(name).choices(TOKEN_IDS, k=PROMPT_TOKENS)
    sequence = Sequence((name, 0), ids, PROMPT_TOKENS, Sampling(ANSWER_TOKENS), [], False)
    began = time.perf_counter()
    engine.add(sequence)
    times: list[float] = []
    while len(times) < ANSWER_TOKENS:
        times += [time.perf_counter() for output in engine.step() if output.token]
    engine.release(sequence.attempt_key)
    engine.step()
    return times[0] - began, (times[-1] - times[0]) / (ANSWER_TOKENS - 1)


if __name__ == "__main__":
    main()
