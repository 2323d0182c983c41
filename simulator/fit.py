"""Fits the overheads of the closed form to measured engines, and tests the fit on others.

`python -m diptych.simulator.fit [--calibration FOLDER] [--write]` prints the errors and, with
`--write`, writes `coefficients.yaml`.

The measured engines are dense models under vLLM, aggregated (one engine computes prompts and
answers), with tp 1 to 8, where the load's concurrency is stated: Llama-3.1-70B in fp8 on H100, H200
and B200 SXM, and Qwen3-32B in bf16 on H100. The fit sees those on H200; those on H100 and B200 test
it. With B sequences that decode at a time in a closed loop, an engine's time per output token is
predicted as

    TPOT = step_s(B, B * (isl + osl / 2)) + B * prefill_s(isl, isl) / osl
    B    = min(concurrency, KV tokens of the replica / (isl + osl / 2))

where isl and osl are the lengths of prompt and answer in tokens, isl + osl / 2 is the mean length
of a sequence while it decodes, and nothing of a prompt is cached. The second term is the share of
the prompts' time: while a sequence decodes its osl tokens, B prompts are computed. The fit
minimises the squares of log(predicted / measured), in which the overheads are not linear.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.optimize import least_squares

from .hardware import (
    COEFFICIENTS_FILE,
    Overheads,
    derive_coefficients,
    find_gpu,
    find_model,
    kv_memory_bytes,
    load_constants,
)

SAMPLE_FILE = "silicon_sample.csv.gz"  #: in the calibration folder: a row for each measured engine
#: From the names in the sample to those in `coefficients.yaml`; rows of other names are not used.
GPU_NAMES = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}
MODEL_NAMES = {"meta-llama/Llama-3.1-70B": "llama3.1-70b", "Qwen/Qwen3-32B": "qwen3-32b"}
DATA_TYPES = ("bf16", "fp8")  #: of the weights; rows of others are not used
FITTED_GPU = "H200"  #: the engines on all other GPUs test the fit
LIMIT_SHARE = 1e-3  #: of the span between two limits: so near to one counts as on it
LARGE_ERROR = 0.1  #: relative; larger errors count linearly, not squared

#: The fitted engines run one model, so they tell only the sum of a step's overhead and its layers'.
#: The share of `step_s` in this sum is therefore arbitrary, and would differ from one processor to
#: the next. It is held at what a fit with a free `step_s` once ended at: 4 % of the sum.
HELD_STEP_S = 1.858e-4
#: Where the fit begins. Of every overhead it fits a factor on this value, so none is 0.
START = Overheads(
    weights_efficiency=0.9,
    kv_efficiency=0.8,
    step_s=HELD_STEP_S,
    layer_s=3e-5,
    prefill_efficiency=1.0,
    prompt_s=5e-3,
)
#: Limits of the fit; an overhead whose two limits are equal is held.
LOWER_BOUNDS = Overheads(
    weights_efficiency=0.3,
    kv_efficiency=0.3,
    step_s=HELD_STEP_S,
    layer_s=0.0,
    prefill_efficiency=0.3,
    prompt_s=0.0,
)
#: Nothing is better than the kernels alone: they reach 0.9 of the data sheet's memory bandwidth
#: (`bound.KERNEL_MEMORY_SHARE`), and a prefill's efficiency is a share of their own speed.
UPPER_BOUNDS = Overheads(
    weights_efficiency=0.9,
    kv_efficiency=0.9,
    step_s=HELD_STEP_S,
    layer_s=2e-4,
    prefill_efficiency=1.0,
    prompt_s=1e-2,
)


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """One engine configuration under one load, and its measured time per output token."""

    gpu: str
    model: str  #: with the data type of its weights: `llama3.1-70b-fp8`
    tp: int  #: GPUs that share the model
    concurrency: int  #: requests that clients keep open
    isl: int  #: tokens of each prompt
    osl: int  #: tokens of each answer
    tpot_s: float


class PredictionError(msgspec.Struct, frozen=True):
    """Relative errors of the predicted time per output token, over some engines: 0.1 is 10 %."""

    rows: int  #: how many engines
    mean: float  #: of the errors' magnitudes
    median: float  #: of the errors' magnitudes
    bias: float  #: mean of the errors with their signs; above 0: predictions are too long


class FitResult(NamedTuple):
    """The fitted overheads, and the errors by group of engines."""

    overheads: Overheads
    #: Of the engines "fitted" and "not_fitted", and of each GPU and model that was not fitted.
    errors: dict[str, PredictionError]


# ---- the measured engines ------------------------------------------------------------------------


def read_engines(folder: Path) -> list[MeasuredEngine]:
    """Return the engines of the sample that the closed form describes."""
    with gzip.open(folder / SAMPLE_FILE, "rt") as file:
        engines = [_parse_engine(row) for row in csv.DictReader(file)]
    return [engine for engine in engines if engine is not None]


def _parse_engine(row: dict[str, str]) -> MeasuredEngine | None:
    """Return the row's engine, or None if its kind is not fitted."""
    data_type = row["gemm_quant_mode"] or "bf16"  # not quantized
    concurrency = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    if row["system"] not in GPU_NAMES or row["model_path"] not in MODEL_NAMES:
        return None
    if row["mode"] != "agg" or row["backend"] != "vllm" or row["pp_size"] != "1":
        return None
    if data_type not in DATA_TYPES or concurrency is None:
        return None
    return MeasuredEngine(
        gpu=GPU_NAMES[row["system"]],
        model=f"{MODEL_NAMES[row['model_path']]}-{data_type}",
        tp=int(row["tp_size"]),
        concurrency=int(concurrency[1]),
        isl=int(row["isl"]),
        osl=int(row["osl"]),
        tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
    )


def predict_tpot_s(engine: MeasuredEngine, overheads: Overheads) -> float:
    """Return the seconds per output token by the module's formulas with these overheads.

    `rows` is their B, at least 1: an engine whose KV is smaller than one sequence serves one still.
    """
    model = find_model(engine.model)
    gpu = find_gpu(engine.gpu)
    cost = derive_coefficients(model, gpu, engine.tp, overheads)
    mean_length = engine.isl + engine.osl / 2
    kv_tokens = kv_memory_bytes(model, gpu, engine.tp) / model.kv_bytes_per_token
    rows = min(engine.concurrency, max(1.0, kv_tokens / mean_length))
    step_s = cost.step_s(int(rows), rows * mean_length)
    return step_s + rows * cost.prefill_s(engine.isl, engine.isl) / engine.osl


# ---- the fit -------------------------------------------------------------------------------------


def fit_overheads(engines: list[MeasuredEngine]) -> Overheads:
    """Return the overheads that predict these engines best, to four digits.

    An overhead whose limits are equal keeps its value. The others are varied as factors on `START`,
    so that all have a like scale.
    """
    start = _as_array(START)
    lower = _as_array(LOWER_BOUNDS)
    upper = _as_array(UPPER_BOUNDS)
    free = lower < upper

    def scaled_overheads(factors: np.ndarray) -> Overheads:
        """Return the start with its free values multiplied."""
        values = start.copy()
        values[free] *= factors
        return Overheads(*values.tolist())

    def residuals(factors: np.ndarray) -> np.ndarray:
        overheads = scaled_overheads(factors)
        ratios = [predict_tpot_s(engine, overheads) / engine.tpot_s for engine in engines]
        return np.log(np.array(ratios))

    solution = least_squares(
        residuals,
        np.ones(free.sum()),
        bounds=(lower[free] / start[free], upper[free] / start[free]),
        loss="soft_l1",
        f_scale=LARGE_ERROR,
    )
    best = _as_array(scaled_overheads(solution.x))
    return Overheads(*(float(f"{value:.4g}") for value in best))


def find_at_bounds(overheads: Overheads) -> list[str]:
    """Return the overheads that sit on a limit of the fit, as in `prompt_s 0.01`.

    The fit ends close to a limit, not on it, and overheads have four digits.
    """
    values = msgspec.structs.asdict(overheads)
    lower = msgspec.structs.asdict(LOWER_BOUNDS)
    upper = msgspec.structs.asdict(UPPER_BOUNDS)
    return [
        f"{name} {value:g}"
        for name, value in values.items()
        if lower[name] < upper[name]
        and min(value - lower[name], upper[name] - value)
        <= LIMIT_SHARE * (upper[name] - lower[name])
    ]


def _as_array(overheads: Overheads) -> np.ndarray:
    return np.array(msgspec.structs.astuple(overheads))


def prediction_error(engines: list[MeasuredEngine], overheads: Overheads) -> PredictionError:
    """Return how far the predictions are from what was measured."""
    errors = np.array([predict_tpot_s(engine, overheads) / engine.tpot_s - 1 for engine in engines])
    magnitudes = np.abs(errors)
    return PredictionError(
        rows=len(engines),
        mean=round(float(magnitudes.mean()), 4),
        median=round(float(np.median(magnitudes)), 4),
        bias=round(float(errors.mean()), 4),
    )


def fit_and_test(engines: list[MeasuredEngine]) -> FitResult:
    """Return the fit to the engines on `FITTED_GPU`, and its errors on these and on the others."""
    fitted = [engine for engine in engines if engine.gpu == FITTED_GPU]
    others = [engine for engine in engines if engine.gpu != FITTED_GPU]
    overheads = fit_overheads(fitted)
    errors = {
        "fitted": prediction_error(fitted, overheads),
        "not_fitted": prediction_error(others, overheads),
    }
    for gpu, model in sorted({(engine.gpu, engine.model) for engine in others}):
        group = [engine for engine in others if (engine.gpu, engine.model) == (gpu, model)]
        errors[f"{gpu} {model}"] = prediction_error(group, overheads)
    return FitResult(overheads, errors)


# ---- the command ---------------------------------------------------------------------------------


def main() -> None:
    """Fit, print the errors, and write the constants if that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", type=Path, default=Path("../shared/calibration"))
    parser.add_argument("--write", action="store_true", help="write coefficients.yaml")
    options = parser.parse_args()

    result = fit_and_test(read_engines(options.calibration))
    print(f"overheads: {result.overheads}")
    for value in find_at_bounds(result.overheads):
        print(f"on its limit: {value}")
    for group, error in result.errors.items():
        values = msgspec.structs.asdict(error)
        print(
            f"TPOT error, {group:32} "
            + "  ".join(f"{name} {value}" for name, value in values.items())
        )
    if options.write:
        _write_constants(result)
        print(f"wrote {COEFFICIENTS_FILE.name}")


def _write_constants(result: FitResult) -> None:
    """Write overheads and errors to `coefficients.yaml`, and keep all else that it has."""
    constants = load_constants()
    constants = msgspec.structs.replace(
        constants,
        provenance=constants.provenance
        | {"error": result.errors, "at_bounds": find_at_bounds(result.overheads)},
        overheads=result.overheads,
    )
    COEFFICIENTS_FILE.write_bytes(msgspec.yaml.encode(msgspec.to_builtins(constants)))


if __name__ == "__main__":
    main()
