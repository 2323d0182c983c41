"""The small operations between matrix products and attention, in Triton.

They are RMSNorm, SiLU, and rope with the store of K and V. Each rounds to the model's dtype where
`engine.ops` does, so both give the same model. In kernels, parameters that end in `_row` or
`_stride` are strides in elements, and upper-case parameters are known when the kernel is compiled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..attention import LayerCache
from ..ops import RmsNorm
from .overlap import let_next_kernel_start, overlap_options, wait_for_kernels_before

#: Columns of a row that a program (Triton's unit of parallel work) of `silu_mul` takes.
COLUMNS = 1024

#: With so many rows, a prompt's, there are programs enough if each takes several heads.
MANY_ROWS = 512

#: Heads of a row that a program rotates or stores then: less is started, and angles are read once.
ROPE_HEADS = 8


@triton.jit
def norm_row(row, gain, size, eps):
    """Return the RMSNorm of a row of `size` numbers, 0 behind them, in the row's dtype."""
    wide = row.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    return (gain.to(tl.float32) * wide.to(row.dtype).to(tl.float32)).to(row.dtype)


@triton.jit
def _rms_norm(
    rows, weight, out, size, input_row, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """Compute out = norm(rows) of a row. The grid is (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    let_next_kernel_start(OVERLAP)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_kernels_before(OVERLAP)
    value = tl.load(rows + row * input_row + columns, mask=inside, other=0.0)
    result = norm_row(value, gain, size, eps)
    tl.store(out + row * size + columns, result, mask=inside)


def row_warps(block: int) -> int:
    """Return the warps for a row of `block` numbers: 512 a warp, 16 for each of its threads."""
    return min(16, max(1, block // 512))


def rms_norm(rows: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    """Return the RMSNorm of `rows` [T, size]."""
    row_count, size = rows.shape
    out = torch.empty(row_count, size, dtype=rows.dtype, device=rows.device)
    block = triton.next_power_of_2(size)
    _rms_norm[(row_count,)](
        rows,
        norm.weight,
        out,
        size=size,
        input_row=rows.stride(0),
        eps=norm.eps,
        BLOCK=block,
        num_warps=row_warps(block),
        **overlap_options(rows),
    )
    return out


@triton.jit
def silu_of_gate(gate, value):
    """Return silu(gate) * value, in the dtype of both."""
    wide = gate.to(tl.float32)
    gated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    return (gated * value.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_mul(rows, out, size, input_row, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Compute out = silu(gate) * value of BLOCK columns. The grid is (rows, blocks of columns)."""
    let_next_kernel_start(OVERLAP)
    wait_for_kernels_before(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(rows + row * input_row + columns, mask=inside, other=0.0)
    value = tl.load(rows + row * input_row + size + columns, mask=inside, other=0.0)
    tl.store(out + row * size + columns, silu_of_gate(gate, value), mask=inside)


def silu_mul(gates_and_values: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * value, [T, size], of gates and values side by side, [T, 2 * size]."""
    row_count, width = gates_and_values.shape
    size = width // 2
    out = torch.empty(row_count, size, dtype=gates_and_values.dtype, device=gates_and_values.device)
    _silu_mul[(row_count, triton.cdiv(size, COLUMNS))](
        gates_and_values,
        out,
        size,
        gates_and_values.stride(0),
        BLOCK=COLUMNS,
        **overlap_options(gates_and_values),
    )
    return out


@triton.jit
def _rope_store(
    qkv, keys, values, q_norm, k_norm, cos, sin, block, offset, eps,
    heads, kv_heads, qkv_row, block_stride, head_stride, token_stride,
    HALF: tl.constexpr, HAS_NORM: tl.constexpr, HEADS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rotate heads of q in place, or store those of k (rotated) or v.

    The grid is (T, (Hq + 2 Hkv) / HEADS): a program takes HEADS heads of a row, one after another.
    `first` and `second` are the halves of a head, each of HALF numbers. A thread reads and writes
    the same numbers of both halves, so nothing is read after its change. `block` and `offset` are
    each row's slot; the norms apply to queries and keys, before they are rotated.
    """
    let_next_kernel_start(OVERLAP)
    wait_for_kernels_before(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    low = tl.arange(0, HALF)
    place = tl.load(block + row).to(tl.int64) * block_stride
    place += tl.load(offset + row).to(tl.int64) * token_stride
    cosine = tl.load(cos + row * HALF + low)
    sine = tl.load(sin + row * HALF + low)
    for number in tl.static_range(HEADS):
        head = tl.program_id(1) * HEADS + number
        if head < heads + 2 * kv_heads:
            at = qkv + row * qkv_row + head * (2 * HALF) + low
            first = tl.load(at)
            second = tl.load(at + HALF)
            dtype = first.dtype
            x = first.to(tl.float32)
            y = second.to(tl.float32)
            if head >= heads + kv_heads:
                to = values + place + (head - heads - kv_heads).to(tl.int64) * head_stride + low
                tl.store(to, x.to(values.dtype.element_ty))
                tl.store(to + HALF, y.to(values.dtype.element_ty))
            else:
                if HAS_NORM:
                    scale = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / (2 * HALF) + eps)
                    weight = q_norm
                    if head >= heads:
                        weight = k_norm
                    gain_x = tl.load(weight + low).to(tl.float32)
                    gain_y = tl.load(weight + HALF + low).to(tl.float32)
                    x = gain_x * (x * scale).to(dtype).to(tl.float32)
                    x = x.to(dtype).to(tl.float32)
                    y = gain_y * (y * scale).to(dtype).to(tl.float32)
                    y = y.to(dtype).to(tl.float32)
                turned_x = (x * cosine - y * sine).to(dtype)
                turned_y = (y * cosine + x * sine).to(dtype)
                if head < heads:
                    tl.store(at, turned_x)
                    tl.store(at + HALF, turned_y)
                else:
                    to = keys + place + (head - heads).to(tl.int64) * head_stride + low
                    tl.store(to, turned_x.to(keys.dtype.element_ty))
                    tl.store(to + HALF, turned_y.to(keys.dtype.element_ty))


def rope_store(
    qkv: torch.Tensor,
    cache: LayerCache,
    norms: tuple[RmsNorm, RmsNorm] | None,
    angles: tuple[torch.Tensor, torch.Tensor],
    slots: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Rotate queries in place; store keys, rotated, and values, unchanged, in their slots.

    `qkv` is [T, (Hq + 2 Hkv) D], D a power of two (`backends.obstacle` sees to that). `cache` is
    the keys and the values, with equal strides. `norms` are those of queries and of keys, which
    come before the rotation, or None.
    `angles` are cosines and sines, float32 [T, D / 2]; `slots` are the block and the offset of each
    row, int64 [T]. Returns the rotated queries, a view [T, Hq, D].
    """
    keys, values = cache
    cosines, sines = angles
    slot_blocks, slot_offsets = slots
    row_count, width = qkv.shape
    kv_heads = keys.shape[1]
    head_dim = keys.shape[3]
    heads = width // head_dim - 2 * kv_heads
    query_norm, key_norm = norms or (None, None)
    heads_of_program = ROPE_HEADS if row_count >= MANY_ROWS else 1
    _rope_store[(row_count, triton.cdiv(heads + 2 * kv_heads, heads_of_program))](
        qkv,
        keys,
        values,
        # any pointer: without HAS_NORM it is not read
        q_norm=query_norm.weight if query_norm else qkv,
        k_norm=key_norm.weight if key_norm else qkv,
        cos=cosines,
        sin=sines,
        block=slot_blocks,
        offset=slot_offsets,
        eps=query_norm.eps if query_norm else 0.0,
        heads=heads,
        kv_heads=kv_heads,
        qkv_row=qkv.stride(0),
        block_stride=keys.stride(0),
        head_stride=keys.stride(1),
        token_stride=keys.stride(2),
        HALF=head_dim // 2,
        HAS_NORM=norms is not None,
        HEADS=heads_of_program,
        num_warps=1,
        **overlap_options(qkv),
    )
    return qkv.view(row_count, -1, head_dim)[:, :heads]
