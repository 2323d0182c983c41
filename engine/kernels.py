"""Builds, loads and calls the C++ kernels of `native/`, where the CPU and a compiler allow it.

The library is compiled for an instruction set (`KernelBuild`), once for each version of the sources
and of the compiler (about 5 s), and kept in the user's cache. Where anything is in the way (another
CPU, no compiler), `KernelUnavailable` says why, and the engine uses the torch operations.

    python -m diptych.engine.kernels     # builds the library now, so that no worker has to
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from .attention import LayerCache, StepRows
from .errors import KernelUnavailable
from .huge import HugePageArena
from .ops import Ops, RmsNorm

#: Where the kernels' sources are.
FOLDER = Path(__file__).with_name("native")

#: Rows of an MLP at a time without tiles. In such chunks 2,048 rows of an MLP of 1024 -> 2816 ->
#: 1024 took 0.79 of the CPU time that they take all at once (measured beside other processes, with
#: oneDNN's linear layers); in smaller chunks the weights are read too often.
MLP_ROWS = 512

#: The only size of KV blocks, in tokens, that attention in C++ knows; torch attends to all others.
KERNEL_BLOCK_TOKENS = 64

#: What the compiler gets for every build.
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma")


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """A build of the library: which CPUs it is for, and what is compiled into it."""

    instructions: str  #: The instruction set, as `EngineOptions.kernels` calls it.
    #: `Ops.name`. KV peers compare it: kernels that add in another order give other bits, and so
    #: have another name.
    ops_name: str
    #: What /proc/cpuinfo must list, and what is missing where it does not, in words.
    cpu_flags: tuple[tuple[str, str], ...]
    compiler_flags: tuple[str, ...]
    #: Sources whose names end so belong to this build; those without an ending to every build.
    source_endings: tuple[str, ...]
    mlp_rows: int | None = None  #: `Ops.mlp_rows`

    @property
    def attention(self) -> str:
        """The name of the attention function."""
        return f"attention_{self.instructions}"


_Pointer = ctypes.c_void_p
_Long = ctypes.c_int64
_Int = ctypes.c_int
_Float = ctypes.c_float

_ATTENTION: list[type] = [
    *(_Pointer, _Pointer, _Pointer, _Pointer),  # queries, keys, values, out
    # strides in elements: of rows of queries, of rows of out, of KV blocks, of KV heads
    *(_Long, _Long, _Long, _Long),
    *(_Pointer, _Long, _Pointer),  # spans, number of spans, their blocks
    *(_Int, _Int, _Int),  # query heads, KV heads, size of a head
    *(_Int, _Float, _Int),  # window (0: none), scale, threads
]

#: The same of linear layers, which `linear.NativeLinear` calls.
_LINEAR: list[type] = [
    *(_Pointer, _Long, _Long),  # rows, stride of rows in elements, number of rows
    *(_Pointer, _Float),  # weight of the norm, epsilon
    *(_Pointer, _Pointer, _Pointer, _Pointer),  # weight, bias, residual, out
    *(_Long, _Long, _Int),  # inputs, outputs, gated
    *(_Pointer, _Int),  # workspace, threads
]

#: The parameters of the functions that each build of the library has, in the order in which
#: `native/*.cpp` declares them.
SIGNATURES: dict[str, list[type]] = {
    "rms_norm": [
        *(_Pointer, _Pointer, _Pointer),  # rows, weight, out
        *(_Long, _Long, _Float, _Int),  # number of rows, their size, epsilon, threads
    ],
    "silu_mul": [
        *(_Pointer, _Pointer),  # rows (gates, then values), out
        *(_Long, _Long, _Int),  # number of rows, size of a row of out, threads
    ],
    "rope_store": [
        *(_Pointer, _Long),  # qkv, number of rows
        *(_Pointer, _Pointer, _Float),  # weights of the norms of queries and keys, epsilon
        *(_Pointer, _Pointer, _Pointer),  # cosines, sines, slots in elements
        *(_Pointer, _Pointer, _Long),  # keys, values, stride of heads
        *(_Int, _Int, _Int, _Int),  # query heads, KV heads, size of a head, threads
    ],
    "use_helpers": [_Pointer],  # what `make_helpers` gave, or None
}

#: The builds, the fastest first. "-linear" in a name tells linear layers of ours from oneDNN's, which
#: this build had before.
BUILDS = (
    KernelBuild(
        "amx",
        "cpp-amx",
        (("avx512_bf16", "AVX512-BF16"), ("amx_bf16", "AMX")),
        (*_AVX512_FLAGS, "-mamx-tile", "-mamx-bf16"),
        ("_amx",),
    ),
    KernelBuild(
        "avx512",
        "cpp-avx512bf16-linear",
        (("avx512_bf16", "AVX512-BF16"),),
        _AVX512_FLAGS,
        ("_avx512",),
        mlp_rows=MLP_ROWS,
    ),
    KernelBuild(
        "avx2",
        "cpp-avx2",
        (("avx2", "AVX2"), ("fma", "FMA")),
        ("-mavx2", "-mfma"),
        ("_avx2",),
        mlp_rows=MLP_ROWS,
    ),
)


class NativeOps(Ops):
    """`ops.Ops` in C++, by a build for some CPUs.

    `Ops` says what each method takes and returns. Rows, weights and caches are bfloat16, cosines and
    sines are float32, and all tensors are in host memory. Shapes that the kernels do not know go to
    the torch operations of `Ops`. The constructor builds or loads the library, and raises
    KernelUnavailable where that cannot run; `head_dim` must be a multiple of 32. `threads` OpenMP
    threads compute each call.
    """

    def __init__(self, head_dim: int, threads: int, build: KernelBuild) -> None:
        if head_dim % 32:  # the kernels load 32 bf16 numbers at a time
            raise KernelUnavailable(f"head size {head_dim} is no multiple of 32")
        self.name = build.ops_name
        self.build = build
        self.threads = threads
        self.mlp_rows = build.mlp_rows
        self.arena = HugePageArena()  #: Huge pages: `linear.NativeLinear` puts its weights there.
        self.library = _library(build)
        self._attention = getattr(self.library, build.attention)

    def attend(
        self,
        queries: torch.Tensor,
        cache: LayerCache,
        step: StepRows,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        keys, values = cache
        if keys.shape[2] != KERNEL_BLOCK_TOKENS:
            return super().attend(queries, cache, step, scale=scale, window=window)
        out = torch.empty(queries.shape, dtype=queries.dtype)
        spans, blocks = step.flat_tables
        # in the order of `_ATTENTION`: ctypes takes no keywords
        self._attention(
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            queries.stride(0),
            out.stride(0),
            keys.stride(0),
            keys.stride(1),
            spans.data_ptr(),
            spans.shape[0],
            blocks.data_ptr(),
            queries.shape[1],
            keys.shape[1],
            queries.shape[2],
            window or 0,
            scale,
            self.threads,
        )
        return out

    def norm(self, rows: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        count, size = rows.shape
        # the kernels compute in vectors of up to 16 float32 numbers
        if size % 16 or not rows.is_contiguous():
            return super().norm(rows, norm)
        out = torch.empty_like(rows)
        self.library.rms_norm(
            rows.data_ptr(),
            norm.weight.data_ptr(),
            out.data_ptr(),
            count,
            size,
            norm.eps,
            self.threads,
        )
        return out

    def silu_mul(self, gates_and_values: torch.Tensor) -> torch.Tensor:
        count = gates_and_values.shape[0]
        size = gates_and_values.shape[1] // 2
        if size % 16 or not gates_and_values.is_contiguous():
            return super().silu_mul(gates_and_values)
        out = torch.empty(count, size, dtype=gates_and_values.dtype)
        self.library.silu_mul(
            gates_and_values.data_ptr(), out.data_ptr(), count, size, self.threads
        )
        return out

    def rope_store(
        self,
        qkv: torch.Tensor,
        cache: LayerCache,
        norms: tuple[RmsNorm, RmsNorm] | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        step: StepRows,
    ) -> torch.Tensor:
        keys, values = cache
        count, width = qkv.shape
        kv_heads = keys.shape[1]
        head_dim = keys.shape[3]
        heads = width // head_dim - 2 * kv_heads
        qkv = qkv.contiguous()  # it is not where a linear layer has filled up its last panel
        query_norm, key_norm = norms or (None, None)
        cosines, sines = angles
        # in the order of `SIGNATURES["rope_store"]`
        self.library.rope_store(
            qkv.data_ptr(),
            count,
            query_norm.weight.data_ptr() if query_norm else None,
            key_norm.weight.data_ptr() if key_norm else None,
            query_norm.eps if query_norm else 0.0,
            cosines.data_ptr(),
            sines.data_ptr(),
            step.slot_elements(keys).data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(1),
            heads,
            kv_heads,
            head_dim,
            self.threads,
        )
        return qkv.view(count, -1, head_dim)[:, :heads]


def native_ops(head_dim: int, threads: int, instructions: str = "auto") -> NativeOps:
    """Return the kernels for an instruction set, or the fastest that run here (`auto`).

    Raises KernelUnavailable if they do not run, or none does: then with what the last build needs.
    """
    builds = [build for build in BUILDS if instructions in ("auto", build.instructions)]
    for build in builds[:-1]:
        with contextlib.suppress(KernelUnavailable):
            return NativeOps(head_dim, threads, build)
    return NativeOps(head_dim, threads, builds[-1])


@cache
def _library(build: KernelBuild) -> ctypes.CDLL:
    """Return the library of a build, which is made if it is not in the cache.

    Raises KernelUnavailable.
    """
    _check_cpu(build)
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise KernelUnavailable("there is no C++ compiler (g++)")
    flags = [*FLAGS, *build.compiler_flags]
    sources = _sources(build)
    # the name changes with sources, compiler and flags, so no library of another version is loaded
    name = f"kernels-{_digest(compiler, flags, sources)}.so"
    try:
        path = _cache_folder() / name
        if not path.exists():
            _build([compiler, *flags, *map(str, sources)], path)
        library = ctypes.CDLL(str(path))
    except OSError as error:  # a full disk, a folder that is read-only, a damaged file
        raise KernelUnavailable(f"{name} cannot be built or loaded: {error}") from None
    _declare(library, build)
    if build.instructions == "amx" and library.allow_amx():  # asks Linux for the tiles; 0: success
        raise KernelUnavailable("Linux does not let this process use AMX tiles")
    return library


def _sources(build: KernelBuild) -> list[Path]:
    """Return the sources of a build: its own, and those of every build."""
    endings = {ending for other in BUILDS for ending in other.source_endings}
    others = tuple(endings - set(build.source_endings))
    return sorted(path for path in FOLDER.glob("*.cpp") if not path.stem.endswith(others))


def _check_cpu(build: KernelBuild) -> None:
    """Raise KernelUnavailable if the CPU lacks what the library is compiled for."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    for flag, words in build.cpu_flags:
        if flag not in flags:
            raise KernelUnavailable(f"the CPU has no {words}")


def _digest(compiler: str, flags: list[str], sources: list[Path]) -> str:
    """Return a hash of all that a build depends on: sources, headers, compiler and flags."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    texts = [path.read_bytes() for path in (*sources, *FOLDER.glob("*.h"))]
    inputs = b"".join([*texts, version, " ".join(flags).encode()])
    return hashlib.blake2b(inputs, digest_size=12).hexdigest()


def _declare(library: ctypes.CDLL, build: KernelBuild) -> None:
    """Tell ctypes the parameters of the library's functions."""
    signatures = SIGNATURES | {
        build.attention: _ATTENTION,
        f"linear_{build.instructions}": _LINEAR,
    }
    for name, parameters in signatures.items():
        function = getattr(library, name)
        function.restype = None
        function.argtypes = parameters
    library.make_helpers.restype = _Pointer
    library.make_helpers.argtypes = [_Pointer, _Pointer, _Int]  # states, cores, their number
    library.helped_pieces.restype = _Long
    library.helped_pieces.argtypes = [_Pointer]
    if build.instructions == "amx":
        library.allow_amx.restype = _Long
        library.allow_amx.argtypes = []


def _cache_folder() -> Path:
    """Return the folder that keeps libraries between starts, or a new temporary one without it."""
    try:
        folder = Path.home() / ".cache" / "diptych"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: a user id without a name and without $HOME
        return Path(tempfile.mkdtemp(prefix="diptych-"))
    return folder


def _build(command: list[str], path: Path) -> None:
    """Compile to a file beside `path` and rename it: two processes may build at the same time."""
    handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    compiled = subprocess.run([*command, "-o", draft], capture_output=True, text=True, check=False)
    if compiled.returncode:
        Path(draft).unlink()
        reason = (compiled.stderr.strip().splitlines() or ["no reason given"])[0]
        raise KernelUnavailable(f"the kernels do not compile: {reason}")
    Path(draft).rename(path)


def main() -> None:
    """Build the kernels and print which ones run here, or why none does."""
    try:  # for a usual size of heads, and one thread: the library is the same for all
        print(f"kernels: {native_ops(64, 1).name}")
    except KernelUnavailable as error:
        print(f"kernels: torch ({error})")


if __name__ == "__main__":
    main()
