"""Compiles every kernel for a GPU that need not be there, and prints what each takes.

python tests/engine/gpu/compiling.py 90     # compute capability x 10; without TRITON_INTERPRET
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from diptych.engine.gpu import (
    digest,
    elementwise,
    experts,
    few_rows,
    fp8,
    matmul,
    paged,
    sampling,
)
from diptych.kv_transfer.vram import GOLDEN, MIX
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HALF, WIDE, INTS, LONGS, F64 = "*bf16", "*fp32", "*i32", "*i64", "*fp64"
ATTEND = {
    **dict.fromkeys(("queries", "keys", "values", "out"), HALF),
    **dict.fromkeys(("partials", "tops"), WIDE),
    **dict.fromkeys(("query_starts", "kv_lengths", "block_table"), INTS),
    "scale": "fp32",
}
SHAPE = {"GROUP": 4, "KEYS": 64, "PAGE": 64, "DIM": 128}
PREFILL = {**SHAPE, "TOKENS": 32, "ROWS": 128, "SPLIT": 0}
DECODE = {**SHAPE, "ROWS": 16, "SPLIT": 256}
EXACT = {**SHAPE, "TOKENS": 4, "ROWS": 16, "SPLIT": 256}
ROPE = {
    **dict.fromkeys(("qkv", "keys", "values", "q_norm", "k_norm"), HALF),
    **dict.fromkeys(("cos", "sin"), WIDE),
    **dict.fromkeys(("block", "offset"), LONGS),
    "eps": "fp32",
}
MATMUL = dict.fromkeys(("x", "weight", "bias", "residual", "out"), HALF)
TILE = {"ROWS": matmul.ROWS, "COLUMNS": matmul.COLUMNS, "DEPTH": matmul.DEPTH}
EXPERTS = {
    **dict.fromkeys(("rows", "weight", "out"), HALF),
    **dict.fromkeys(("order", "experts", "firsts", "ends"), LONGS),
    "scales": WIDE,
}
MANY = {"ROWS": experts.MANY_ROWS, "COLUMNS": 128, "DEPTH": 64, "SCALED": False}
#: Every sampling kernel takes some of these.
SAMPLING = {
    **dict.fromkeys(("logits", "scores", "tops", "peaks", "sums", "list_values"), WIDE),
    **dict.fromkeys(("out_peaks", "out_tops", "out_logprobs", "top_logprobs"), WIDE),
    **dict.fromkeys(("rows", "border_orders", "out_ids", "out_ranks"), LONGS),
    **dict.fromkeys(("counts", "list_ids", "masks", "ids", "peak_ids", "border_ids"), INTS),
    **dict.fromkeys(("candidates", "top_ids", "triples"), INTS),
    "values": F64,
}
FEW = {
    **dict.fromkeys(("rows", "weight", "bias", "residual", "out"), HALF),
    **dict.fromkeys(("row_scales", "weight_scales", "partials"), WIDE),
    "arrivals": INTS,
}
FEW_TILE = {
    "ROWS": few_rows.FEW_ROWS,
    "OUTPUTS": 64,
    "INPUTS": 128,
    "SPLITS": 4,
    "SCALED": False,
    "GATED": False,
    "HAS_BIAS": True,
    "HAS_RESIDUAL": True,
}
CHUNKS = {"CHUNK": sampling.CHUNK, "CHUNKS": 128}
FP8 = {"keys": "*fp8e4nv", "values": "*fp8e4nv"}
#: name -> kernel, types of its arguments (int32 where none is given), constants, warps
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any], int]] = {
    "prefill": (paged._prefill, ATTEND, PREFILL, 8),
    "decode": (paged._decode, ATTEND, DECODE, 4),
    "decode fp8": (paged._decode, ATTEND | FP8, DECODE, 4),
    "exact prefill": (paged._prefill, ATTEND, EXACT, 4),
    "combine": (
        paged._combine,
        {"partials": WIDE, "tops": WIDE, "out": HALF, "kv_lengths": INTS},
        {"KEYS": 64, "SPLIT": 256, "DIM": 128},
        1,
    ),
    "decode of many rows": (
        paged._decode,
        ATTEND,
        DECODE | {"KEYS": paged.MANY_PROGRAMS_TILE.keys},
        paged.MANY_PROGRAMS_TILE.warps,
    ),
    "rms_norm": (
        elementwise._rms_norm,
        {**dict.fromkeys(("rows", "weight", "out"), HALF), "eps": "fp32"},
        {"BLOCK": 4096},
        8,
    ),
    "silu_mul": (elementwise._silu_mul, {"rows": HALF, "out": HALF}, {"BLOCK": 1024}, 4),
    "rope_store": (elementwise._rope_store, ROPE, {"HALF": 64, "HAS_NORM": True, "HEADS": 8}, 1),
    "rope_store fp8": (
        elementwise._rope_store,
        {**ROPE, "keys": "*fp8e4nv", "values": "*fp8e4nv"},
        {"HALF": 64, "HAS_NORM": False, "HEADS": 1},
        1,
    ),
    "multiply_few": (few_rows._multiply_few, FEW, FEW_TILE, 4),
    "multiply_few fp8": (
        few_rows._multiply_few,
        {**FEW, **dict.fromkeys(("rows", "weight"), "*fp8e4nv")},
        FEW_TILE | {"SCALED": True, "SPLITS": 1, "GATED": True, "HAS_RESIDUAL": False},
        4,
    ),
    "matmul": (matmul._matmul, MATMUL, TILE | {"HAS_BIAS": False, "HAS_RESIDUAL": True}, 8),
    "experts": (experts._grouped, EXPERTS, MANY, 8),
    "experts few": (experts._grouped, EXPERTS, MANY | {"ROWS": experts.FEW_ROWS}, 4),
    "experts fp8": (
        experts._grouped,
        EXPERTS | {"weight": "*fp8e4nv"},
        MANY | {"ROWS": experts.FEW_ROWS, "SCALED": True},
        4,
    ),
    "digest": (
        digest._digest,
        {"words": LONGS, "table": LONGS},
        {"GOLDEN": GOLDEN, "MIX": MIX, "SEGMENT": digest.SEGMENT},
        4,
    ),
    "quantize": (
        fp8._quantize,
        {"rows": HALF, "norm_weight": HALF, "out": "*fp8e4nv", "scales": WIDE, "eps": "fp32"},
        {"BLOCK": 16384, "HAS_NORM": True},
        16,
    ),
    "scan": (sampling._scan, SAMPLING, {"CHUNK": sampling.CHUNK}, 4),
    "cut": (
        sampling._cut,
        SAMPLING,
        {"CHUNKS": 128, "SPAN": sampling.SPAN, "PIVOTS": sampling.PIVOTS},
        sampling.SEARCH_WARPS,
    ),
    "draw": (sampling._draw, SAMPLING, CHUNKS, 4),
    "pick": (sampling._pick, SAMPLING, {"CHUNKS": 128}, 4),
    "list": (sampling._list, SAMPLING, CHUNKS, 4),
    "rank": (sampling._rank, SAMPLING, {"CHUNK": sampling.CHUNK}, 4),
    "count": (sampling._count, SAMPLING, {}, 4),
}


#: Variants of kernels above: types that stand in, and arguments that are 1. Triton takes such an
#: argument for a constant, which another step may not be.
VARIANTS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "prefill fp8": ("prefill", FP8, ()),
    "scan of 1 row": ("scan", {}, ("width", "chunks", "words")),
    "cut of 1 row": ("cut", {}, ("width", "chunks")),
    "draw of 1 row": ("draw", {}, ("width", "chunks")),
    "pick of 1 row": ("pick", {}, ("width", "chunks")),
    "list of 1 row": ("list", {}, ("width", "chunks")),
    "rank of 1 row": ("rank", {}, ("width", "chunks")),
}


def divisible(name: str, kind: str) -> bool:
    """What Triton would see at run time: aligned pointers, sizes that are multiples of 16."""
    return kind.startswith("*") or name.endswith(("_row", "_stride", "columns", "depth", "size"))


def build(name: str, capability: int) -> dict[str, Any]:
    ones: tuple[str, ...] = ()
    if name in VARIANTS:
        name, other_types, ones = VARIANTS[name]
        kernel, types, constants, warps = KERNELS[name]
        types = types | other_types
    else:
        kernel, types, constants, warps = KERNELS[name]
    constants = constants | dict.fromkeys(ones, 1)
    overlaps = capability >= 90
    if "OVERLAP" in kernel.arg_names:
        constants = constants | {"OVERLAP": overlaps}
    kinds = {
        arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names
    }
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, (arg, kind) in enumerate(kinds.items())
        if divisible(arg, kind)
    }
    source = ASTSource(kernel, kinds, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(
        source, target=target, options={"num_warps": warps, "launch_pdl": overlaps}
    )
    spilled, registers = resources(made.asm["cubin"])
    return {
        "registers": registers,
        "stack_bytes": spilled,
        "shared_bytes": made.metadata.shared,
        "wgmma": "wgmma" in made.asm["ptx"],
        "bounds_keep_nan": {"min.NaN.f32", "max.NaN.f32"} <= set(made.asm["ptx"].split()),
    }


def resources(cubin: bytes) -> tuple[int, int]:
    """Bytes of stack (spills) and registers of a thread, as cuobjdump in Triton's wheel says."""
    tool = next(Path(triton.__file__).parent.rglob("cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(field.split(":")[:2] for field in text.split() if field.count(":") == 1)
    return int(fields["STACK"]), int(fields["REG"])


if __name__ == "__main__":
    capability = int(sys.argv[1])
    names = [
        name
        for name, kernel in (KERNELS | VARIANTS).items()
        if capability >= 89 or "fp8" not in name + str(kernel)
    ]
    print(json.dumps({name: build(name, capability) for name in names}, indent=1))
