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
            model, gpu_type = hw.find_model(name), hw.find_gpu(gpu)
            fits = hw.kv_tokens_beside_weights(model, gpu_type, 8) > 100_000
            if fits and model.arithmetic(gpu_type) in gpu_type.flops:
                cost = hw.Hardware.of(name, gpu, 8).cost
                assert 0 < cost.step_s(32, 32_000) < 0.1, (name, gpu)
                assert 0 < cost.prefill_s(1000, 1000) < 1, (name, gpu)
                assert math.isfinite(cost.transfer_token)


def test_a_step_reads_the_experts_that_its_rows_use():
    """gpt-oss uses 4 of 128 experts for each row; every row chooses by itself."""
    cost = hw.Hardware.of("gpt-oss-120b-mxfp4", "H200", 1).cost
    weights_of_no_row_s = cost.step_s(0, 0) - cost.step_base
    assert weights_of_no_row_s == pytest.approx(cost.step_weights)
    # 64 rows use 1 - (124 / 128) ** 64 of the experts: 87 %
    experts_s = cost.step_s(64, 0) - cost.step_s(0, 0)
    assert experts_s == pytest.approx(0.869 * cost.step_experts, rel=1e-3)
    assert cost.with_experts_of(64).step_s(0, 0) == pytest.approx(cost.step_s(64, 0))
    assert cost.scaled(1.0, 2.0).step_s(64, 0) == pytest.approx(2 * cost.step_s(64, 0))
    dense = hw.Hardware.of("llama3.1-8b-fp8", "H200", 1).cost
    assert dense.with_experts_of() is dense


def test_gpus_without_a_kv_head_of_their_own_hold_a_copy():
    """Latent attention has one vector for all heads; 8 GPUs hold it eight times, and read it."""
    latent = hw.find_model("deepseek-v3-fp8")
    assert latent.kv_bytes_per_token == 61 * 576 * 2
    assert [latent.kv_copies(tp) for tp in (1, 8)] == [1, 8]
    grouped = hw.find_model("qwen3-235b-a22b-fp8")  # four KV heads
    assert [grouped.kv_copies(tp) for tp in (1, 4, 8)] == [1, 1, 2]
    # (8 * 141 GB * 0.9 - 670 GB) / (61 * 576 * 2 * 8)
    replica = hw.Hardware.of("deepseek-v3-fp8", "H200", 8)
    assert replica.kv_tokens == pytest.approx(6.14e5, rel=0.01)
    four, eight = (hw.Hardware.of("qwen3-235b-a22b-fp8", "B200", tp).cost for tp in (4, 8))
    assert four.step_token == pytest.approx(eight.step_token)


def test_weights_of_four_bits_are_widened_where_the_gpu_has_no_such_arithmetic():
    model = hw.find_model("gpt-oss-120b-mxfp4")
    hopper, blackwell = hw.find_gpu("H200"), hw.find_gpu("B200")
    assert (model.arithmetic(hopper), model.arithmetic(blackwell)) == ("bf16", "nvfp4")
    assert model.kernels(hopper) is hw.Kernels.EXPERTS_4BIT
    assert model.kernels(blackwell) is hw.Kernels.EXPERTS
    assert hw.find_model("kimi-k2.5-int4").kernels(blackwell) is hw.Kernels.LATENT_4BIT
    assert hw.find_model("llama3.1-70b-fp8").kernels(hopper) is hw.Kernels.DENSE


def test_engines_differ_and_doubts_about_their_fit_are_sentences():
    costs = {
        engine: hw.Hardware.of("llama3.1-8b-bf16", "H200", 1, engine).cost.step_s(32, 32_000)
        for engine in hw.load_constants().engines
    }
    assert len(set(costs.values())) == 4
    with pytest.raises(SimulationError, match="engine tgi: expected one of vllm, "):
        hw.Hardware.of("llama3.1-8b-bf16", "H200", 1, "tgi")

    unmeasured = hw.Hardware.of("gpt-oss-120b-mxfp4", "H200", 1, "sglang")
    assert unmeasured.fit_warnings == (
        "no sglang with experts, 4-bit weights on Hopper was measured: the overheads are those of "
        "sglang, experts on Hopper, so trust the times less",
    )
    poor = hw.Hardware.of("deepseek-v3-nvfp4", "B200", 8, "trtllm")
    assert any("of engines that were not fitted to" in text for text in poor.fit_warnings)
    assert hw.Hardware.of("llama3.1-70b-fp8", "H200", 4).fit_warnings == ()
    other_gpu = hw.Hardware.of("qwen3-32b-bf16", "H200", 4, "sglang")
    assert other_gpu.fit_warnings == (
        "sglang, dense on Hopper: qwen3-32b-bf16 on H200 was not measured; where a fit had not seen a "
        "GPU or model, the time per token was 42% off on average",
    )
    [untested] = hw.Hardware.of("llama3.1-70b-fp8", "H100", 4, "diptych").fit_warnings
    assert untested == "diptych, dense on Hopper: llama3.1-70b-fp8 on H100 was not measured"
    latent = hw.Hardware.of("kimi-k2.5-int4", "H200", 8, "sglang")
    assert "the overheads are those of sglang, latent on Hopper" in latent.fit_warnings[0]
    on_b200 = hw.Hardware.of("llama3.1-70b-fp8", "B200", 4)
    assert on_b200.fit_warnings == (
        "vllm, dense on Hopper and Blackwell: the time per token of B200 llama3.1-70b-fp8 is "
        "predicted 13% off on average",
    )
    assert set(on_b200.fit_warnings) < set(hw.describe_doubts([on_b200, poor]))


def test_the_constants_say_where_they_come_from_and_how_wrong_they_are():
    """Where it was not fitted: 10 % on average for dense models, 15 % for mixtures of experts."""
    constants = hw.load_constants()
    assert {"source", "licence", "collected", "filter", "fitted_by"} <= set(constants.provenance)
    errors: dict[tuple[str, bool], list[hw.PredictionError]] = {}
    for engine_fit in constants.fits:
        key = (engine_fit.engine, engine_fit.kernels is hw.Kernels.DENSE)
        errors.setdefault(key, []).append(engine_fit.not_fitted["all"])
    assert {engine for engine, _ in errors} == set(constants.engines)
    for (engine, is_dense), group in errors.items():
        rows = sum(error.rows for error in group)
        mean = sum(error.rows * error.mean for error in group) / rows
        assert mean <= (0.10 if is_dense else 0.15), (engine, is_dense)
    assert sum(error.rows for group in errors.values() for error in group) > 1800


def test_an_overhead_that_ends_just_short_of_its_limit_sits_on_it():
    limits = fit.HELD_LIMITS
    inside = msgspec.structs.replace(limits.start, weights_efficiency=0.7, prefill_efficiency=0.7)
    assert fit.find_at_bounds(inside, limits) == ()
    close = msgspec.structs.replace(inside, layer_s=1e-9, prompt_s=limits.upper.prompt_s * 0.9999)
    assert fit.find_at_bounds(close, limits) == ("layer_s 1e-09", "prompt_s 0.009999")


def test_no_model_is_taken_to_fit_that_does_not():
    """Of Kimi-K2.5 in int4 the experts alone have 4 bits: 591 GB with the scales."""
    with pytest.raises(SimulationError, match="does not fit on 8 x H100"):
        hw.Hardware.of("kimi-k2.5-int4", "H100", 8)
    assert hw.find_model("kimi-k2.5-int4").weight_bytes == pytest.approx(591e9, rel=0.01)


def measured(concurrency=8, version="2026-01-01", ttft_s=0.1, **changes):
    given = {"isl": 1000, "osl": 100, "tpot_s": 0.02, **changes}
    return fit.MeasuredEngine(
        engine="vllm",
        gpu="H200",
        model="llama3.1-8b-bf16",
        tp=1,
        concurrency=concurrency,
        version=version,
        ttft_s=ttft_s,
        **given,
    )


def test_the_newest_measurement_of_a_configuration_counts_unless_its_requests_queued():
    old, new = measured(), measured(version="2026-02-01", tpot_s=0.01)
    queued = measured(concurrency=512, ttft_s=1.5)  # of two seconds of decoding
    assert fit.newest_unqueued([new, old, queued]) == [new]


def test_a_fit_finds_the_overheads_that_made_the_times():
    made = hw.Overheads(0.7, 0.5, 1e-3, 5e-5, 0.9, 1e-2, row_s=2e-5)
    loads = [(1, 100, 1000), (8, 1000, 100), (64, 1000, 1000), (256, 4000, 500), (512, 500, 4000)]
    engines = [
        measured(concurrency, isl=isl, osl=osl, tpot_s=1.0) for concurrency, isl, osl in loads
    ]
    engines = [
        measured(
            engine.concurrency,
            isl=engine.isl,
            osl=engine.osl,
            tpot_s=fit.predict([engine], made)[0],
        )
        for engine in engines
    ]
    found = fit.fit_overheads(engines).overheads
    assert fit.summarise(fit.predictions(engines, found)).mean < 0.01


def test_host_time_that_no_measurement_tells_is_none():
    """One row in a step: reading the weights takes longer than it, so the step says nothing of it."""
    made = hw.Overheads(0.7, 0.5, 1e-3, 5e-5, 0.9, 1e-2)
    engines = [
        measured(1, isl=isl, osl=osl, tpot_s=fit.predict([measured(1, isl=isl, osl=osl)], made)[0])
        for isl, osl in ((100, 1000), (1000, 100), (4000, 500), (8000, 100))
    ]
    found = fit.fit_overheads(engines)
    assert found.overheads.row_s == 0.0
    at_bounds = fit.find_at_bounds(*found)
    assert not [value for value in at_bounds if value.startswith("row_s")], "it was held"


def test_our_own_engine_is_read_from_the_proof_on_a_gpu():
    calls = fit.read_own_engine()
    assert fit.MeasuredCall("H200", "llama3.1-8b-bf16", 5.44e-3, 32, 1024) in calls
    assert fit.MeasuredCall("H200", "llama3.1-8b-bf16", 0.2336, 0, 8192) in calls
    assert fit.MeasuredCall("H200", "llama3.1-8b-fp8", 7.14e-3, 32, 4096, tests=True) in calls
    assert len(calls) == 16


@pytest.mark.parametrize(
    "engines",
    [["vllm", "sglang"], pytest.param(["vllm", "sglang", "trtllm"], marks=pytest.mark.slow)],
)
def test_the_committed_constants_are_those_of_the_fit(engines):
    """Those of dense models by default, as all fits take half a minute."""
    folder = SHARED / "calibration"
    if not folder.exists():
        pytest.skip("the calibration data is not here")
    with_experts = "trtllm" in engines
    measured = [
        one
        for one in fit.read_engines(folder)
        if one.engine in engines and (with_experts or one.kernels.is_dense)
    ]
    names = {(one.engine, one.kernels) for one in measured} | {("diptych", hw.Kernels.DENSE)}
    committed = [one for one in hw.load_constants().fits if (one.engine, one.kernels) in names]
    fits = fit.fit_all(measured)
    assert [(one.engine, one.kernels, one.generations, one.measured) for one in fits] == [
        (one.engine, one.kernels, one.generations, one.measured) for one in committed
    ]
    for one, written in zip(fits, committed, strict=True):
        name = f"{one.engine} {one.kernels} {one.generations}"
        assert one.not_fitted.keys() == written.not_fitted.keys(), name
        for group, error in one.not_fitted.items():  # the last digits are the processor's
            assert error.mean == pytest.approx(written.not_fitted[group].mean, abs=5e-3), name
    overheads, written = (
        msgspec.structs.astuple(found[0].overheads) for found in (fits, committed)
    )
    assert overheads == pytest.approx(written, rel=1e-3)


def test_a_pool_holds_what_the_weights_leave():
    fleet, _ = h200()
    # (4 * 141 GB * 0.9 - 69.5 GB) / 320 KiB
    assert fleet.reference.kv_tokens == pytest.approx(1.337e6, rel=0.01)
