"""The closed form and its constants."""

import math

import msgspec
import pytest
from diptych.simulator import fit
from diptych.simulator import hardware as hw
from diptych.simulator.errors import SimulationError

from .support import COST, SHARED, h200


def test_prefill_grows_with_the_uncached_tokens_and_their_pairs():
    cost = hw.Hardware.of("llama3.1-70b-fp8", "H200", 4).cost
    whole, tail = cost.prefill_s(8192, 8192), cost.prefill_s(4096, 8192)
    pairs = (8192**2 - 4096**2) / 2
    assert tail == pytest.approx(
        cost.prefill_base + 4096 * cost.prefill_token + pairs * cost.prefill_pair
    )
    assert whole / 2 < tail < whole  # the later half sees more keys


def test_a_prompt_takes_as_long_as_its_chunks_and_the_mean_prompt_as_the_mean():
    cost = hw.Hardware.of("llama3.1-70b-fp8", "H200", 4).cost
    prompt_tokens = 8192
    chunk_pairs = [(2048**2) / 2, (8192**2 - 2048**2) / 2]
    chunks_s = cost.chunk_s(2048, chunk_pairs[0]) + cost.chunk_s(6144, chunk_pairs[1])
    prefill_s = cost.prefill_s(prompt_tokens, prompt_tokens)
    assert cost.prefill_base + chunks_s == pytest.approx(prefill_s)

    prompts = [(1000, 1000), (500, 4000), (8000, 9000)]  # uncached tokens and all
    pairs = [(n**2 - (n - u) ** 2) / 2 for u, n in prompts]
    mean_uncached = sum(u for u, _ in prompts) / 3
    mean_s = sum(cost.prefill_s(u, n) for u, n in prompts) / 3
    assert cost.mean_prefill_s(mean_uncached, sum(pairs) / 3) == pytest.approx(mean_s)


def test_the_steps_of_an_answer_add_up_to_its_rows_and_reads():
    """Beside what each step costs whoever is in it."""
    cost = msgspec.structs.replace(COST, step_row=1e-3)
    lengths = [100, 101, 102, 103]
    steps_s = sum(cost.step_s(1, length) - cost.step_base for length in lengths)
    context_tokens = sum(lengths)
    assert cost.decode_compute_s(4, context_tokens) == pytest.approx(steps_s)
    assert cost.decode_read_s(context_tokens) == pytest.approx(steps_s - 4 * 1e-3)


def test_weights_that_a_gpu_does_not_compute_are_one_sentence():
    with pytest.raises(SimulationError) as raised:
        hw.Hardware.of("llama3.1-70b-nvfp4", "H200", 4)
    assert str(raised.value) == (
        "llama3.1-70b-nvfp4 on H200: expected weights in bf16 or fp8, not nvfp4"
    )
    assert hw.Hardware.of("llama3.1-70b-nvfp4", "B200", 4).kv_tokens > 0


def test_more_gpus_are_faster_but_not_in_proportion():
    one, four = (hw.Hardware.of("llama3.1-8b-bf16", "H100", tp) for tp in (1, 4))
    speedup = one.cost.prefill_s(8192, 8192) / four.cost.prefill_s(8192, 8192)
    assert 1.5 < speedup < 4
    assert four.kv_tokens > 4 * one.kv_tokens  # the weights are held once


def test_experts_cost_the_active_parameters_to_compute_and_the_touched_ones_to_read():
    model = hw.find_model("qwen3-30b-a3b-fp8")
    assert model.active_parameters == pytest.approx(30.2e9 * (0.04 + 0.96 * 8 / 128), rel=1e-6)
    assert model.weight_bytes_read(1) < 0.2 * model.weight_bytes < model.weight_bytes_read(64)
    assert hw.find_model("llama3.1-8b-fp8").active_parameters == 7.5e9


@pytest.mark.parametrize(
    ("model", "gpu", "tp"),
    [("llama9", "H200", 4), ("llama3.1-8b-fp8", "A100", 1), ("llama3.1-70b-bf16", "H100", 1)],
)
def test_what_is_not_known_or_does_not_fit_is_said(model, gpu, tp):
    with pytest.raises(SimulationError):
        hw.Hardware.of(model, gpu, tp)


def test_every_model_has_finite_coefficients_on_every_gpu():
    for name in hw.load_constants().models:
        for gpu in hw.load_constants().gpus:
            if hw.find_model(name).dtype in hw.find_gpu(gpu).flops:
                cost = hw.Hardware.of(name, gpu, 8).cost
                assert 0 < cost.step_s(32, 32_000) < 0.1, (name, gpu)
                assert 0 < cost.prefill_s(1000, 1000) < 1, (name, gpu)
                assert math.isfinite(cost.transfer_token)


def test_the_constants_say_where_they_come_from_and_how_wrong_they_are():
    provenance = hw.load_constants().provenance
    assert {"source", "licence", "collected", "filter", "fitted_by"} <= set(provenance)
    assert provenance["error"]["not_fitted"]["mean"] <= 0.10
    assert provenance["error"]["not_fitted"]["rows"] > 150


def test_an_overhead_that_ends_just_short_of_its_limit_sits_on_it():
    limits = fit.UPPER_BOUNDS
    inside = msgspec.structs.replace(fit.START, weights_efficiency=0.7, prefill_efficiency=0.7)
    assert fit.find_at_bounds(inside) == []
    close = msgspec.structs.replace(inside, layer_s=1e-9, prompt_s=limits.prompt_s * 0.9999)
    assert fit.find_at_bounds(close) == ["layer_s 1e-09", "prompt_s 0.009999"]


def test_the_committed_constants_are_those_of_the_fit():
    folder = SHARED / "calibration"
    if not folder.exists():
        pytest.skip("the calibration data is not here")
    result = fit.fit_and_test(fit.read_engines(folder))
    constants = hw.load_constants()
    committed_errors = constants.provenance["error"]
    assert result.errors.keys() == committed_errors.keys()
    for group, error in result.errors.items():  # the last digit is the processor's
        expected = pytest.approx(committed_errors[group], abs=1e-4)
        assert msgspec.structs.asdict(error) == expected, group
    fitted, committed = map(msgspec.structs.astuple, (result.overheads, constants.overheads))
    assert fitted == pytest.approx(committed, rel=1e-3)


def test_a_pool_holds_what_the_weights_leave():
    fleet, _ = h200()
    # (4 * 141 GB * 0.9 - 69.5 GB) / 320 KiB
    assert fleet.reference.kv_tokens == pytest.approx(1.337e6, rel=0.01)
