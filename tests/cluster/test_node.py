"""Two workers without Ray in one process: real engines, real transports, real tiers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from diptych.cluster.config import ClusterConfig
from diptych.cluster.worker import core as node_module
from diptych.cluster.worker import cores
from diptych.cluster.worker.core import WorkerCore
from diptych.engine.blocks import BlockPool
from diptych.engine.engine import LOW_POOL_DIVISOR
from diptych.engine.kernels import NativeOps
from diptych.kv_transfer.identity import block_hashes
from diptych.protos import frames as f

from tests.support.checkpoints import make
from tests.support.variants import daily

GATEWAY = "gateway"
SHORT = f.Sampling(8, logprobs=2)


class Bench:
    """A prefill and a decode node that know each other, and what they sent."""

    def __init__(self, folder: Path, settings: dict) -> None:
        self.config = ClusterConfig.model_validate(settings)
        self.folder, self.nodes = folder, {}
        self.answers: dict[tuple[f.AttemptKey, int], list[f.Token]] = {}
        self.prompts: dict[f.AttemptKey, list[f.Token]] = {}
        self.finished: set[tuple[f.AttemptKey, int]] = set()
        self.failed: list[f.AttemptFailed] = []

    async def open(self, role: str, name: str = "") -> WorkerCore:
        name = name or f"{role}/x"
        node = WorkerCore(
            name,
            role,
            self.config,
            self.folder,
            send=self._sent,
            on_observation=lambda observation: None,
        )
        node.cards = await node.start("127.0.0.1")
        for other in self.nodes.values():
            other.add_peer(name, node.cards)
            node.add_peer(other.name, other.cards)
        self.nodes[name] = node
        return node

    def _sent(self, _: str, frame: object) -> None:
        if isinstance(frame, f.AttemptFailed):
            self.failed.append(frame)
        for stream in frame.answers if isinstance(frame, f.EngineStepTokens) else ():
            answer = self.answers.setdefault((stream.attempt_key, stream.answer_index), [])
            assert len(answer) == stream.offset, "a token is lost or comes twice"
            answer += stream.tokens
            self.prompts.setdefault(stream.attempt_key, []).extend(stream.prompt_logprobs)
            if stream.finish_reason:
                self.finished.add((stream.attempt_key, stream.answer_index))

    async def until(self, done: Callable[[], bool]) -> None:
        for _ in range(2000):
            if done():
                return
            assert not self.failed, self.failed
            for node in self.nodes.values():
                node.check()
            await asyncio.sleep(0.01)
        raise AssertionError("not within 20 seconds")

    async def ask(
        self,
        ids: list[int],
        name: str,
        sampling: f.Sampling = SHORT,
        partition: bytes = b"",
        **fields: str,
    ) -> list[list[f.Token]]:
        """The answers of a prompt that one node prefills and the other decodes."""
        key = (name, 0)
        frames = {"cache_partition": partition}
        self.nodes["decode/x"].submit(
            GATEWAY, f.StartDecode(key, 1, list(ids), sampling, "prefill/x", **frames)
        )
        frame = f.StartPrefill(key, 1, list(ids), sampling, "decode/x", **fields, **frames)
        self.nodes["prefill/x"].submit(GATEWAY, frame)
        return await self._answers(key, sampling.n)

    async def alone(
        self,
        ids: list[int],
        name: str,
        sampling: f.Sampling = SHORT,
        node: str = "decode/x",
        **fields: str,
    ) -> list[list[f.Token]]:
        """On a decode node only."""
        frame = f.StartDecode((name, 0), 1, list(ids), sampling, None, **fields)
        self.nodes[node].submit(GATEWAY, frame)
        return await self._answers((name, 0), sampling.n)

    async def _answers(self, key: f.AttemptKey, count: int) -> list[list[f.Token]]:
        each = [(key, index) for index in range(count)]
        await self.until(lambda: self.finished >= set(each))
        return [self.answers[one] for one in each]

    def whole(self) -> bool:
        """Every block of every pool is free or cached, and nothing is quarantined."""
        for node in self.nodes.values():
            blocks = node.statistics()["engine"]["kv_blocks"]
            if blocks["free"] + blocks["cached"] != blocks["total"] or blocks["quarantined"]:
                return False
        return True


def settings(**more: dict) -> dict:
    pool = {"engine": {"kv_mib": 8, "max_step_tokens": 128}}
    return {"pools": {"prefill": pool, "decode": pool}} | more


@contextlib.asynccontextmanager
async def opened(folder: Path, **more: dict) -> AsyncIterator[Bench]:
    bench = Bench(folder, settings(**more))
    try:
        await bench.open("prefill")
        await bench.open("decode")
        yield bench
        await bench.until(bench.whole)
    finally:
        for node in bench.nodes.values():
            node.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("node") / "llama", "llama")


def prompt(seed: int, count: int) -> list[int]:
    return [(seed * 7919 + i * 31) % 250 + 3 for i in range(count)]


def received(bench: Bench, name: str) -> int:
    return bench.nodes[name].statistics()["transfer"]["bytes_received"]


def computed(bench: Bench, name: str) -> int:
    return bench.nodes[name].engine.counters.prefill_tokens


@pytest.mark.parametrize("transport", ["tcp", "nixl", "shm"])
async def test_only_blocks_that_decode_does_not_hold_travel(folder: Path, transport: str) -> None:
    async with opened(folder, kv_transfer={"transport": transport}) as bench:
        ids = prompt(1, 300)
        first = await bench.ask(ids, "a")
        whole = received(bench, "decode/x")
        again = await bench.ask(ids, "b")
        block = bench.nodes["decode/x"].engine.kv_pool.layout.block_bytes
        assert again == first
        assert whole == 5 * block and received(bench, "decode/x") - whole == block, "the tail"
        alone = await bench.alone(ids, "c")
        assert alone == first
        await bench.until(bench.whole)
        assert [key[0] for key in bench.nodes["decode/x"].ended_attempts] == ["a", "b", "c"]


@pytest.mark.parametrize("ending", ["none", "first", "one", "all"])
async def test_one_transfer_serves_n_answers_also_when_some_end_at_once(
    folder: Path, ending: str
) -> None:
    """`ending`: which answers end with their first token."""

    async with opened(folder, kv_transfer={"transport": "tcp"}) as bench:
        ids, drawn = prompt(6, 150), f.Sampling(12, 0.9, seed=3, logprobs=1, n=4)
        firsts = [one[0].id for one in await bench.alone(ids, "a", drawn)]
        stops = {"none": (), "first": firsts[:1], "one": firsts[2:3], "all": firsts}[ending]
        drawn = msgspec.structs.replace(drawn, stop_ids=tuple(stops))
        answers = await bench.ask(ids, "b", drawn)
        assert answers == await bench.alone(ids, "c", drawn)
        assert all(len(a) == 1 for a, first in zip(answers, firsts, strict=True) if first in stops)


async def test_prompt_logprobs_come_from_the_prefill_worker(folder: Path) -> None:
    async with opened(folder, kv_transfer={"transport": "tcp"}) as bench:
        ids, told = prompt(7, 300), f.Sampling(4, logprobs=1, prompt_logprobs=1)
        assert await bench.ask(ids, "a", told) == await bench.alone(ids, "b", told)
        assert [token.id for token in bench.prompts["a", 0]] == ids[1:]
        assert bench.prompts["a", 0] == bench.prompts["b", 0]


def test_transfers_stay_on_their_engines_core_where_no_other_is_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = cores.usable()
    if len(mine) < 2:
        pytest.skip("there is one core")
    monkeypatch.setenv(cores.VARIABLE, str(tmp_path))

    async def run(usable: list[int]) -> list[set[int]]:
        monkeypatch.setattr(cores, "usable", lambda: usable)
        monkeypatch.setattr(node_module, "usable", lambda: usable)
        async with opened(folder, kv_transfer={"transport": "tcp"}) as bench:
            threads = [t for t in threading.enumerate() if t.name == "kv-transfer"]
            assert all(len(n.engine.options.cores) == 1 for n in bench.nodes.values())
            return [os.sched_getaffinity(t.native_id) for t in threads]

    assert sorted(asyncio.run(run(mine[:2])), key=min) == [{mine[0]}, {mine[1]}]
    if len(mine) > 2:
        assert asyncio.run(run(mine)) == [set(mine)] * 2


def test_a_prompt_is_computed_with_the_core_of_a_worker_that_is_idle(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the answer is the same as without."""
    if len(cores.usable()) < 2:
        pytest.skip("there is one core")
    monkeypatch.setenv(cores.VARIABLE, str(tmp_path))

    async def run() -> None:
        async with opened(folder, kv_transfer={"transport": "tcp"}) as bench:
            engines = [node.engine for node in bench.nodes.values()]
            if not isinstance(engines[0]._model.ops, NativeOps):
                pytest.skip(f"only our own kernels share cores; here computes {engines[0].kernels}")
            answers: list[list[f.Token]] = []
            async with asyncio.timeout(60):
                while not any(engine.counters.helped_steps for engine in engines):
                    number = len(answers)
                    ids = prompt(number, 300)
                    answers.append(await bench.ask(ids, f"a{number}", f.Sampling(8)))
                    assert answers[-1] == await bench.alone(ids, f"b{number}", f.Sampling(8))

    asyncio.run(run())


async def test_two_workers_swap_roles_and_keep_what_they_hold(folder: Path) -> None:
    async with opened(folder, kv_transfer={"transport": "tcp"}) as bench:
        ids, nodes = prompt(9, 400), bench.nodes
        expected = await bench.ask(ids, "a")
        nodes["decode/x"].submit(GATEWAY, f.StartDecode(("b", 0), 1, ids, SHORT, None))
        with pytest.raises(AssertionError, match="attempts cannot be left"):
            nodes["decode/x"].become("prefill")
        nodes["decode/x"].hand_over()
        assert bench.failed == [f.AttemptFailed(("b", 0), "decode/x", f.HANDOVER)]
        bench.failed.clear()
        await bench.until(lambda: not any(node.role.attempts for node in nodes.values()))
        for name, role in (("decode/x", "prefill"), ("prefill/x", "decode")):
            nodes[name].become(role)
        before = {name: computed(bench, name) for name in nodes}
        key = ("c", 0)
        nodes["prefill/x"].submit(GATEWAY, f.StartDecode(key, 1, list(ids), SHORT, "decode/x"))
        nodes["decode/x"].submit(GATEWAY, f.StartPrefill(key, 1, list(ids), SHORT, "prefill/x"))
        assert await bench._answers(key, 1) == expected
        assert computed(bench, "decode/x") - before["decode/x"] == 400 - 6 * 64, "cached"
        assert all(node.statistics()["weight_loads"] == 1 for node in nodes.values())


async def test_a_prefix_is_fetched_from_the_peer_that_holds_it(folder: Path) -> None:
    async with opened(folder, kv_transfer={"transport": "tcp"}) as bench:
        ids = prompt(2, 400)
        expected = await bench.alone(ids, "a")  # the decode node holds it now
        before = computed(bench, "prefill/x")
        assert await bench.ask(ids, "b", prefix_holder="decode/x") == expected
        block = bench.nodes["prefill/x"].engine.kv_pool.layout.block_bytes
        assert received(bench, "prefill/x") == 6 * block
        assert computed(bench, "prefill/x") - before == 400 - 6 * 64


async def test_no_partition_finds_or_fetches_blocks_of_another(folder: Path) -> None:
    async with opened(folder, kv_transfer={"transport": "tcp"}) as bench:
        ids = prompt(21, 400)

        async def computed_of(name: str, partition: bytes, **fields: str) -> int:
            before = computed(bench, "prefill/x")
            assert await bench.ask(ids, name, partition=partition, **fields) == expected
            return computed(bench, "prefill/x") - before

        expected = await bench.ask(ids, "a", partition=b"acme")
        assert await computed_of("b", b"spy") == 400
        assert await computed_of("c", b"another", prefix_holder="decode/x") == 400
        assert await computed_of("d", b"acme") == 400 - 6 * 64
        assert await bench.alone(ids, "e", cache_partition=b"") == expected  # type: ignore[arg-type]
        assert computed(bench, "decode/x") == 400, "not what decode got for others"
        assert bench.whole()


async def test_a_prompt_that_its_decode_worker_computes_is_fetched_too(folder: Path) -> None:
    async with opened(folder, kv_transfer={"transport": "tcp"}) as bench:
        await bench.open("decode", "decode/y")
        ids = prompt(3, 400)
        expected = await bench.alone(ids, "a")
        assert await bench.alone(ids, "b", node="decode/y", prefix_holder="decode/x") == expected
        block = bench.nodes["decode/y"].engine.kv_pool.layout.block_bytes
        assert received(bench, "decode/y") == 6 * block
        assert computed(bench, "decode/y") == 400 - 6 * 64


async def test_blocks_of_256_tokens_are_hit_and_fetched_and_told_by_64(folder: Path) -> None:
    large = {"model": {"block_tokens": 256}, "kv_transfer": {"transport": "tcp"}}
    pool = {"engine": {"kv_mib": 16, "max_step_tokens": 256}}
    async with opened(folder, **large, pools={"prefill": pool, "decode": pool}) as bench:
        ids = prompt(9, 600)
        expected = await bench.alone(ids, "a")
        told = set(bench.nodes["decode/x"].engine.scheduler.pool.hashes())
        salt = bench.nodes["decode/x"]._salt
        assert told == set(block_hashes(ids, salt)[:8]), "two blocks, four hashes each"
        before = computed(bench, "prefill/x")
        assert await bench.ask(ids, "b", prefix_holder="decode/x") == expected
        assert computed(bench, "prefill/x") - before == 600 - 512


async def test_blocks_of_another_size_are_no_prefix_of_mine(folder: Path) -> None:
    """A name says where a block ends, not where it begins."""

    async with opened(folder, kv_transfer={"transport": "tcp"}) as bench:
        ids, node = prompt(10, 600), bench.nodes["prefill/x"]
        expected = await bench.alone(ids, "a")
        card = node._peers["decode/x"][0]
        layout = dataclasses.replace(card.layout, block_tokens=256)
        node._peers["decode/x"] = [msgspec.structs.replace(card, layout=layout)]
        assert await bench.ask(ids, "b", prefix_holder="decode/x") == expected
        assert received(bench, "prefill/x") == 0 and computed(bench, "prefill/x") == 600


async def test_a_prefix_that_the_peer_does_not_hold_is_computed(folder: Path) -> None:
    async with opened(folder, kv_transfer={"transport": "tcp"}) as bench:
        ids = prompt(3, 300)
        answer = await bench.ask(ids, "a", prefix_holder="decode/x")
        assert computed(bench, "prefill/x") == 300
        assert bench.nodes["prefill/x"].statistics()["transfer"]["failures"] == {"not_held": 1}
        assert await bench.alone(ids, "b") == answer


async def test_a_longer_part_of_the_prefix_is_fetched_behind_what_is_here(folder: Path) -> None:
    async with opened(folder, kv_transfer={"transport": "tcp"}) as bench:
        ids = prompt(4, 400)
        await bench.ask(ids[:150], "a")
        expected = await bench.alone(ids, "b")
        got = received(bench, "prefill/x")
        assert await bench.ask(ids, "c", prefix_holder="decode/x") == expected
        block = bench.nodes["prefill/x"].engine.kv_pool.layout.block_bytes
        assert received(bench, "prefill/x") - got == 4 * block  # two of six were here


async def test_an_abort_while_a_prefix_is_fetched_leaves_nothing_behind(folder: Path) -> None:
    async with opened(folder, kv_transfer={"transport": "tcp"}) as bench:
        ids = prompt(5, 400)
        await bench.alone(ids, "a")
        for index in range(20):
            key, sampling = (f"r{index}", 0), f.Sampling(8)
            frame = f.StartPrefill(
                key, 1, list(ids), sampling, "decode/x", prefix_holder="decode/x"
            )
            bench.nodes["prefill/x"].submit(GATEWAY, frame)
            for _ in range(index):
                await asyncio.sleep(0)
            bench.nodes["prefill/x"].cancel(f.CancelAttempt(key))
        await bench.until(lambda: not bench.nodes["prefill/x"].role.attempts)


def is_low(pool: BlockPool) -> bool:
    return pool.free_blocks < pool.total_blocks // LOW_POOL_DIVISOR


def copied(node: WorkerCore, ids: list[int]) -> bool:
    """The pool is not low, or the tiers have this prompt's blocks, on the disk too."""
    pool, tiers = node.engine.scheduler.pool, node.tiering.tiers
    if not is_low(pool):
        return True
    hashes = block_hashes(ids, node._salt, node.engine.kv_pool.layout.block_tokens)
    return (
        tiers.count_held_blocks(hashes) == len(hashes) and not tiers.statistics()["memory"]["dirty"]
    )


async def test_evicted_blocks_come_back_from_the_tiers_also_after_a_restart(
    folder: Path, tmp_path: Path
) -> None:
    tiers = {"memory_mib": 9, "disk_mib": 64, "folder": str(tmp_path)}

    async with opened(folder, kv_transfer={"transport": "tcp"}, kv_tiers=tiers) as bench:
        total = bench.nodes["prefill/x"].engine.scheduler.pool.total_blocks
        prompts = [prompt(seed, 500) for seed in range(10, 10 + total // 3)]
        answers = []
        for index, ids in enumerate(prompts):
            answers.append(await bench.ask(ids, f"a{index}"))
            await bench.until(lambda: copied(bench.nodes["prefill/x"], prompts[0]))
        before = computed(bench, "prefill/x")
        assert await bench.ask(prompts[0], "again") == answers[0]
        assert computed(bench, "prefill/x") - before < 500, "nothing came from a tier"
    async with opened(folder, kv_transfer={"transport": "tcp"}, kv_tiers=tiers) as bench:
        stats = bench.nodes["prefill/x"].tiering.tiers.statistics
        await bench.until(lambda: stats()["disk"]["entries"] > 0)
        assert await bench.ask(prompts[0], "restarted") == answers[0]
        assert computed(bench, "prefill/x") < 500, "nothing came from the disk"


async def test_a_peer_brings_up_what_only_its_tiers_hold(folder: Path) -> None:
    tiers = {"memory_mib": 64}
    async with opened(folder, kv_transfer={"transport": "tcp"}, kv_tiers=tiers) as bench:
        holder = bench.nodes["decode/x"]
        pool = holder.engine.scheduler.pool
        ids = prompt(10, 500)
        hashes = block_hashes(ids, holder._salt, holder.engine.kv_pool.layout.block_tokens)
        expected = await bench.alone(ids, "first")
        for index in range(pool.total_blocks // 3):
            await bench.alone(prompt(11 + index, 500), f"other {index}")
            await bench.until(
                lambda: not is_low(pool) or holder.tiering.tiers.count_held_blocks(hashes) == 7
            )
        assert pool.prefix_length(hashes) < len(hashes), "the prompt is still in the pool"
        assert set(hashes[pool.prefix_length(hashes) :]) <= set(pool.demoted_hashes())
        assert holder.load_token_s > 0
        before = received(bench, "prefill/x")
        assert await bench.ask(ids, "again", prefix_holder="decode/x") == expected
        assert received(bench, "prefill/x") > before
        assert computed(bench, "prefill/x") < 100, "the rest of the last block is computed"
        assert pool.prefix_length(hashes) == len(hashes), "it is in the holder's pool again"
        assert not pool.demoted_hashes() or not set(hashes) & set(pool.demoted_hashes())
        loads = holder.tier_loads()
        assert loads is not None and loads.tokens > 0 and loads.seconds > 0


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    for at in range(0, len(data), 4096):
        data[at + 100] ^= 4
    file.write_bytes(data)


def truncate(file: Path) -> None:
    with file.open("r+b") as opened_file:
        opened_file.truncate(file.stat().st_size // 3)


@pytest.mark.parametrize(
    "damage",
    [flip, *(pytest.param(damage, marks=pytest.mark.slow) for damage in (truncate, Path.unlink))],
)
async def test_a_damaged_disk_tier_costs_a_recompute_and_nothing_else(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    tiers = {"memory_mib": 9, "disk_mib": 64, "folder": str(tmp_path)}
    ids = prompt(20, 500)

    async with opened(folder, kv_transfer={"transport": "tcp"}, kv_tiers=tiers) as bench:
        expected = await bench.ask(ids, "a")
        total = bench.nodes["prefill/x"].engine.scheduler.pool.total_blocks
        for seed in range(30, 30 + total // 4):
            await bench.ask(prompt(seed, 500), f"other{seed}")
            await bench.until(lambda: copied(bench.nodes["prefill/x"], ids))
        stats = bench.nodes["prefill/x"].tiering.tiers.statistics
        await bench.until(lambda: stats()["disk"]["entries"] > 0)
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.stat().st_size > 4096:
            damage(file)
    async with opened(folder, kv_transfer={"transport": "tcp"}, kv_tiers=tiers) as bench:
        assert await bench.ask(ids, "b") == expected
        assert not bench.failed


@pytest.mark.parametrize("ranks", [(2, 1), *daily([(1, 2)])], ids=str)
async def test_ranks_of_both_ends_may_differ(folder: Path, ranks: tuple[int, int]) -> None:
    """In float32, where sums over ranks differ from one rank's by their last bits only."""

    ids, model = prompt(8, 300), {"dtype": "float32"}
    async with opened(folder, kv_transfer={"transport": "tcp"}, model=model) as bench:
        expected = await bench.ask(ids, "a")
    pools = {
        role: {"engine": {"kv_mib": 8, "max_step_tokens": 128}, "tensor_parallel": count}
        for role, count in zip(("prefill", "decode"), ranks, strict=True)
    }
    more = {"kv_transfer": {"transport": "tcp"}, "model": model, "pools": pools}
    async with opened(folder, **more) as bench:
        answers = await bench.ask(ids, "a")
        again = await bench.ask(ids, "b")
    assert answers == again
    for one, other in zip(answers[0], expected[0], strict=True):
        assert one.id == other.id and one.logprob == pytest.approx(other.logprob, abs=1e-4)
