"""What only a GPU can prove: its kernels are right, and how near it comes to what it could do.

    python -m diptych.engine.gpu.prove                      # every section that is not done yet
    python -m diptych.engine.gpu.prove --section device     # one, at most 8 minutes
    python -m diptych.engine.gpu.prove --small              # a small shape: does it run at all?
    python -m diptych.engine.gpu.prove --bundle FOLDER      # packs what a bare machine needs

Sections come in order of their value (`SECTIONS`). Each is written to the state file as soon as it
is done, as JSON and as Markdown, so a run that is cut off goes on where it stopped. A part of a
section that breaks counts as failed, and the others are made all the same; what the machine lacks is
named and left out. Needs no network and no checkpoint; without a CUDA device it says so and ends.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace as replace_fields

from ...kv_transfer.errors import TransportUnavailable
from ...protos.frames import Sampling, Token
from ..attention import RowSpan, StepRows
from ..collectives import Collectives
from ..decoder import Decoder, DecoderLayer, DecoderWeights, Mlp
from ..linear import Linear
from ..ops import Ops, RmsNorm
from ..options import DecodeLimits
from ..pool import KVPool
from ..sampler import sample_tokens
from ..sequence import Sequence
from ..sizing import kv_layout
from ..spec import ModelSpec
from . import roofline
from .backends import probe_environment
from .bundle import make_bundle
from .handover import measure_handover
from .prove_attention import backends
from .prove_state import ProofState
from .report import ProofSection, markdown_table
from .roofline import LLAMA_3_8B, DeviceCeilings, decode_floor, prefill_flops
from .slots import describe

if TYPE_CHECKING:
    from .plan import DecodeRows

#: Once a part of a section ends so many seconds after its start, no other follows: a command
#: on a machine of somebody else may end after ten minutes.
DEADLINE_S = 400

#: Batches and contexts of the timed decode steps.
CASES = ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024), (32, 4096))

#: Tokens of the timed prompts.
PROMPTS = (2048, 8192)

#: Decode steps in a row that are timed.
STEPS = 30

#: Tokens of a KV block in these sections.
BLOCK_TOKENS = 64

#: What replaces sizes of the model in the section of greedy ids.
SMALL: dict[str, Any] = {"hidden": 256, "intermediate": 512, "layers": 2, "heads": 8, "kv_heads": 2}

#: Calls of CUDA that make the host wait.
WAITING_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")


@dataclass(frozen=True, slots=True)
class DecodeVariant:
    """A way to make the model, and how many bytes a number takes in it."""

    title: str  #: Of its section.
    model_options: dict[str, Any]  #: Keywords of `random_model.make_random_model`.
    weight_number_bytes: int = 2
    kv_number_bytes: int = 2


#: The model is first proven in BF16, and then timed in the other ways.
BF16 = DecodeVariant("Decode, bf16", {})
OTHER_VARIANTS = (
    DecodeVariant("Decode, FP8 weights", {"fp8": True}, weight_number_bytes=1),
    DecodeVariant("Decode, FP8 KV", {"kv_dtype": "float8_e4m3fn"}, kv_number_bytes=1),
    # A sequence's results are the same bits whatever else is in its batch; that costs time.
    DecodeVariant("Decode, exact", {"exact": True}),
)


def median_seconds_between(events: SequenceOf[torch.cuda.Event]) -> float:
    """Wait for the device; return the median time from an event to the next one."""
    torch.cuda.synchronize()
    spans = [first.elapsed_time(second) / 1e3 for first, second in pairwise(events)]
    return sorted(spans)[len(spans) // 2]


def median_call_seconds(call: Callable[[], object], times: int) -> float:
    """Return the median time of a call on the device; one more call before warms up."""
    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    return median_seconds_between(events)


def measure_ceilings(device: torch.device, size: int = 4 << 30, side: int = 8192) -> DeviceCeilings:
    """Measure a copy of `size` bytes and a product of random bf16 matrices, `side` x `side`.

    Both are so large that neither caches nor the cost of a launch count.
    """
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_call_seconds(partial(target.copy_, source), 10)
    left = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    right = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    matmul_s = median_call_seconds(partial(torch.mm, left, right), 10)
    return DeviceCeilings(copy_bytes_s=2 * size / copy_s, matmul_flops_s=2 * side**3 / matmul_s)


# ---- decode and prefill --------------------------------------------------------------------------


class DecodeBench:
    """A random model, and rows that decode in it.

    Block tables are made up, and KV is whatever is there. `row_limit` rows decode together, over
    `total_keys` keys at most. `model_options` go to `make_random_model`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        row_limit: int,
        total_keys: int,
        **model_options: Any,
    ) -> None:
        from .decode import DecodeRunner
        from .random_model import make_random_model

        decode_blocks = total_keys // BLOCK_TOKENS + 2 * row_limit
        prefill_blocks = spec.max_positions // BLOCK_TOKENS + 1
        blocks = max(decode_blocks, prefill_blocks) + 1
        self.decoder, self.ops = make_random_model(spec, device, blocks, **model_options)
        limits = DecodeLimits(
            rows=row_limit, max_model_len=spec.max_positions, block_tokens=BLOCK_TOKENS
        )
        self.runner = DecodeRunner(self.decoder, self.ops, limits)
        self._shape: tuple[int, int, Sampling] | None = None
        self._blocks: list[list[int]] = []
        self._columns: list[np.ndarray] = []

        #: What rows ask for, at first greedy ids. Penalties need a slot, which rows here have not.
        self.sampling = Sampling(max_tokens=1)

    def rows(self, batch: int, context: int, ahead: int) -> DecodeRows:
        """Return the rows of step `ahead` of `batch` sequences, each about `context` tokens long.

        The first step takes its ids from the host, the others from the step before. The lists of
        blocks stay the same, as those of sequences do, until another batch or context is asked for.
        """
        from .plan import DecodeRows

        if self._shape != (batch, context, self.sampling):
            self._shape = batch, context, self.sampling
            per_row = context // BLOCK_TOKENS + 1
            self._blocks = [
                list(range(1 + row * per_row, 1 + (row + 1) * per_row)) for row in range(batch)
            ]
            self._columns = [_sampled_fields(self.sampling, row) for row in range(batch)]
        # somewhat less than `context`, so that the steps ahead stay within its blocks
        position = context - 40 + ahead
        return DecodeRows.build(
            self._columns,
            # 7: any id will do
            sources=[7 if ahead == 0 else -1 - row for row in range(batch)],
            lengths=[position + 1] * batch,
            blocks=self._blocks,
        )

    def steps(self, batch: int, context: int, count: int) -> float:
        """Return the median seconds of `count` steps, each launched before the one before is read."""
        events: list[torch.cuda.Event] = []
        previous_step = None
        for ahead in range(count):
            step = self.runner.launch(self.rows(batch, context, ahead))
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append(event)
            if previous_step:
                previous_step.read()
            previous_step = step
        return median_seconds_between(events)


def _is_llama_3_8b(spec: ModelSpec) -> bool:
    """Return whether the predictions are of this model, however long its sequences may be."""
    return replace(spec, max_positions=LLAMA_3_8B.max_positions) == LLAMA_3_8B


def _sampled_fields(sampling: Sampling, row: int) -> np.ndarray:
    """Return the fields of a row that is sampled so, with a seed of its own."""
    # No id is named by these parameters, so none can be outside of the vocabulary.
    return describe(_first_draw(replace_fields(sampling, seed=row)), vocab=1).fields


def decode_section(
    bench: DecodeBench,
    top: DeviceCeilings,
    variant: DecodeVariant,
    cases: SequenceOf[tuple[int, int]],
) -> ProofSection:
    """Time decode steps, beside their floors; those of Llama-3-8B in bf16 beside predictions.

    The predictions are for an H200, whatever this device is.
    """
    rows = [["batch x context", "ms", "tokens/s", "floor ms", "of the floor", "predicted ms"]]
    for batch, context in cases:
        step_s = bench.steps(batch, context, STEPS)
        floor_s = decode_floor(
            bench.decoder.spec,
            batch,
            context,
            weight_number_bytes=variant.weight_number_bytes,
            kv_number_bytes=variant.kv_number_bytes,
        ).seconds(top)
        predicted_ms = roofline.PREDICTED_MS.get((batch, context))
        is_bf16 = variant.weight_number_bytes == variant.kv_number_bytes == 2
        is_predicted = _is_llama_3_8b(bench.decoder.spec) and is_bf16
        rows.append(
            [
                f"{batch} x {context}",
                f"{step_s * 1e3:.2f}",
                f"{batch / step_s:.0f}",
                f"{floor_s * 1e3:.2f}",
                f"{floor_s / step_s:.0%}",
                f"{predicted_ms:.1f}" if predicted_ms and is_predicted else "-",
            ]
        )
    lines = [f"attention: {bench.ops.attention.name}", "", markdown_table(rows)]
    return ProofSection(variant.title, lines)


def prefill_section(
    bench: DecodeBench, top: DeviceCeilings, prompts: SequenceOf[int]
) -> ProofSection:
    """Time prompts in one chunk, beside the matmul rate; Llama-3-8B's beside predictions.

    The predictions are for an H200, whatever this device is.
    """
    spec = bench.decoder.spec
    rows = [["prompt", "ms", "tokens/s", "of the matmul rate", "predicted tokens/s"]]
    for tokens in prompts:
        prefill_s = median_call_seconds(prefill(bench.decoder, tokens), 5)
        share = prefill_flops(spec, tokens) / prefill_s / top.matmul_flops_s
        predicted = roofline.PREDICTED_TOKENS_S.get(tokens) if _is_llama_3_8b(spec) else None
        rows.append(
            [
                str(tokens),
                f"{prefill_s * 1e3:.1f}",
                f"{tokens / prefill_s:.0f}",
                f"{share:.0%}",
                str(predicted or "-"),
            ]
        )
    return ProofSection("Prefill", [markdown_table(rows)])


def prefill(decoder: Decoder, tokens: int) -> Callable[[], object]:
    """Return a call that computes a prompt in one chunk, from ids to logits of the last token."""
    token_ids = torch.randint(decoder.spec.vocab, (tokens,))
    blocks = list(range(1, 1 + -(-tokens // BLOCK_TOKENS)))
    step = _one_chunk(tokens, blocks)
    token_ids, step = decoder.ops.place(token_ids, step)  # else each call of `hidden` would
    return lambda: decoder.logits(decoder.hidden(token_ids, step)[-1:])


def _one_chunk(tokens: int, blocks: list[int]) -> StepRows:
    """Return the rows of a prompt whose KV goes to the first of `blocks`."""
    positions = torch.arange(tokens)
    table = torch.tensor(blocks)
    used = blocks[: -(-tokens // BLOCK_TOKENS)]
    span = RowSpan(first_row=0, row_count=tokens, first_position=0, blocks=used, is_decode=False)
    slot_blocks = table[positions // BLOCK_TOKENS]
    return StepRows(positions, slot_blocks, positions % BLOCK_TOKENS, [span])


def graphs_section(bench: DecodeBench) -> ProofSection:
    """Compare ids and largest logits of the same steps, replayed as graphs and run eagerly.

    The graphs must have been captured. Whether the runner uses graphs stays as it was.
    """
    graphs_before = bench.runner.graphs
    results = []
    try:
        for graphs in (True, False):
            bench.runner.graphs = graphs
            steps = [bench.rows(5, 256, ahead) for ahead in range(8)]
            drawn = [bench.runner.launch(rows).read() for rows in steps]
            results.append([(step.token_ids, step.peaks.tolist()) for step in drawn])
    finally:
        bench.runner.graphs = graphs_before
    equal = results[0] == results[1]
    line = "8 steps of 5 rows: ids and largest logits " + ("equal" if equal else "DIFFER")
    return ProofSection("Graphs on and off", [line], failed=not equal)


def greedy_section(spec: ModelSpec, device: torch.device, steps: int = 12) -> ProofSection:
    """Compare greedy ids of a small model in float32 here with those of plain torch on the CPU.

    Nothing is captured, so decode steps launch their kernels one by one.
    """
    spec = replace(spec, **SMALL, head_dim=32, vocab=2000, windows=(None, None), dtype="float32")
    bench = DecodeBench(spec, device, 3, 3 * 128)
    cpu = on_cpu(bench.decoder)
    prompts = [torch.randint(spec.vocab, (size,)).tolist() for size in (70, 5, 64)]
    answers = [
        _greedy_on_device(bench, prompt, [1 + 2 * index, 2 + 2 * index], steps)
        for index, prompt in enumerate(prompts)
    ]
    expected = [_greedy_on_cpu(cpu, prompt, steps) for prompt in prompts]
    equal = answers == expected
    line = f"{steps} ids behind each of 3 prompts: {'equal' if equal else 'DIFFER'}"
    return ProofSection("Greedy ids against the CPU, float32", [line], failed=not equal)


def _greedy_on_device(
    bench: DecodeBench, prompt: list[int], blocks: list[int], steps: int
) -> list[int]:
    """Return an answer of `steps` ids: one of a prefill, the others of decode steps."""
    from .plan import DecodeRows, plain_fields

    answer = [int(_last_logits(bench.decoder, prompt, blocks).argmax())]
    for step in range(steps - 1):
        rows = DecodeRows.build(
            [plain_fields()],
            sources=[answer[-1]],
            lengths=[len(prompt) + step + 1],
            blocks=[blocks],
        )
        answer += bench.runner.launch(rows).read().token_ids
    return answer


def _greedy_on_cpu(cpu: Decoder, prompt: list[int], steps: int) -> list[int]:
    """Return an answer of `steps` ids, each by a prefill of all ids before it."""
    token_ids = list(prompt)
    for _ in range(steps):
        token_ids.append(int(_last_logits(cpu, token_ids, [1, 2]).argmax()))
    return token_ids[len(prompt) :]


def _last_logits(decoder: Decoder, token_ids: list[int], blocks: list[int]) -> torch.Tensor:
    """Return the logits of the last of `token_ids`, computed in one chunk, [1, vocab]."""
    step = _one_chunk(len(token_ids), blocks)
    return decoder.logits(decoder.hidden(torch.tensor(token_ids), step)[-1:])


def on_cpu(decoder: Decoder) -> Decoder:
    """Return a decoder with the same weights in plain torch on the CPU, with a small pool.

    This is for Llama's layers: no norms of queries and keys, no biases, no experts.
    """
    spec = decoder.spec
    weights = decoder.weights
    ops = Ops()
    layout = kv_layout(spec, spec.dtype, BLOCK_TOKENS)
    pool = KVPool(layout, 3, getattr(torch, spec.dtype))

    def plain(layer: Any, gated: bool = False) -> Linear:
        return Linear(layer._weight.cpu(), None, gated, ops)

    def norm(norm: RmsNorm) -> RmsNorm:
        return RmsNorm(norm.weight.cpu(), norm.eps)

    layers = [
        DecoderLayer(
            norm=norm(layer.norm),
            qkv=plain(layer.qkv),
            qk_norms=None,
            output=plain(layer.output),
            mlp_norm=norm(layer.mlp_norm),
            mlp=Mlp(plain(layer.mlp.gate_up, gated=True), plain(layer.mlp.down)),
        )
        for layer in weights.layers
        if isinstance(layer.mlp, Mlp)  # as all are; this tells the type checker
    ]
    cpu_weights = DecoderWeights(
        embedding=weights.embedding.cpu(),
        layers=layers,
        norm=norm(weights.norm),
        head=plain(weights.head),
    )
    return Decoder(spec, cpu_weights, pool, ops)


# ---- between processes ---------------------------------------------------------------------------


def handover_section(device: torch.device, blocks: int) -> ProofSection:
    """Move KV from prefill to decode between two processes on this device.

    A machine without NIXL leaves it out. Raises TimeoutError where nothing arrives: that is a failure.
    """
    layout = kv_layout(LLAMA_3_8B, "bfloat16", BLOCK_TOKENS)
    section = ProofSection("P -> D between two processes on this GPU, NIXL", [])
    try:
        result = measure_handover("nixl", str(device), layout, blocks)
    except TransportUnavailable as error:
        section.lines.append(f"left out: {error}")
        return section
    section.failed = not result.intact
    section.lines.append(
        f"{blocks} blocks of {layout.block_bytes >> 20} MiB: {result.gb_s:.1f} GB/s, "
        + ("every byte arrived" if result.intact else "bytes DIFFER")
    )
    if result.checksum_gb_s is not None:
        # Each end makes the checksums once. In a worker that overlaps with the writes.
        seconds_a_gb = 1 / result.gb_s + 2 / result.checksum_gb_s
        section.lines.append(
            f"checksums: {result.checksum_gb_s:.1f} GB/s at each end; "
            f"{1 / seconds_a_gb:.1f} GB/s with those of both ends, one after another"
        )
    return section


def ranks_section(device: torch.device) -> ProofSection:
    """Prove that NCCL's calls can be captured: the sum over ranks, and the joining of their parts.

    NCCL sums by itself (`reduced`), or each rank gathers the others' parts and adds them in rank
    order (`gathered`). There is one rank, so both must return what went in: more ranks would need
    more GPUs.
    """
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    x = torch.empty(8, 4096, dtype=torch.bfloat16, device=device)
    section = ProofSection("Sums of ranks inside a graph (NCCL, one rank)", [])
    for any_order in (True, False):
        ranks = Collectives(rank=0, size=1, any_order=any_order)
        ranks.sum(x.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = ranks.join(ranks.sum(x.clone()))
        x.normal_()
        graph.replay()
        right = torch.equal(out, x)
        section.failed |= not right
        method = "reduced" if any_order else "gathered"
        section.lines.append(f"- {method}: {'right' if right else 'WRONG'}")
    dist.destroy_process_group()
    return section


def host_waits_section(bench: DecodeBench, batch: int, context: int) -> ProofSection:
    """Count calls that make the host wait in 20 steady steps, whose ids are read by an event."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    bench.steps(batch, context, 4)
    # the profiler waits for the device too, and so does the end of the measurement
    with profile(activities=activities) as idle:
        torch.cuda.synchronize()
    with profile(activities=activities) as trace:
        bench.steps(batch, context, 20)
    calls = Counter(event.name for event in trace.events() if event.name.startswith("cuda"))
    calls -= Counter(event.name for event in idle.events() if event.name in WAITING_CALLS)
    waits = sum(calls[name] for name in WAITING_CALLS)
    listed = [f"- {name}: {count}" for name, count in calls.most_common(8)]
    return ProofSection(
        f"Host in 20 steps of {batch} x {context}",
        [f"blocking calls beside reading the ids: {waits}", "", *listed],
        failed=waits > 0,
    )


# ---- the whole proof -----------------------------------------------------------------------------

#: Makes a section; a long-running call.
SectionMaker = Callable[[], ProofSection]


def variant_section(
    spec: ModelSpec,
    device: torch.device,
    top: DeviceCeilings,
    variant: DecodeVariant,
    cases: SequenceOf[tuple[int, int]],
) -> ProofSection:
    """Time decode of another model than the first one, which must be gone from the memory."""
    torch.cuda.empty_cache()
    _, longest_context = cases[-1]
    bench = DecodeBench(spec, device, 32, 32 * longest_context, **variant.model_options)
    bench.runner.capture()
    return decode_section(bench, top, variant, cases)


@dataclass(frozen=True, slots=True)
class ProofSize:
    """The model that is proven, and the shapes that it is timed in."""

    spec: ModelSpec
    cases: SequenceOf[tuple[int, int]]
    prompts: SequenceOf[int]

    @classmethod
    def full(cls) -> ProofSize:
        """Return the shape of Llama-3-8B."""
        return cls(LLAMA_3_8B, CASES, PROMPTS)

    @classmethod
    def small(cls) -> ProofSize:
        """Return two layers of it."""
        spec = replace(LLAMA_3_8B, layers=2, windows=(None, None), vocab=4096, max_positions=2304)
        return cls(spec, ((1, 1024), (32, 1024)), (2048,))

    def served(self) -> ModelSpec:
        """Return the model with the positions that the cases need, as `max_model_len` has them.

        Attention lays its splits out for the longest sequence that is served.
        """
        longest = max(context for _, context in self.cases) + BLOCK_TOKENS
        return replace(self.spec, max_positions=longest)


#: A part of a section: a title in case that it breaks, and what makes it. What is made has a title
#: of its own, which says more.
Part = tuple[str, SectionMaker]


def device_parts(size: ProofSize, device: torch.device) -> Iterator[Part]:
    """Yield the machine's ceilings, whether steps can be captured, and whether ids are right.

    Each part makes a model of its own; only "Graphs" needs this one.
    """
    yield "Ceilings", partial(ceilings_section, device)
    spec = size.served()
    bench = DecodeBench(spec, device, 8, 8 * 512)
    try:
        bench.runner.capture()
    except Exception as problem:  # the other parts say what they can
        broken = ProofSection("Capture", [f"BROKE: {problem!r}"], failed=True)
        yield "Capture", lambda: broken
    else:
        yield "Graphs", partial(graphs_section, bench)
    yield "Greedy ids", partial(greedy_section, size.spec, device)
    yield "Sampling", partial(sampling_section, device)
    yield "Ranks", partial(ranks_section, device)


def backend_parts(size: ProofSize, device: torch.device) -> Iterator[Part]:
    """Yield the comparison of every attention backend with float64."""
    yield "Attention backends", partial(backends, probe_environment(device), device)


def pair_parts(size: ProofSize, device: torch.device) -> Iterator[Part]:
    """Yield the transfer of KV between two processes."""
    yield "Handover", partial(handover_section, device, 8 if size.spec.layers == 2 else 64)


def table_parts(size: ProofSize, device: torch.device) -> Iterator[Part]:
    """Yield decode and prefill of a random model beside their floors, and the host's waits."""
    top = measure_ceilings(device)
    row_limit = max(batch for batch, _ in size.cases)
    total_keys = max(batch * context for batch, context in size.cases)
    bench = DecodeBench(size.served(), device, row_limit, total_keys)
    bench.runner.capture()
    yield BF16.title, partial(decode_section, bench, top, variant=BF16, cases=size.cases)
    yield "Host", partial(host_waits_section, bench, 32, 1024)
    bench.sampling = Sampling(max_tokens=1, temperature=0.6, top_p=0.9)
    sampled = replace(BF16, title="Decode, bf16, temperature 0.6 and top_p 0.9")
    yield sampled.title, partial(decode_section, bench, top, variant=sampled, cases=size.cases)
    del bench
    torch.cuda.empty_cache()
    long_bench = DecodeBench(size.spec, device, 1, BLOCK_TOKENS)
    yield "Prefill", partial(prefill_section, long_bench, top, size.prompts)


def variant_parts(size: ProofSize, device: torch.device) -> Iterator[Part]:
    """Yield decode with FP8 weights, with FP8 KV, and exact."""
    top = measure_ceilings(device)
    cases = [case for case in size.cases if case[0] == 32]
    for variant in OTHER_VARIANTS:
        spec = size.served()
        yield (
            variant.title,
            partial(variant_section, spec, device, top=top, variant=variant, cases=cases),
        )


#: The sections by name, the most valuable first.
SECTIONS: dict[str, Callable[[ProofSize, torch.device], Iterator[Part]]] = {
    "device": device_parts,
    "backends": backend_parts,
    "pair": pair_parts,
    "tables": table_parts,
    "variants": variant_parts,
}


def ceilings_section(device: torch.device) -> ProofSection:
    """Measure what the device reaches at all."""
    top = measure_ceilings(device)
    copy_tb_s = top.copy_bytes_s / 1e12
    line = f"copy {copy_tb_s:.2f} TB/s, matmul {top.matmul_flops_s / 1e12:.0f} TFLOP/s"
    return ProofSection("Ceilings of this run", [line])


def sampling_section(device: torch.device, vocab: int = 128_256, rows: int = 256) -> ProofSection:
    """Compare ids that the device draws with those of the host's sampler, and time the draws."""
    from .plan import DecodeRows
    from .sampling import SampledRows, SlotBuffers, sample_rows

    # float32, so that both see the same numbers
    logits = torch.randn(rows, vocab, device=device) * 3
    samplings = [_row_sampling(row) for row in range(rows)]
    columns = [describe(_first_draw(sampling), vocab).fields for sampling in samplings]
    packed = DecodeRows.build(
        columns, sources=[0] * rows, lengths=[1] * rows, blocks=[[]] * rows
    ).packed
    on_device = torch.from_numpy(packed).to(device)
    slots = SlotBuffers.allocate(1, vocab, device)
    out = SampledRows.allocate(rows, device)
    sample_rows(logits, on_device, slots, out)
    expected = sample_tokens(logits, [_first_draw(sampling) for sampling in samplings])
    ids = out.token_ids.tolist()
    equal = sum(
        isinstance(token, Token) and token.id == token_id
        for token, token_id in zip(expected, ids, strict=True)
    )
    took_s = median_call_seconds(partial(sample_rows, logits, on_device, slots=slots, out=out), 10)
    lines = [
        f"{equal} of {rows} ids are those of the host's sampler",
        f"{rows} rows of {vocab} ids: {took_s * 1e3:.2f} ms",
    ]
    # the edge of a nucleus may differ (`sampling.NUCLEUS_TOLERANCE`), which few draws hit
    return ProofSection("Sampling on the device", lines, failed=equal < 0.98 * rows)


def _row_sampling(row: int) -> Sampling:
    """Return what a row asks for: defaults that models are published with in turn, or greedy ids."""
    return (
        Sampling(max_tokens=1, temperature=0.6, top_p=0.9, seed=row),
        Sampling(max_tokens=1, temperature=0.7, top_p=0.8, top_k=20, seed=row),
        Sampling(max_tokens=1),
    )[row % 3]


def _first_draw(sampling: Sampling) -> Sequence:
    return Sequence(("proof", 0), [0], prompt_tokens=1, sampling=sampling)


def attempt(title: str, make_section: SectionMaker) -> ProofSection:
    """Return the section, or a failed one of that title where making it broke."""
    try:
        return make_section()
    except Exception as problem:
        return ProofSection(title, [f"BROKE: {problem!r}"[:1000]], failed=True)


def make_section(
    name: str, size: ProofSize, device: torch.device, deadline_s: float = DEADLINE_S
) -> list[ProofSection]:
    """Return the parts of a section; those that its time leaves no room for are named."""
    started_at = time.monotonic()
    made: list[ProofSection] = []
    parts = SECTIONS[name](size, device)
    while True:
        try:
            title, make = next(parts)
        except StopIteration:
            return made
        except Exception as problem:  # between two parts: a model that cannot be made
            return [*made, ProofSection("Preparation", [f"BROKE: {problem!r}"[:1000]], failed=True)]
        if time.monotonic() - started_at > deadline_s:
            made.append(ProofSection(title, ["left out: the section's time is over"]))
            continue
        made.append(attempt(title, make))
        del make  # and with it the model
        part = made[-1]
        print(f"## {name}: {part.title}\n\n" + "\n".join(part.lines) + "\n", flush=True)


def describe_machine(device: torch.device) -> dict[str, str]:
    """Return the device and the versions that its results follow from."""
    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": import_module("triton").__version__,
        "python": sys.version.split()[0],
    }


def run_proof(names: SequenceOf[str], size: ProofSize, device: torch.device, path: Path) -> int:
    """Make the sections that the state file has not yet; return the exit status.

    A file of another machine counts as empty.
    """
    state = ProofState.read(path, describe_machine(device))
    with torch.inference_mode():
        for name in names:
            if name in state.sections:
                print(f"{name}: done before, see {path}")
                continue
            started_at = time.monotonic()
            state.sections[name] = make_section(name, size, device)
            state.seconds[name] = round(time.monotonic() - started_at, 1)
            state.write(path)
    failed = state.failed()
    print(f"FAILED: {failed}" if failed else "all held")
    return int(bool(failed))


def main() -> None:
    """Print the proof. Exits 1 if something that must hold does not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--section", action="append", choices=SECTIONS, help="may be repeated")
    parser.add_argument("--state", type=Path, default=Path("loadtests/results/gpu-proof.json"))
    parser.add_argument("--again", action="store_true", help="forget what the state file has")
    parser.add_argument("--small", action="store_true", help="two layers: does it run at all?")
    parser.add_argument("--bundle", type=Path, help="pack what a bare machine needs, and end")
    arguments = parser.parse_args()
    if arguments.bundle:
        bundle = make_bundle(arguments.bundle)
        print(f"{arguments.bundle}: {bundle.size_bytes >> 20} MiB; {', '.join(bundle.packed)}")
        print("\n".join(["missing:", *bundle.missing]) if bundle.missing else "nothing is missing")
        return
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to prove here (tests/engine/gpu: the interpreter's part)")
        return
    if arguments.again:
        arguments.state.unlink(missing_ok=True)
    device = torch.device("cuda", torch.cuda.current_device())
    size = ProofSize.small() if arguments.small else ProofSize.full()
    sys.exit(run_proof(arguments.section or list(SECTIONS), size, device, arguments.state))


if __name__ == "__main__":
    main()
