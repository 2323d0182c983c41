"""What lies between the matrices, in Triton: RMSNorm (with the residual), SiLU, rope + KV store.

Each rounds to the model's dtype where `engine.ops` does, so both give the same model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..ops import Norm

COLUMNS = 1024  #: of a row that a program of `silu_mul` takes


@triton.jit
def _rms_norm(
    x, delta, weight, out, size, x_row, eps, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr
):
    """Grid (rows,): out = norm(x), where HAS_DELTA after x += delta."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    at = x + row * x_row + columns
    value = tl.load(at, mask=inside, other=0.0)
    if HAS_DELTA:
        more = tl.load(delta + row * size + columns, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(at, value, mask=inside)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    result = gain * wide.to(value.dtype).to(tl.float32)
    tl.store(out + row * size + columns, result.to(value.dtype), mask=inside)


def rms_norm(x: torch.Tensor, norm: Norm, delta: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm of x [T, size]; with `delta` [T, size] after `x += delta`, in one pass."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _rms_norm[(rows,)](
        *(x, x if delta is None else delta, norm.weight, out, size, x.stride(0), norm.eps),
        BLOCK=block,
        HAS_DELTA=delta is not None,
        num_warps=min(16, max(1, block // 512)),
    )
    return out


@triton.jit
def _silu_mul(x, out, size, x_row, BLOCK: tl.constexpr):
    """Grid (rows, pieces of BLOCK columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(x + row * x_row + columns, mask=inside, other=0.0)
    up = tl.load(x + row * x_row + size + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    gated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + columns, (gated * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """[T, 2 * size] of gates and what they gate -> [T, size]."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    _silu_mul[(rows, triton.cdiv(size, COLUMNS))](x, out, size, x.stride(0), BLOCK=COLUMNS)
    return out


@triton.jit
def _rope_store(
    qkv, keys, values, q_norm, k_norm, cos, sin, block, offset, eps,
    heads, kv_heads, qkv_row, block_stride, head_stride, token_stride,
    HALF: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Grid (rows, Hq + 2 Hkv): rotates a head of q in place, stores one of k (rotated) or v.

    A thread reads and writes the same numbers of both halves, so nothing is read after its change.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low = tl.arange(0, HALF)
    at = qkv + row * qkv_row + head * (2 * HALF) + low
    first, second = tl.load(at), tl.load(at + HALF)
    kind = first.dtype
    x, y = first.to(tl.float32), second.to(tl.float32)
    place = tl.load(block + row).to(tl.int64) * block_stride
    place += tl.load(offset + row).to(tl.int64) * token_stride
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
            gain, gain_y = tl.load(weight + low), tl.load(weight + HALF + low)
            x = (gain.to(tl.float32) * (x * scale).to(kind).to(tl.float32)).to(kind).to(tl.float32)
            y = gain_y.to(tl.float32) * (y * scale).to(kind).to(tl.float32)
            y = y.to(kind).to(tl.float32)
        c, s = tl.load(cos + row * HALF + low), tl.load(sin + row * HALF + low)
        turned, turned_y = (x * c - y * s).to(kind), (y * c + x * s).to(kind)
        if head < heads:
            tl.store(at, turned)
            tl.store(at + HALF, turned_y)
        else:
            to = keys + place + (head - heads).to(tl.int64) * head_stride + low
            tl.store(to, turned.to(keys.dtype.element_ty))
            tl.store(to + HALF, turned_y.to(keys.dtype.element_ty))


def rope_store(
    qkv: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[Norm, Norm] | None,
    angles: tuple[torch.Tensor, torch.Tensor],
    slots: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """qkv [T, (Hq + 2 Hkv) D] -> rotated q [T, Hq, D], in its place; k and v to their slots.

    `slots`: block and offset of each row.
    """
    keys, values = cache
    rows, width = qkv.shape
    kv_heads, dim = keys.shape[1], keys.shape[3]
    heads = width // dim - 2 * kv_heads
    q_norm, k_norm = (norm.weight for norm in norms) if norms else (qkv, qkv)
    _rope_store[(rows, heads + 2 * kv_heads)](
        *(qkv, keys, values, q_norm, k_norm, *angles, *slots),
        *(norms[0].eps if norms else 0.0, heads, kv_heads, qkv.stride(0)),
        *keys.stride()[:3],
        HALF=dim // 2,
        HAS_NORM=norms is not None,
        num_warps=1,
    )
    return qkv.view(rows, -1, dim)[:, :heads]
