"""The whole engine on `gpu.ops`, by Triton's interpreter in float32: the tokens of plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diptych.engine.engine import Engine, EngineOptions
from diptych.engine.errors import KernelUnavailable
from diptych.engine.exactness import is_exact
from diptych.engine.gpu.plan import ROW_FIELDS, RowField
from diptych.engine.rank_processes import DecodeStep
from diptych.engine.scheduler import SchedulerLimits
from diptych.protos.frames import Sampling

from tests.engine import rig

DEVICE = "cpu"


def engine(folder: Path, attention: str, **fields) -> Engine:
    size = 40 * rig.block_bytes(folder, "float32")
    limits = SchedulerLimits(max_step_tokens=64)
    return Engine(
        EngineOptions(folder, "float32", size, 512, limits=limits, attention=attention, **fields)
    )


def answers(owner: Engine, length: int = 90) -> dict[str, list[int]]:
    """A prompt in chunks and some short ones, that decode together: greedy, drawn, and penalized."""
    samplings = (
        Sampling(4),
        Sampling(5, prompt_logprobs=2),
        Sampling(6, temperature=0.9, seed=2**63 + 5),
        Sampling(
            6, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.3, seed=3, logprobs=2
        ),
        Sampling(6, frequency_penalty=2.0, logit_bias=((9, 3.0),), min_tokens=3, stop_ids=(9,)),
    )
    found = rig.finish(
        owner,
        [
            rig.request(owner, f"r{index}", rig.prompt(size, index), sampling)
            for index, (size, sampling) in enumerate(
                zip((3, length, 9, 5, 7), samplings, strict=True)
            )
        ],
    )
    return {name: [token.id for token in tokens] for name, tokens in found.items()}


def forbidden(*_: object) -> None:
    raise AssertionError("logits went to the host")


def same_tokens(folder: Path, **fields) -> None:
    ours = engine(folder, "triton", **fields)
    launches = ours._pipeline._runner.launch
    lead: list[int] = []

    def launch(rows, **named):
        lead.append(int((rows.packed[RowField.SOURCE] < 0).sum()))
        return launches(rows, **named)

    ours._pipeline._runner.launch = launch
    with pytest.MonkeyPatch.context() as patch:
        # steps with prefill are sampled on the device too, and prompts are scored there
        patch.setattr("diptych.engine.engine.sample_tokens", forbidden)
        patch.setattr("diptych.engine.engine.score_prompt", forbidden)
        found = answers(ours, 66)
    assert found == answers(engine(folder, "torch"), 66)
    assert sum(lead) >= 6, "no step took its ids from the device"


@pytest.mark.slow
def test_tokens_are_those_of_torch(small: Callable[[str], Path]) -> None:
    same_tokens(small("llama"), device=DEVICE)


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        pytest.param("llama", False, marks=pytest.mark.slow),
        pytest.param("llama", True, marks=pytest.mark.long),
        pytest.param("mixtral", False, marks=pytest.mark.long),
    ],
)
def test_two_ranks_decode_ahead_as_torch_does_alone(
    small: Callable[[str], Path], name: str, exact: bool
) -> None:
    """Each rank launches the same steps and finds the same ids, some of which nobody has read."""
    folder = small(name)
    pair = engine(folder, "triton", tensor_parallel=2, exact=exact)
    ranks, lead = pair._model.rank_processes, []
    told = ranks.broadcast

    def tell(message: object) -> None:
        if isinstance(message, DecodeStep):
            sources = np.frombuffer(message.inputs, np.int64).reshape(ROW_FIELDS, -1)[0]
            lead.append(int((sources < 0).sum()))
        told(message)

    ranks.broadcast = tell
    try:
        assert answers(pair, 66) == answers(engine(folder, "torch"), 66)
    finally:
        pair.close()
    assert sum(lead) >= 6, "no step took its ids from the device"


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe"])
def test_tokens_of_other_architectures_too(small: Callable[[str], Path], name: str) -> None:
    same_tokens(small(name), device=DEVICE)


@pytest.mark.long
def test_exact_tokens_are_those_of_torch(small: Callable[[str], Path]) -> None:
    same_tokens(small("llama"), device=DEVICE, exact=True)


@pytest.mark.long
@pytest.mark.usefixtures("exact_dots")
def test_exact_bits_do_not_depend_on_the_batch(small: Callable[[str], Path]) -> None:
    """The start-up check: a text whole, in chunks and row by row, KV and logits too."""
    owner = engine(small("llama"), "triton", exact=True)
    assert is_exact(owner._model, owner.options.limits.block_tokens)
    assert owner.kernels.startswith("exact on cpu by 256")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "fa3"}, "there is no GPU"),
        ({"attention": "fa9"}, "expected one of auto, fa3"),
        ({"attention": "cpp"}, "do not compute in float32"),
        ({"attention": "auto", "device": "cuda"}, "no CUDA device"),
    ],
)
def test_what_cannot_run_here_is_refused(small: Callable[[str], Path], fields, message) -> None:
    if fields.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(KernelUnavailable, match=message):
        engine(small("llama"), **fields)
