"""The part of the proof that compares attention backends with float64 (`prove.py`)."""

from __future__ import annotations

from importlib import import_module

import torch

from ..attention import LayerCache, RowSpan
from .backends import MODULES, AttentionNeeds, GpuEnvironment, choose_backend, obstacle
from .report import ProofSection, markdown_table

#: The largest error of bf16 attention, relative to float64, that counts as right. A number in bf16
#: is rounded by up to 0.4 %, and weights, values and result are; a wrong key gives far more.
TOLERANCE = 1e-2


def attention_error(
    name: str,
    module: str,
    device: torch.device,
    *,
    block_tokens: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Return the largest relative error of random prefill and decode rows against float64.

    There are 32 query heads and 8 KV heads. `name` is a backend of `backends.MODULES`, and `module`
    the one that brings it. A result that holds NaN has an infinite error.
    """
    from .adapters import AttentionBackend, adapt_library
    from .paged import PagedAttention
    from .varlen import split_by_phase

    attention: AttentionBackend
    if name == "triton":
        attention = PagedAttention(2048)  # tokens of the longest sequence; those here have 1,024
    else:
        attention = adapt_library(name, import_module(module), device)
    largest_error = 0.0
    # (rows, first position): whole and resumed prompts; rows at, and beside, a block's border
    prefill = [(300, 0), (77, 500), (1, 0)]
    decode = [(1, 1023), (1, 0), (1, 64), (1, 700)]
    for sizes in (prefill, decode):
        spans = _random_spans(sizes, block_tokens, is_decode=sizes is decode)
        row_count = sum(span.row_count for span in spans)
        flat = torch.randn((64, 8, 2, block_tokens, head_dim), device=device).to(dtype)
        cache = flat[:, :, 0], flat[:, :, 1]
        queries = torch.randn(row_count, 32, head_dim, device=device).to(dtype)
        (run,) = split_by_phase(spans)
        result = attention(queries, cache, run.to(device), scale=head_dim**-0.5, window=None)
        expected = _reference_attention(queries, cache, spans)
        error = float((result.double() - expected).norm() / expected.norm())
        is_nan = error != error
        largest_error = float("inf") if is_nan else max(largest_error, error)
    return largest_error


def _random_spans(
    sizes: list[tuple[int, int]], block_tokens: int, *, is_decode: bool
) -> list[RowSpan]:
    """Return spans of (row count, first position) each, in blocks drawn from 1 to 60."""
    free_blocks = iter(torch.randperm(60).add(1).tolist())
    spans: list[RowSpan] = []
    first_row = 0
    for row_count, first_position in sizes:
        block_count = -(-(first_position + row_count) // block_tokens)
        blocks = [next(free_blocks) for _ in range(block_count)]
        spans.append(RowSpan(first_row, row_count, first_position, blocks, is_decode=is_decode))
        first_row += row_count
    return spans


def _reference_attention(
    queries: torch.Tensor, cache: LayerCache, spans: list[RowSpan]
) -> torch.Tensor:
    """Return the attention of `queries` [T, Hq, D] in float64, as its formula stands."""
    out = torch.empty(queries.shape, dtype=torch.float64, device=queries.device)
    group = queries.shape[1] // cache[0].shape[1]

    def gathered(pages: torch.Tensor, span: RowSpan) -> torch.Tensor:
        by_token = pages[span.blocks].transpose(0, 1).flatten(1, 2)[:, : span.end_position]
        return by_token.double().repeat_interleave(group, 0)

    for span in spans:
        keys = gathered(cache[0], span)
        values = gathered(cache[1], span)
        rows = slice(span.first_row, span.first_row + span.row_count)
        scores = queries[rows].double().transpose(0, 1) @ keys.transpose(1, 2)
        scores = scores * queries.shape[2] ** -0.5
        positions = torch.arange(span.first_position, span.end_position, device=queries.device)
        invisible = torch.arange(span.end_position, device=queries.device) > positions[:, None]
        weights = scores.masked_fill(invisible, float("-inf")).softmax(-1)
        out[rows] = (weights @ values).transpose(0, 1)
    return out


def backends(environment: GpuEnvironment, device: torch.device) -> ProofSection:
    """Compare every backend that can run here, with blocks of a size that it takes."""
    section = ProofSection("Attention backends", [])
    rows = [["backend", "blocks of", "heads of", "error (bf16)", ""]]
    for name in MODULES:
        block_tokens = 256 if name == "fa2" else 64
        for head_dim in (64, 128):
            row, failed = _backend_row(
                name, environment, device, block_tokens=block_tokens, head_dim=head_dim
            )
            rows.append(row)
            section.failed |= failed
    section.lines.append(markdown_table(rows))
    return section


def _backend_row(
    name: str,
    environment: GpuEnvironment,
    device: torch.device,
    *,
    block_tokens: int,
    head_dim: int,
) -> tuple[list[str], bool]:
    """Return a backend's row of the table, and whether it failed."""
    start = [name, str(block_tokens), str(head_dim)]
    needs = AttentionNeeds(
        dtype="bfloat16",
        kv_dtype="bfloat16",
        block_tokens=block_tokens,
        head_dim=head_dim,
        exact=False,
    )
    reason = obstacle(name, environment, needs)
    if reason:
        return [*start, "-", f"not here: {reason}"], False
    module = choose_backend(environment, needs, name).module
    try:
        error = attention_error(name, module, device, block_tokens=block_tokens, head_dim=head_dim)
    except Exception as problem:  # one library that breaks leaves the others to be proven
        return [*start, "-", f"FAILED: {problem!r}"[:200]], True
    right = error < TOLERANCE
    return [*start, f"{error:.1e}", "ok" if right else "WRONG"], not right
