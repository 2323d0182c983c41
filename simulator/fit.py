"""Fits `hardware.Overheads` to measured engines, and tests each fit on others.

The overheads are what `hardware.py` cannot derive from data sheets when it makes the `Coefficients` of a
replica: how much of a memory's or kernel's speed an engine reaches, and what it does besides. The
formulas that use them stand at the head of that file, and `Coefficients` has the times of a step and
of a prefill (`step_s(rows, KV tokens)`, `prefill_s(uncached tokens, prompt tokens)`).

`python -m diptych.simulator.fit [--calibration FOLDER] [--write]` prints the errors and, with
`--write`, writes `coefficients.yaml`.

The measured engines are aggregated (one engine computes prompts and answers), with tp 1 to 8 and
without attention-data parallelism, where the load's concurrency is stated: vLLM, SGLang and
TensorRT-LLM with dense models and mixtures of experts on H100, H200 and B200 SXM. With B sequences
that decode at a time in a closed loop, an engine's time per output token is predicted as

    TPOT = step_s(B, B * (isl + osl / 2)) + B * prefill_s(isl, isl) / osl
    B    = min(concurrency, KV tokens of the replica / (isl + osl / 2)), at least 1

where isl and osl are the lengths of prompt and answer in tokens, isl + osl / 2 is the mean length
of a sequence while it decodes, and nothing of a prompt is cached. The second term is the share of
the prompts' time: while a sequence decodes its osl tokens, B prompts are computed. A fit minimises
the squares of log(predicted / measured), of large errors (`LARGE_ERROR`) the magnitudes.

There is a fit for each engine, kind of kernels and generation of GPUs; one for both generations with
vLLM and dense models. What it is tested on:
- vLLM with dense models is fitted to all that the sample has of it on H200, which is Llama-3.1-70B in
  fp8, and tested on H100 and B200 and on Qwen3-32B. Most published figures of the simulator rest on
  this fit.
- Other fits are cross-validated: the configurations (model, GPU, tp, isl, osl) are in `FOLDS`
  parts, and each part is predicted by a fit to the others. What is written down is fitted to all.
  This tells of other loads and tp of models and GPUs that were measured. What a pair of GPU and model
  is that was not measured is told by predicting each pair from a fit to all other pairs
  (`EngineFit.left_out`); the others may have the GPU, or the model, in another pair.
- Diptych's own engine was timed on one H200 (`loadtests/results/gpu-proof.md`): single steps and
  single prompts of one model. Steps with FP8 weights and with sampling test that fit.

No fit uses `IMPLAUSIBLE` engines. All fits but that of vLLM with dense models, which is older than this
rule, leave out measurements whose requests waited for a place, as then B is not known, and of the rest
all but the newest of the same engine, replica and load.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.optimize import least_squares

from ..protos.frames import Coefficients
from .hardware import (
    COEFFICIENTS_FILE,
    DEFAULT_ENGINE,
    EngineFit,
    Kernels,
    Overheads,
    PredictionError,
    derive_coefficients,
    find_gpu,
    find_model,
    kv_tokens_beside_weights,
    load_constants,
)

SAMPLE_FILE = "silicon_sample.csv.gz"  #: in the calibration folder: a row for each measured engine
OWN_TABLES = Path(__file__).parents[1] / "loadtests/results/gpu-proof.md"  #: of our own engine
SAMPLED_STEPS = "Decode, bf16, temperature 0.6 and top_p 0.9"  #: the title of one of those tables
#: From the names in the sample to those in `coefficients.yaml`, here and in the next two tables; rows
#: of other names are not used. A model's name there is one of `MODEL_NAMES`, with its data type behind:
#: `llama3.1-70b-fp8`. DeepSeek-R1 has the shape of V3.
GPU_NAMES = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}
MODEL_NAMES = {
    "Llama-3.1-8B-Instruct": "llama3.1-8b",
    "Llama-3.1-8B-Instruct-FP8": "llama3.1-8b",
    "Llama-3.1-70B": "llama3.1-70b",
    "Qwen3-32B": "qwen3-32b",
    "Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "MiniMax-M2.5": "minimax-m2.5",
    "gpt-oss-120b": "gpt-oss-120b",
    "DeepSeek-R1": "deepseek-v3",
    "DeepSeek-V3": "deepseek-v3",
    "Kimi-K2.5": "kimi-k2.5",
}
DATA_TYPES = {
    "": "bf16",  # the sample names no type where nothing is quantized
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8",
    "nvfp4": "nvfp4",
    "int4_wo": "int4",
}
#: Its weights are in 4 bits wherever it runs; the sample names the type of its activations.
MXFP4_MODEL = "gpt-oss-120b"
#: (engine, model of the sample) that no fit uses. At the data sheet's full rate the arithmetic of their
#: prompts alone would take nearly as long as what was measured, in which KV and weights were read too;
#: so their prompts must have been cached in part.
IMPLAUSIBLE = {("vllm", "Llama-3.1-8B-Instruct-FP8")}
#: A time to the first token that is more than this share of the time of all output tokens (osl * TPOT)
#: shows that requests waited for a place.
QUEUED_SHARE = 0.5
FITTED_GPU = "H200"  #: of vLLM with dense models; the engines on all other GPUs test that fit
FOLDS = 4
LEAST_OTHERS = (
    15  #: measurements of other pairs, by a fit to which a pair of GPU and model is predicted
)
LIMIT_SHARE = 1e-3  #: of the span between two limits: so near to one counts as on it
UNTOLD_SHARE = 1e-3  #: of its start: if `row_s` moved by less, no measurement tells it
NO_TIME_S = 1e-12  #: fitted seconds of less are none
LARGE_ERROR = 0.1  #: of log(predicted / measured); larger errors count linearly, not squared

#: `Overheads.step_s` of the fits to one model: of vLLM with dense models, and of our own engine. One
#: model has one number of layers, so it tells only the sum of a step's overhead and its layers'. The
#: share of `step_s` in this sum is therefore arbitrary: a free fit ends at another one on each machine
#: that computes it. It is held at what such a fit to vLLM once ended at, 4 % of the sum.
HELD_STEP_S = 1.858e-4


@dataclass(frozen=True, slots=True)
class FitLimits:
    """Where a fit begins, and between which values it searches.

    An overhead whose limits are equal is held. A fit varies a factor on the start value of each other
    one, so none of these starts at 0. Memory is read at 0.9 of its data sheet's bandwidth at most, as
    the fastest kernels alone do (`KERNEL_MEMORY_SHARE` in `bound.py`); other limits are wide guesses.
    """

    start: Overheads
    lower: Overheads
    upper: Overheads


#: Of vLLM with dense models, and of our own engine. `prefill_efficiency` is the share of its kernels' speed
#: that a prefill reaches, and `row_s`, what the host does for each sequence, is held at 0.
HELD_LIMITS = FitLimits(
    start=Overheads(
        weights_efficiency=0.9,
        kv_efficiency=0.8,
        step_s=HELD_STEP_S,
        layer_s=3e-5,
        prefill_efficiency=1.0,
        prompt_s=5e-3,
    ),
    lower=Overheads(
        weights_efficiency=0.3,
        kv_efficiency=0.3,
        step_s=HELD_STEP_S,
        layer_s=0.0,
        prefill_efficiency=0.3,
        prompt_s=0.0,
    ),
    upper=Overheads(
        weights_efficiency=0.9,
        kv_efficiency=0.9,
        step_s=HELD_STEP_S,
        layer_s=2e-4,
        prefill_efficiency=1.0,
        prompt_s=1e-2,
    ),
)
#: Of all others. A chunk of a prompt shares the reading of weights with the step that it is in; the
#: module's formula counts that twice, in its first term and in its second. So a prefill may seem
#: faster than its kernels: its efficiency may be above 1.
FREE_LIMITS = FitLimits(
    start=Overheads(
        weights_efficiency=0.8,
        kv_efficiency=0.6,
        step_s=5e-4,
        layer_s=3e-5,
        prefill_efficiency=0.8,
        prompt_s=5e-3,
        row_s=1e-5,
    ),
    lower=Overheads(
        weights_efficiency=0.2,
        kv_efficiency=0.1,
        step_s=0.0,
        layer_s=0.0,
        prefill_efficiency=0.1,
        prompt_s=0.0,
    ),
    upper=Overheads(
        weights_efficiency=0.9,
        kv_efficiency=0.9,
        step_s=5e-3,
        layer_s=3e-4,
        prefill_efficiency=1.3,
        prompt_s=5e-2,
        row_s=1e-4,
    ),
)


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """One row of the sample: an engine under one load, and its measured time per output token."""

    engine: str  #: the software: vllm, sglang or trtllm
    gpu: str
    model: str  #: with the data type of its weights: `llama3.1-70b-fp8`
    tp: int  #: GPUs that share the model
    concurrency: int  #: requests that clients keep open
    isl: int  #: tokens of each prompt
    osl: int  #: tokens of each answer
    tpot_s: float  #: time per output token
    ttft_s: float = 0.0  #: time to the first token; 0: not known, and no sign of a queue
    #: Groups of GPUs that have different experts. No formula has it; it tells measurements apart.
    expert_parallel: int = 1
    #: The date of the measurement, if it is known, and the version of the engine, to be compared as
    #: texts: a later date is behind an earlier one and behind none. No two measurements of the sample
    #: that differ by the version alone have numbers there.
    version: str = ""
    implausible: bool = False  #: of `IMPLAUSIBLE`, which no fit uses

    @property
    def replica(self) -> tuple[str, str, int]:
        """What its coefficients depend on, beside the overheads."""
        return self.model, self.gpu, self.tp

    @property
    def measured_s(self) -> float:
        """The measured time, which `predict_s` predicts."""
        return self.tpot_s

    @property
    def kernels(self) -> Kernels:
        """The kind of kernels that it runs."""
        return find_model(self.model).kernels(find_gpu(self.gpu))

    def predict_s(self, cost: Coefficients) -> float:
        """Return the seconds per output token by the module's formulas.

        `rows` is their B, at least 1: an engine whose KV is smaller than one sequence serves one
        still. A step computes whole rows; B is not whole where KV limits it.
        """
        kv_tokens = _kv_tokens(*self.replica)
        mean_length = self.isl + self.osl / 2
        rows = min(self.concurrency, max(1.0, kv_tokens / mean_length))
        step_s = cost.step_s(int(rows), rows * mean_length)
        return step_s + rows * cost.prefill_s(self.isl, self.isl) / self.osl


@cache  # each of the hundreds of steps of a fit asks for it, and it depends on no overheads
def _kv_tokens(model: str, gpu: str, tp: int) -> float:
    return kv_tokens_beside_weights(find_model(model), find_gpu(gpu), tp)


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """One step, or one whole prompt, of our own engine."""

    gpu: str
    model: str
    measured_s: float
    rows: int  #: of the step; 0: a prompt is computed
    tokens: int  #: that each row reads, or of the prompt
    tests: bool = False  #: not fitted to

    @property
    def replica(self) -> tuple[str, str, int]:
        """What its coefficients depend on, beside the overheads."""
        return self.model, self.gpu, 1

    def predict_s(self, cost: Coefficients) -> float:
        """Return the seconds that the step or the prompt takes."""
        if self.rows:
            return cost.step_s(self.rows, self.rows * self.tokens)
        return cost.prefill_s(self.tokens, self.tokens)


Measured = MeasuredEngine | MeasuredCall


# ---- the measured engines ------------------------------------------------------------------------


def read_engines(folder: Path) -> list[MeasuredEngine]:
    """Return the engines of the sample that the closed form describes."""
    with gzip.open(folder / SAMPLE_FILE, "rt") as file:
        engines = [_parse_engine(row) for row in csv.DictReader(file)]
    return [engine for engine in engines if engine is not None]


def _parse_engine(row: dict[str, str]) -> MeasuredEngine | None:
    """Return the row's engine, or None if its kind is not fitted."""
    name = row["model_path"].rpartition("/")[2]
    source = row["silicon_data_source"]
    concurrency = re.search(r"silicon_concurrency=(\d+)", source)
    if row["system"] not in GPU_NAMES or name not in MODEL_NAMES or concurrency is None:
        return None
    if row["mode"] != "agg" or row["pp_size"] != "1" or int(row["tp_size"]) > 8:
        return None
    if row["attention_dp_size"] not in ("", "1") or row["gemm_quant_mode"] not in DATA_TYPES:
        return None
    data_type = "mxfp4" if name == MXFP4_MODEL else DATA_TYPES[row["gemm_quant_mode"]]
    model = f"{MODEL_NAMES[name]}-{data_type}"
    tp = int(row["tp_size"])
    expert_parallel = int(row["moe_ep_size"] or 1)
    # Some rows with experts have the GPUs of several replicas in `moe_tp_size` or `moe_ep_size`.
    if find_model(model).experts and int(row["moe_tp_size"]) * expert_parallel != tp:
        return None
    measured = re.search(r"measured=([-\d]+)", source)
    return MeasuredEngine(
        engine=row["backend"],
        gpu=GPU_NAMES[row["system"]],
        model=model,
        tp=tp,
        concurrency=int(concurrency[1]),
        isl=int(row["isl"]),
        osl=int(row["osl"]),
        tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
        expert_parallel=expert_parallel,
        version=f"{measured[1] if measured else ''} {row['backend_version']}",
        implausible=(row["backend"], name) in IMPLAUSIBLE,
    )


def newest_unqueued(engines: Iterable[MeasuredEngine]) -> list[MeasuredEngine]:
    """Return the newest measurement of each engine, replica and load.

    Measurements whose requests queued are left out first.
    """
    newest: dict[tuple, MeasuredEngine] = {}
    for engine in engines:
        if engine.ttft_s > QUEUED_SHARE * engine.osl * engine.tpot_s:
            continue
        load = (engine.concurrency, engine.isl, engine.osl)
        key = (engine.engine, *engine.replica, engine.expert_parallel, *load)
        if key not in newest or engine.version >= newest[key].version:
            newest[key] = engine
    return list(newest.values())


def read_own_engine(path: Path = OWN_TABLES) -> list[MeasuredCall]:
    """Return the steps and prompts of our own engine, from the tables of the GPU proof.

    The proof times kernels on a real GPU (`engine/gpu/prove.py`). A table's title ends with what it
    has (`## ...: Decode, bf16`); its first column is `rows x context`, or a prompt's tokens, and its
    second one milliseconds. Raises ValueError where one of the four tables is missing.
    """
    tables: dict[str, list[list[str]]] = defaultdict(list)
    title = ""
    for line in path.read_text().splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ").partition(": ")[2]
        elif re.match(r"\| \d", line):
            tables[title].append([cell.strip() for cell in line.strip("|").split("|")])

    missing = {"Decode, bf16", "Prefill", SAMPLED_STEPS, "Decode, FP8 weights"} - tables.keys()
    if missing:
        raise ValueError(f"{path.name} has no table: {', '.join(sorted(missing))}")

    def steps(title: str, model: str, *, tests: bool) -> list[MeasuredCall]:
        calls: list[MeasuredCall] = []
        for load, milliseconds, *_ in tables[title]:
            rows, context = map(int, load.split(" x "))
            calls.append(
                MeasuredCall("H200", model, float(milliseconds) / 1e3, rows, context, tests)
            )
        return calls

    prompts = [
        MeasuredCall("H200", "llama3.1-8b-bf16", float(milliseconds) / 1e3, 0, int(tokens))
        for tokens, milliseconds, *_ in tables["Prefill"]
    ]
    return [
        *steps("Decode, bf16", "llama3.1-8b-bf16", tests=False),
        *prompts,
        *steps(SAMPLED_STEPS, "llama3.1-8b-bf16", tests=True),
        *steps("Decode, FP8 weights", "llama3.1-8b-fp8", tests=True),
    ]


# ---- the fit -------------------------------------------------------------------------------------


def predict(measured: Iterable[Measured], overheads: Overheads) -> list[float]:
    """Return the predicted seconds with these overheads."""
    costs: dict[tuple[str, str, int], Coefficients] = {}
    predicted: list[float] = []
    for one in measured:
        if one.replica not in costs:
            model, gpu, tp = one.replica
            costs[one.replica] = derive_coefficients(
                find_model(model), find_gpu(gpu), tp, overheads
            )
        predicted.append(one.predict_s(costs[one.replica]))
    return predicted


class FittedOverheads(NamedTuple):
    """Overheads, and the limits within which they were found at last."""

    overheads: Overheads
    limits: FitLimits


def fit_overheads(measured: Sequence[Measured], limits: FitLimits = FREE_LIMITS) -> FittedOverheads:
    """Return the overheads that predict these times best, to four digits.

    What each row takes of the host (`row_s`) is held at 0 where the fit leaves it at its start. A step
    takes as long as reading its weights or as its rows, whichever is more: if that is always the
    weights, no measurement tells `row_s`.
    """
    overheads = _fit_within(measured, limits)
    row_s = limits.start.row_s
    if limits.upper.row_s and abs(overheads.row_s - row_s) <= UNTOLD_SHARE * row_s:
        limits = _without_rows(limits)
        overheads = _fit_within(measured, limits)
    return FittedOverheads(overheads, limits)


def _without_rows(limits: FitLimits) -> FitLimits:
    """Return the limits with `row_s` held at 0."""
    parts = (limits.start, limits.lower, limits.upper)
    return FitLimits(*(msgspec.structs.replace(part, row_s=0.0) for part in parts))


def _fit_within(measured: Sequence[Measured], limits: FitLimits) -> Overheads:
    """Return the best overheads; they are varied as factors on the start, to have a like scale."""
    start = _as_array(limits.start)
    lower = _as_array(limits.lower)
    upper = _as_array(limits.upper)
    free = lower < upper
    measured_s = np.array([one.measured_s for one in measured])

    def scaled_overheads(factors: np.ndarray) -> Overheads:
        """Return the start with its free values multiplied; a held one may be 0."""
        values = start.copy()
        values[free] *= factors
        return Overheads(*values.tolist())

    def residuals(factors: np.ndarray) -> np.ndarray:
        return np.log(np.array(predict(measured, scaled_overheads(factors))) / measured_s)

    solution = least_squares(
        residuals,
        np.ones(free.sum()),
        bounds=(lower[free] / start[free], upper[free] / start[free]),
        loss="soft_l1",
        f_scale=LARGE_ERROR,
    )
    best = _as_array(scaled_overheads(solution.x))
    return Overheads(*(float(f"{value:.4g}") if value > NO_TIME_S else 0.0 for value in best))


def find_at_bounds(overheads: Overheads, limits: FitLimits) -> tuple[str, ...]:
    """Return the overheads that sit on a limit of the fit, as in `prompt_s 0.01`.

    The fit ends close to a limit, not on it, and overheads have four digits.
    """
    values = msgspec.structs.asdict(overheads)
    lower = msgspec.structs.asdict(limits.lower)
    upper = msgspec.structs.asdict(limits.upper)
    return tuple(
        f"{name} {value:g}"
        for name, value in values.items()
        if lower[name] < upper[name]
        and min(value - lower[name], upper[name] - value)
        <= LIMIT_SHARE * (upper[name] - lower[name])
    )


def _as_array(overheads: Overheads) -> np.ndarray:
    return np.array(msgspec.structs.astuple(overheads))


# ---- how well a fit predicts ---------------------------------------------------------------------


class Prediction(NamedTuple):
    """A measured time, and how far the predicted one is from it."""

    measured: Measured
    error: float  #: relative, with its sign


def predictions(measured: Sequence[Measured], overheads: Overheads) -> list[Prediction]:
    """Return how far the predictions are from what was measured."""
    return [
        Prediction(one, predicted_s / one.measured_s - 1)
        for one, predicted_s in zip(measured, predict(measured, overheads), strict=True)
    ]


def summarise(made: list[Prediction]) -> PredictionError:
    """Return the errors of the predictions together."""
    errors = np.array([prediction.error for prediction in made])
    magnitudes = np.abs(errors)
    return PredictionError(
        rows=len(made),
        mean=round(float(magnitudes.mean()), 4),
        median=round(float(np.median(magnitudes)), 4),
        bias=round(float(errors.mean()), 4),
    )


def summarise_groups(made: list[Prediction]) -> dict[str, PredictionError]:
    """Return the errors of all predictions ("all"), and of those of each pair of GPU and model.

    Empty without predictions.
    """
    if not made:
        return {}
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in made:
        groups[_group_of(prediction.measured)].append(prediction)
    return {"all": summarise(made)} | {name: summarise(groups[name]) for name in sorted(groups)}


def cross_validate(engines: list[MeasuredEngine]) -> list[Prediction]:
    """Return predictions by fits to other configurations; none where all are in one part."""
    parts: list[list[MeasuredEngine]] = [[] for _ in range(FOLDS)]
    for engine in engines:
        parts[_fold(engine)].append(engine)
    made: list[Prediction] = []
    for part in parts:
        others = [engine for other in parts if other is not part for engine in other]
        if part and others:
            made += predictions(part, fit_overheads(others).overheads)
    return made


def leave_groups_out(measured: Sequence[Measured], limits: FitLimits) -> PredictionError | None:
    """Return the errors where each pair of GPU and model is predicted by a fit to all other pairs.

    A pair beside which there are fewer than `LEAST_OTHERS` measurements is passed over; None: all are.
    """
    groups: dict[str, list[Measured]] = defaultdict(list)
    for one in measured:
        groups[_group_of(one)].append(one)
    made: list[Prediction] = []
    for name, members in groups.items():
        others = [one for other, ones in groups.items() if other != name for one in ones]
        if len(others) >= LEAST_OTHERS:
            made += predictions(members, fit_overheads(others, limits).overheads)
    return summarise(made) if made else None


def _group_of(measured: Measured) -> str:
    """Return the pair of GPU and model, as `EngineFit` names it: `H200 llama3.1-70b-fp8`."""
    model, gpu, _ = measured.replica
    return f"{gpu} {model}"


def measured_groups(measured: Sequence[Measured]) -> tuple[str, ...]:
    """Return the pairs of GPU and model that were measured."""
    return tuple(sorted({_group_of(one) for one in measured}))


def _fold(engine: MeasuredEngine) -> int:
    """Return the part that the engine's configuration is in; all its concurrencies are in one."""
    configuration = f"{engine.model} {engine.gpu} {engine.tp} {engine.isl} {engine.osl}"
    return hashlib.sha256(configuration.encode()).digest()[0] % FOLDS


# ---- all fits ------------------------------------------------------------------------------------


def fit_all(
    engines: list[MeasuredEngine], report_fit: Callable[[EngineFit], None] = lambda fit: None
) -> list[EngineFit]:
    """Return the fits of all engines, in a fixed order; each goes to `report_fit` when it is made."""
    fits: list[EngineFit] = []

    def add(fit: EngineFit) -> None:
        fits.append(fit)
        report_fit(fit)

    engines = [engine for engine in engines if not engine.implausible]
    add(fit_dense_vllm(engines))
    groups: dict[tuple[str, Kernels, str], list[MeasuredEngine]] = defaultdict(list)
    for engine in newest_unqueued(engines):
        generation = find_gpu(engine.gpu).generation
        groups[engine.engine, engine.kernels, generation].append(engine)
    for (name, kernels, generation), members in sorted(groups.items()):
        if (name, kernels) != (DEFAULT_ENGINE, Kernels.DENSE):
            add(fit_kind(name, kernels, generation, members))
    add(fit_own_engine(read_own_engine()))
    return fits


def fit_dense_vllm(engines: list[MeasuredEngine]) -> EngineFit:
    """Return the fit to vLLM with dense models on `FITTED_GPU`, tested on the others."""
    dense = [
        engine
        for engine in engines
        if engine.engine == DEFAULT_ENGINE and engine.kernels is Kernels.DENSE
    ]
    fitted = [engine for engine in dense if engine.gpu == FITTED_GPU]
    others = [engine for engine in dense if engine.gpu != FITTED_GPU]
    overheads, limits = fit_overheads(fitted, HELD_LIMITS)
    return EngineFit(
        engine=DEFAULT_ENGINE,
        kernels=Kernels.DENSE,
        generations=("Hopper", "Blackwell"),
        overheads=overheads,
        fitted=summarise(predictions(fitted, overheads)),
        measured=measured_groups([*fitted, *others]),
        left_out=None,  # it is tested by what it was not fitted to
        not_fitted=summarise_groups(predictions(others, overheads)),
        at_bounds=find_at_bounds(overheads, limits),
    )


def fit_kind(
    engine: str, kernels: Kernels, generation: str, members: list[MeasuredEngine]
) -> EngineFit:
    """Return the fit to all engines of a kind, tested by cross-validation."""
    overheads, limits = fit_overheads(members)
    return EngineFit(
        engine=engine,
        kernels=kernels,
        generations=(generation,),
        overheads=overheads,
        fitted=summarise(predictions(members, overheads)),
        measured=measured_groups(members),
        left_out=leave_groups_out(members, FREE_LIMITS),
        not_fitted=summarise_groups(cross_validate(members)),
        at_bounds=find_at_bounds(overheads, limits),
    )


def fit_own_engine(calls: list[MeasuredCall]) -> EngineFit:
    """Return the fit to our own engine's greedy steps and prompts in bf16, tested on the others."""
    fitted = [call for call in calls if not call.tests]
    overheads, limits = fit_overheads(fitted, HELD_LIMITS)
    others = [call for call in calls if call.tests]
    return EngineFit(
        engine="diptych",
        kernels=Kernels.DENSE,
        generations=("Hopper",),
        overheads=overheads,
        fitted=summarise(predictions(fitted, overheads)),
        measured=measured_groups([*fitted, *others]),
        left_out=None,  # it is tested by what it was not fitted to
        not_fitted=summarise_groups(predictions(others, overheads)),
        at_bounds=find_at_bounds(overheads, limits),
    )


# ---- the command ---------------------------------------------------------------------------------


def main() -> None:
    """Fit, print the errors, and write the constants if that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", type=Path, default=Path("../shared/calibration"))
    parser.add_argument("--write", action="store_true", help="write coefficients.yaml")
    options = parser.parse_args()

    engines = read_engines(options.calibration)
    fits = fit_all(engines, _print_fit)
    _print_engines(fits)
    _print_implausible(engines, fits)
    if options.write:
        constants = msgspec.structs.replace(load_constants(), fits=fits)
        COEFFICIENTS_FILE.write_bytes(msgspec.yaml.encode(msgspec.to_builtins(constants)))
        print(f"wrote {COEFFICIENTS_FILE.name}")


def _print_fit(fit: EngineFit) -> None:
    """Print the overheads of a fit, and its errors."""
    print(f"{fit.engine}, {fit.kernels}, {' and '.join(fit.generations)}: {fit.overheads}")
    for value in fit.at_bounds:
        print(f"  on its limit: {value}")
    not_fitted = {f"not fitted, {group}": error for group, error in fit.not_fitted.items()}
    errors = {"fitted": fit.fitted} | not_fitted
    if fit.left_out is not None:
        errors["each pair of GPU and model left out"] = fit.left_out
    for group, error in errors.items():
        values = msgspec.structs.asdict(error).items()
        print(f"  {group:42} " + "  ".join(f"{name} {value}" for name, value in values))


def _print_engines(fits: list[EngineFit]) -> None:
    """Print the mean error of each engine, of dense models and of mixtures of experts.

    It is of the time per output token; of our own engine, of the steps that test its fit.
    """
    rows: dict[tuple[str, ...], int] = defaultdict(int)
    weighted: dict[tuple[str, ...], float] = defaultdict(float)
    for fit in fits:
        kind = "dense" if fit.kernels.is_dense else "experts"
        errors = {"not fitted": fit.not_fitted.get("all"), "pair left out": fit.left_out}
        for test, error in errors.items():
            if error is not None:
                rows[fit.engine, kind, test] += error.rows
                weighted[fit.engine, kind, test] += error.rows * error.mean
    print(
        "mean error of the predicted time: of measurements that were not fitted to; and of pairs of"
    )
    print("GPU and model, each predicted by a fit to all other pairs")
    for key, count in sorted(rows.items()):
        print(f"  {', '.join(key):30} {weighted[key] / count:.3f} of {count}")


def _print_implausible(engines: list[MeasuredEngine], fits: list[EngineFit]) -> None:
    """Print how far vLLM's dense fit is from the engines that no fit uses, which are such ones."""
    left_out = [engine for engine in engines if engine.implausible]
    fit = next(fit for fit in fits if (fit.engine, fit.kernels) == (DEFAULT_ENGINE, Kernels.DENSE))
    print("left out as implausible, with the fit of vLLM's dense models")
    for group, error in summarise_groups(predictions(left_out, fit.overheads)).items():
        print(f"  {group:20} {error.mean:.3f} of {error.rows}, bias {error.bias:+.3f}")


if __name__ == "__main__":
    main()
