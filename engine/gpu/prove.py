"""What only a GPU can prove: each backend is right, and how near decode and prefill are to it.

    python -m diptych.engine.gpu.prove                 # all, about 5 minutes
    python -m diptych.engine.gpu.prove --small         # a small shape: does it run at all?

Prints Markdown. Needs no network and no checkpoint; without a CUDA device it says so and ends.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from ...kv_transfer.errors import TransportUnavailable
from ..attention import Meta, Piece
from ..collectives import Collectives
from ..decoder import Decoder, Layer, Mlp, Weights
from ..linear import Linear
from ..ops import Norm, Ops
from ..pool import KVPool
from ..sizing import kv_layout
from ..spec import ModelSpec
from . import roofline
from .backends import MODULES, Found, Need, choose, obstacle, probe
from .handover import move
from .roofline import LLAMA_3_8B, Ceilings, decode_cost, prefill_flops, table

DEADLINE_S = 460  #: nothing more is begun after this
TOLERANCE = 1e-2  #: of bf16 attention, relative to float64
CASES = ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024), (32, 4096))
PROMPTS = (2048, 8192)
STEPS = 30  #: of decode, timed


@dataclass(slots=True)
class Section:
    """A heading and what stands below it; `failed`: something that must hold does not."""

    title: str
    lines: list[str]
    failed: bool = False


def seconds(call: Callable[[], object], times: int) -> float:
    """Median time of a call on the device; one more call before warms up."""
    call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    spans = [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
    return sorted(spans)[len(spans) // 2]


def ceilings(device: torch.device, size: int = 4 << 30, side: int = 8192) -> Ceilings:
    """A copy of `size` bytes, read plus written; a product of random square bf16 matrices."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = seconds(partial(target.copy_, source), 10)
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    multiplied = seconds(partial(torch.mm, a, b), 10)
    return Ceilings(2 * size / copied, 2 * side**3 / multiplied)


def attention_error(
    name: str,
    module: str,
    device: torch.device,
    page: int,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
) -> float:
    """Largest relative error of fresh prefill and decode rows against float64."""
    from .adapters import Attention, adapter
    from .paged import PagedAttention
    from .varlen import parts

    triton = name == "triton"
    attention: Attention = (
        PagedAttention(2048) if triton else adapter(name, import_module(module), device)
    )
    worst = 0.0
    for spans in ([(300, 0), (77, 500), (1, 0)], [(1, 1023), (1, 0), (1, 64), (1, 700)]):
        decode = spans[0][0] == 1
        pieces, row, free = [], 0, iter(torch.randperm(60).add(1).tolist())
        for count, start in spans:
            blocks = [next(free) for _ in range(-(-(start + count) // page))]
            pieces.append(Piece(row, count, start, blocks, decode))
            row += count
        flat = torch.randn(64, 8, 2, page, dim, device=device).to(dtype)
        cache = flat[:, :, 0], flat[:, :, 1]
        q = torch.randn(row, 32, dim, device=device).to(dtype)
        (where,) = parts(pieces)
        found = attention(q, cache, where.to(device), dim**-0.5, None).double()
        expected = _reference(q, cache, pieces)
        error = (found - expected).norm() / expected.norm()
        worst = max(worst, float(error)) if error == error else float("inf")
    return worst


def _reference(q: torch.Tensor, cache: tuple, pieces: list[Piece]) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // cache[0].shape[1]
    for piece in pieces:
        end = piece.start + piece.count
        k, v = (part[piece.blocks].transpose(0, 1).flatten(1, 2)[:, :end] for part in cache)
        k, v = (part.double().repeat_interleave(group, 0) for part in (k, v))
        rows = q[piece.row : piece.row + piece.count].double().transpose(0, 1)
        scores = rows @ k.transpose(1, 2) * q.shape[2] ** -0.5
        positions = torch.arange(piece.start, end, device=q.device)
        hidden = torch.arange(end, device=q.device) > positions[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[piece.row : piece.row + piece.count] = (weights @ v).transpose(0, 1)
    return out


def backends(found: Found, device: torch.device) -> Section:
    """Every backend that can run here, in a page that it takes."""
    section = Section("Attention backends", [])
    rows = [["backend", "blocks of", "heads of", "error (bf16)", ""]]
    for name in MODULES:
        page = 256 if name == "fa2" else 64
        for dim in (64, 128):
            against = obstacle(name, found, Need("bfloat16", "bfloat16", page, dim, False))
            if against:
                rows.append([name, str(page), str(dim), "-", f"not here: {against}"])
                continue
            module = choose(found, Need("bfloat16", "bfloat16", page, dim, False), name).module
            try:
                error = attention_error(name, module, device, page, dim)
            except Exception as problem:  # one library that breaks leaves the others to be proven
                section.failed = True
                rows.append([name, str(page), str(dim), "-", f"FAILED: {problem!r}"[:200]])
                continue
            section.failed |= not error < TOLERANCE
            verdict = "ok" if error < TOLERANCE else "WRONG"
            rows.append([name, str(page), str(dim), f"{error:.1e}", verdict])
    section.lines.append(table(rows))
    return section


class Bench:
    """A random model and rows that decode in it: tables are made up, KV is whatever is there."""

    def __init__(self, spec: ModelSpec, device: torch.device, most: int, keys: int, **how) -> None:
        from .decode import DecodeRunner
        from .random_model import make

        blocks = max(keys // 64 + 2 * most, spec.max_positions // 64 + 1) + 1
        self.decoder, self.ops = make(spec, device, blocks, **how)
        self.runner = DecodeRunner(self.decoder, self.ops, most, spec.max_positions, 64)

    def rows(self, batch: int, context: int, ahead: int) -> list:
        """Rows at position `context` + `ahead`; their blocks are lists that stay the same."""
        from .plan import Row

        each = context // 64 + 1
        key = batch, context
        if getattr(self, "_key", None) != key:
            self._key = key
            self._blocks = [list(range(1 + i * each, 1 + (i + 1) * each)) for i in range(batch)]
        return [
            Row(7 if ahead == 0 else -1 - i, context - 40 + ahead, blocks, i, context, 0.0)
            for i, blocks in enumerate(self._blocks)
        ]

    def steps(self, batch: int, context: int, count: int) -> float:
        """Median seconds of a step, `count` in a row, each launched before the last one is read."""
        events, before = [], None
        for ahead in range(count):
            ticket = self.runner.launch(self.rows(batch, context, ahead))
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            events.append(mark)
            if before:
                before.read()
            before = ticket
        torch.cuda.synchronize()
        spans = [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
        return sorted(spans)[len(spans) // 2]


def decode_section(
    bench: Bench, top: Ceilings, title: str, cases: tuple, items: tuple[int, int] = (2, 2)
) -> Section:
    """`items`: bytes of a weight and of a number in the cache."""
    spec = bench.decoder.spec
    rows = [["batch x context", "ms", "tokens/s", "floor ms", "of the floor", "predicted ms"]]
    for batch, context in cases:
        took = bench.steps(batch, context, STEPS)
        floor = decode_cost(spec, batch, context, *items).floor_s(top)
        guess = roofline.PREDICTED_MS.get((batch, context), 0.0)
        figures = f"{took * 1e3:.2f}", f"{batch / took:.0f}", f"{floor * 1e3:.2f}"
        told = f"{guess:.1f}" if guess and items == (2, 2) else "-"
        rows.append([f"{batch} x {context}", *figures, f"{floor / took:.0%}", told])
    return Section(title, [f"attention: {bench.ops.attention.name}", "", table(rows)])


def prefill_section(bench: Bench, top: Ceilings, prompts: tuple[int, ...]) -> Section:
    spec = bench.decoder.spec
    rows = [["prompt", "ms", "tokens/s", "of the matmul rate", "predicted tokens/s"]]
    for tokens in prompts:
        took = seconds(prefill(bench.decoder, tokens), 5)
        share = prefill_flops(spec, tokens) / took / top.matmul
        guess = roofline.PREDICTED_TOKENS_S.get(tokens)
        row = [str(tokens), f"{took * 1e3:.1f}", f"{tokens / took:.0f}", f"{share:.0%}"]
        rows.append([*row, str(guess or "-")])
    return Section("Prefill", [table(rows)])


def prefill(decoder: Decoder, tokens: int) -> Callable[[], object]:
    """A prompt in one chunk, from ids to the logits of its last token."""
    at = torch.arange(tokens)
    ids = torch.randint(decoder.spec.vocab, (tokens,))
    blocks = list(range(1, 1 + -(-tokens // 64)))
    meta = Meta(at, at // 64 + 1, at % 64, [Piece(0, tokens, 0, blocks, False)])
    placed = decoder.ops.place(ids, meta)  # as the engine does once a step
    return lambda: decoder.logits(decoder.hidden(*placed)[-1:])


def graphs_section(bench: Bench) -> Section:
    """Ids and logits' peaks of the same steps, replayed and run eagerly."""
    told = []
    for graphs in (True, False):
        bench.runner.graphs = graphs
        rows = [bench.rows(5, 256, ahead) for ahead in range(8)]
        told.append([bench.runner.launch(each).read() for each in rows])
    bench.runner.graphs = True
    same = told[0] == told[1]
    line = "8 steps of 5 rows: ids and largest logits " + ("equal" if same else "DIFFER")
    return Section("Graphs on and off", [line], failed=not same)


SMALL: dict[str, Any] = {"hidden": 256, "intermediate": 512, "layers": 2, "heads": 8, "kv_heads": 2}


def greedy_section(spec: ModelSpec, device: torch.device, steps: int = 12) -> Section:
    """A small model in float32: greedy ids here, and by plain torch on the CPU."""
    from .plan import Row

    spec = replace(spec, **SMALL, head_dim=32, vocab=2000, windows=(None, None), dtype="float32")
    bench = Bench(spec, device, 3, 3 * 128)
    cpu = on_cpu(bench.decoder)
    prompts = [torch.randint(spec.vocab, (size,)).tolist() for size in (70, 5, 64)]
    found, expected = [], []
    for index, prompt in enumerate(prompts):
        ids, blocks = list(prompt), [1 + 2 * index, 2 + 2 * index]
        answer = [int(_logits(bench.decoder, ids, blocks).argmax())]
        for step in range(steps - 1):
            row = Row(answer[-1], len(prompt) + step, blocks, 0, 0, 0.0)
            answer += bench.runner.launch([row]).read()[0]
        found.append(answer)
        for _ in range(steps):
            ids.append(int(_logits(cpu, ids, [1, 2]).argmax()))
        expected.append(ids[len(prompt) :])
    same = found == expected
    line = f"{steps} ids behind each of 3 prompts: {'equal' if same else 'DIFFER'}"
    return Section("Greedy ids against the CPU, float32", [line], failed=not same)


def _logits(decoder: Decoder, ids: list[int], blocks: list[int]) -> torch.Tensor:
    """Of the last of `ids`, computed in one chunk."""
    at, table = torch.arange(len(ids)), torch.tensor(blocks)
    need = blocks[: -(-len(ids) // 64)]
    meta = Meta(at, table[at // 64], at % 64, [Piece(0, len(ids), 0, need, False)])
    return decoder.logits(decoder.hidden(torch.tensor(ids), meta)[-1:])


def on_cpu(decoder: Decoder) -> Decoder:
    """The same weights in plain torch on the CPU, with a small pool."""
    spec, theirs = decoder.spec, decoder.weights
    ops, pool = Ops(), KVPool(kv_layout(spec, spec.dtype, 64), 3, getattr(torch, spec.dtype))

    def plain(layer: Any, gated: bool = False) -> Linear:
        return Linear(layer._weight.cpu(), None, gated, ops)

    def norm(one: Norm) -> Norm:
        return Norm(one.weight.cpu(), one.eps)

    layers = [
        Layer(
            norm=norm(one.norm),
            qkv=plain(one.qkv),
            qk_norms=None,
            output=plain(one.output),
            mlp_norm=norm(one.mlp_norm),
            mlp=Mlp(plain(one.mlp.gate_up, gated=True), plain(one.mlp.down)),
        )
        for one in theirs.layers
        if isinstance(one.mlp, Mlp)
    ]
    embedding = theirs.embedding.to("cpu", copy=True)
    weights = Weights(embedding, layers, norm(theirs.norm), plain(theirs.head))
    return Decoder(spec, weights, pool, ops)


def handover_section(device: torch.device, blocks: int) -> Section:
    """P -> D between two processes on this device."""
    layout = kv_layout(LLAMA_3_8B, "bfloat16", 64)
    section = Section("P -> D between two processes on this GPU, NIXL", [])
    try:
        moved = move("nixl", str(device), layout, blocks)
    except (TransportUnavailable, TimeoutError) as error:
        section.lines.append(f"left out: {error}")
        return section
    section.failed = not moved.intact
    section.lines.append(
        f"{blocks} blocks of {layout.block_bytes >> 20} MiB: {moved.gb_s:.1f} GB/s, "
        + ("every byte arrived" if moved.intact else "bytes DIFFER")
    )
    return section


def ranks_section(device: torch.device) -> Section:
    """That NCCL's calls can be captured, by one rank: it sums nothing, more need more GPUs."""
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    x = torch.empty(8, 4096, dtype=torch.bfloat16, device=device)
    lines, failed = [], False
    for reduce in (True, False):
        ranks = Collectives(0, 1, reduce)
        ranks.sum(x.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = ranks.join(ranks.sum(x.clone()))
        x.normal_()
        graph.replay()
        same = torch.equal(out, x)
        failed |= not same
        lines.append(f"- {'reduced' if reduce else 'gathered'}: {'right' if same else 'WRONG'}")
    dist.destroy_process_group()
    return Section("Sums of ranks inside a graph (NCCL, one rank)", lines, failed)


SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")


def syncs_section(bench: Bench, batch: int, context: int) -> Section:
    """Calls that make the host wait in 20 steady steps; each step's ids are read by an event."""
    from torch.profiler import ProfilerActivity, profile

    bench.steps(batch, context, 4)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        bench.steps(batch, context, 20)
    calls = Counter(event.name for event in trace.events() if event.name.startswith("cuda"))
    waits = sum(calls[name] for name in SYNCS)
    waits -= calls["cudaDeviceSynchronize"] and 1  # the one that ends the measurement
    lines = [f"{name}: {count}" for name, count in calls.most_common(8)]
    return Section(
        f"Host in 20 steps of {batch} x {context}",
        [f"blocking calls beside reading the ids: {waits}", "", *(f"- {x}" for x in lines)],
        failed=waits > 0,
    )


Make = Callable[[], Section]


def variant_section(
    spec: ModelSpec,
    device: torch.device,
    top: Ceilings,
    title: str,
    cases: tuple,
    items: tuple[int, int],
    how: dict[str, Any],
) -> Section:
    """Decode of another model than the first one, which must be gone from the memory."""
    torch.cuda.empty_cache()
    bench = Bench(spec, device, 32, 32 * cases[-1][1], **how)
    bench.runner.capture()
    return decode_section(bench, top, title, cases, items)


def sections(small: bool, device: torch.device) -> Iterator[tuple[str, Make]]:
    """Each section's title and what makes it; one that breaks leaves the others to be made."""
    spec = LLAMA_3_8B
    cases: tuple[tuple[int, int], ...] = CASES
    prompts: tuple[int, ...] = PROMPTS
    if small:
        spec = replace(spec, layers=2, windows=(None, None), vocab=4096, max_positions=2304)
        cases, prompts = ((1, 1024), (32, 1024)), (2048,)
    yield "Attention backends", partial(backends, probe(device), device)
    top = ceilings(device)
    line = f"copy {top.copy / 1e12:.2f} TB/s, matmul {top.matmul / 1e12:.0f} TFLOP/s"
    yield "Ceilings", partial(Section, "Ceilings of this run", [line])
    most, keys = max(batch for batch, _ in cases), max(b * c for b, c in cases)
    bench = Bench(spec, device, most, keys)
    try:
        bench.runner.capture()
    except Exception as problem:  # the rest can be seen without graphs
        bench.runner.graphs = False
        broke = Section("Capture", [f"BROKE: {problem!r}"], failed=True)
        yield "Capture", lambda: broke
    yield "Graphs", partial(graphs_section, bench)
    yield "Greedy ids", partial(greedy_section, spec, device)
    yield "Decode, bf16", partial(decode_section, bench, top, "Decode, bf16", cases)
    yield "Host", partial(syncs_section, bench, 32, 1024)
    yield "Prefill", partial(prefill_section, bench, top, prompts)
    del bench
    wide = tuple(case for case in cases if case[0] == 32)
    for title, how, items in (
        ("Decode, FP8 weights", {"fp8": True}, (1, 2)),
        ("Decode, FP8 KV", {"kv_dtype": "float8_e4m3fn"}, (2, 1)),
        ("Decode, exact", {"exact": True}, (2, 2)),
    ):
        yield title, partial(variant_section, spec, device, top, title, wide, items, how)
    yield "Handover", partial(handover_section, device, 8 if small else 64)
    yield "Ranks", partial(ranks_section, device)


def attempt(title: str, make: Make) -> Section:
    try:
        return make()
    except Exception as problem:
        return Section(title, [f"BROKE: {problem!r}"[:1000]], failed=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="two layers: does it run at all?")
    small = parser.parse_args().small
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to prove here (tests/engine/gpu: the interpreter's part)")
        return
    began, failed = time.monotonic(), []
    device = torch.device("cuda", torch.cuda.current_device())
    triton = import_module("triton").__version__
    name = torch.cuda.get_device_name(device)
    print(f"# {name}: torch {torch.__version__}, triton {triton}\n")
    with torch.inference_mode():
        for title, make in sections(small, device):
            section = attempt(title, make)
            del make  # and with it the model
            print(f"## {section.title}\n\n" + "\n".join(section.lines) + "\n", flush=True)
            failed += [section.title] * section.failed
            if time.monotonic() - began > DEADLINE_S:
                print("the time is over: what follows was left out")
                break
    print(f"{time.monotonic() - began:.0f} s; " + (f"FAILED: {failed}" if failed else "all held"))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
