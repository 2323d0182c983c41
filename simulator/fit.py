"""Fits the overheads of the closed form on measured rows, and says how well it predicts others.

`python -m diptych.simulator.fit [--calibration FOLDER] [--write]`: prints the error and, with
`--write`, writes `coefficients.yaml`.

Rows: dense models (Llama-3.1-70B fp8, Qwen3-32B bf16/fp8), vLLM, aggregated, H100/H200/B200 SXM,
tp 1-8, concurrency stated. Fitted on every H200 row, tested on every H100 and B200 row. Closed
loop at concurrency c:

    TPOT = step(B, B (isl + osl/2)) + B prefill(isl, isl) / osl
    B    = min(c, KV tokens of the worker / (isl + osl/2))
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from scipy.optimize import least_squares

from . import hardware as hw

NAMES = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}
MODELS = {"meta-llama/Llama-3.1-70B": "llama3.1-70b", "Qwen/Qwen3-32B": "qwen3-32b"}
# The fitted rows are of one model: of a step's overhead they tell the sum with its layers' only.
# So `step_s` is held, at what the first fit had left there.
STEP_S = 1.858e-4
START = hw.Overheads(0.9, 0.8, STEP_S, 3e-5, 1.0, 5e-3)
LOWEST = hw.Overheads(0.3, 0.3, STEP_S, 0.0, 0.3, 0.0)
HIGHEST = hw.Overheads(0.9, 0.9, STEP_S, 2e-4, 1.0, 1e-2)  # no better than kernels alone


@dataclass(frozen=True, slots=True)
class Row:
    """One measured engine configuration; times in seconds."""

    gpu: str
    model: str
    tp: int
    concurrency: int
    isl: int
    osl: int
    tpot_s: float
    ttft_s: float


def read_rows(folder: Path) -> list[Row]:
    with gzip.open(folder / "silicon_sample.csv.gz", "rt") as file:
        found = [_row(raw) for raw in csv.DictReader(file)]
    return [row for row in found if row is not None]


def _row(raw: dict[str, str]) -> Row | None:
    if raw["mode"] != "agg" or raw["system"] not in NAMES or raw["model_path"] not in MODELS:
        return None
    dtype = raw["gemm_quant_mode"] or "bf16"
    said = re.search(r"silicon_concurrency=(\d+)", raw["silicon_data_source"])
    if raw["backend"] != "vllm" or dtype not in ("bf16", "fp8") or raw["pp_size"] != "1":
        return None
    if said is None:
        return None
    return Row(
        NAMES[raw["system"]],
        f"{MODELS[raw['model_path']]}-{dtype}",
        int(raw["tp_size"]),
        int(said[1]),
        int(raw["isl"]),
        int(raw["osl"]),
        float(raw["silicon_tpot_ms"]) / 1e3,
        float(raw["silicon_ttft_ms"]) / 1e3,
    )


def tpot(row: Row, over: hw.Overheads) -> float:
    model, gpu = hw.model_named(row.model), hw.gpu_named(row.gpu)
    cost = hw.closed_form(model, gpu, row.tp, over)
    length = row.isl + row.osl / 2
    room = gpu.hbm_bytes * hw.POOL_SHARE * row.tp - model.weight_bytes
    rows = min(row.concurrency, max(1.0, room / model.kv_bytes / length))
    prefill = hw.prefill_s(cost, row.isl, row.isl)
    return hw.step_s(cost, int(rows), rows * length) + rows * prefill / row.osl


def fit(rows: list[Row]) -> hw.Overheads:
    """Least squares of log(predicted / measured), large errors counted linearly."""
    start, low, high = (np.array(msgspec.structs.astuple(x)) for x in (START, LOWEST, HIGHEST))
    free = low < high

    def overheads(values: np.ndarray) -> hw.Overheads:
        every = start.copy()
        every[free] *= values
        return hw.Overheads(*every.tolist())

    def residuals(values: np.ndarray) -> np.ndarray:
        over = overheads(values)
        return np.array([np.log(tpot(row, over) / row.tpot_s) for row in rows])

    bounds = (low[free] / start[free], high[free] / start[free])
    ones = np.ones(free.sum())
    found = least_squares(residuals, ones, bounds=bounds, loss="soft_l1", f_scale=0.1)
    best = msgspec.structs.astuple(overheads(found.x))
    return hw.Overheads(*(float(f"{value:.4g}") for value in best))


def error(rows: list[Row], over: hw.Overheads) -> dict:
    """Relative errors of TPOT: mean of magnitudes, their median, mean with sign."""
    errors = np.array([tpot(row, over) / row.tpot_s - 1 for row in rows])
    magnitudes = np.abs(errors)
    return {
        "rows": len(rows),
        "mean": round(float(magnitudes.mean()), 4),
        "median": round(float(np.median(magnitudes)), 4),
        "bias": round(float(errors.mean()), 4),
    }


def report(rows: list[Row]) -> tuple[hw.Overheads, dict]:
    """The fit, and the error on the rows it has seen and on those it has not."""
    seen = [row for row in rows if row.gpu == "H200"]
    unseen = [row for row in rows if row.gpu != "H200"]
    over = fit(seen)
    errors = {"fitted": error(seen, over), "not_fitted": error(unseen, over)}
    for gpu, model in sorted({(row.gpu, row.model) for row in unseen}):
        group = [row for row in unseen if (row.gpu, row.model) == (gpu, model)]
        errors[f"{gpu} {model}"] = error(group, over)
    return over, errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", type=Path, default=Path("../shared/calibration"))
    parser.add_argument("--write", action="store_true", help="write coefficients.yaml")
    options = parser.parse_args()
    over, errors = report(read_rows(options.calibration))
    print(f"overheads: {over}")
    for name, values in errors.items():
        print(f"TPOT error, {name:32} " + "  ".join(f"{k} {v}" for k, v in values.items()))
    if options.write:
        known = hw.constants()
        provenance = known.provenance | {"error": errors}
        known = msgspec.structs.replace(known, provenance=provenance, overheads=over)
        hw.FILE.write_bytes(msgspec.yaml.encode(msgspec.to_builtins(known)))
        print(f"wrote {hw.FILE.name}")


if __name__ == "__main__":
    main()
