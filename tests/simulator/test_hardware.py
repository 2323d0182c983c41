"""The closed form and its constants."""

import math

import msgspec
import pytest
from diptych.simulator import fit
from diptych.simulator import hardware as hw
from diptych.simulator.errors import SimulationError

from .support import SHARED, h200


def test_prefill_grows_with_the_uncached_tokens_and_their_pairs():
    cost = hw.Hardware.of("llama3.1-70b-fp8", "H200", 4).cost
    whole, tail = hw.prefill_s(cost, 8192, 8192), hw.prefill_s(cost, 4096, 8192)
    pairs = (8192**2 - 4096**2) / 2
    assert tail == pytest.approx(
        cost.prefill_base + 4096 * cost.prefill_token + pairs * cost.prefill_pair
    )
    assert whole / 2 < tail < whole  # the later half sees more keys


def test_more_gpus_are_faster_but_not_in_proportion():
    one, four = (hw.Hardware.of("llama3.1-8b-bf16", "H100", tp) for tp in (1, 4))
    speedup = hw.prefill_s(one.cost, 8192, 8192) / hw.prefill_s(four.cost, 8192, 8192)
    assert 1.5 < speedup < 4
    assert four.kv_tokens > 4 * one.kv_tokens  # the weights are held once


def test_experts_cost_the_active_parameters_to_compute_and_the_touched_ones_to_read():
    model = hw.model_named("qwen3-30b-a3b-fp8")
    assert model.active == pytest.approx(30.2e9 * (0.04 + 0.96 * 8 / 128), rel=1e-6)
    assert model.read_bytes(1) < 0.2 * model.weight_bytes < model.read_bytes(64)
    assert hw.model_named("llama3.1-8b-fp8").active == 7.5e9


@pytest.mark.parametrize(
    ("model", "gpu", "tp"),
    [("llama9", "H200", 4), ("llama3.1-8b-fp8", "A100", 1), ("llama3.1-70b-bf16", "H100", 1)],
)
def test_what_is_not_known_or_does_not_fit_is_said(model, gpu, tp):
    with pytest.raises(SimulationError):
        hw.Hardware.of(model, gpu, tp)


def test_every_model_has_finite_coefficients_on_every_gpu():
    for name in hw.constants().models:
        for gpu in hw.constants().gpus:
            if hw.model_named(name).dtype in hw.gpu_named(gpu).flops:
                cost = hw.Hardware.of(name, gpu, 8).cost
                assert 0 < hw.step_s(cost, 32, 32_000) < 0.1, (name, gpu)
                assert 0 < hw.prefill_s(cost, 1000, 1000) < 1, (name, gpu)
                assert math.isfinite(cost.transfer_token)


def test_the_constants_say_where_they_come_from_and_how_wrong_they_are():
    provenance = hw.constants().provenance
    assert {"source", "licence", "collected", "filter", "fitted_by"} <= set(provenance)
    assert provenance["error"]["not_fitted"]["mean"] <= 0.10
    assert provenance["error"]["not_fitted"]["rows"] > 150


def test_the_committed_constants_are_those_of_the_fit():
    folder = SHARED / "calibration"
    if not folder.exists():
        pytest.skip("the calibration data is not here")
    over, errors = fit.report(fit.read_rows(folder))
    said = hw.constants()
    assert errors.keys() == said.provenance["error"].keys()
    for group, error in errors.items():  # the last digit is the processor's
        assert error == pytest.approx(said.provenance["error"][group], abs=1e-4), group
    ours, theirs = map(msgspec.structs.astuple, (over, said.overheads))
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_a_pool_holds_what_the_weights_leave():
    fleet, _ = h200()
    # (4 * 141 GB * 0.9 - 69.5 GB) / 320 KiB
    assert fleet.reference.kv_tokens == pytest.approx(1.337e6, rel=0.01)
