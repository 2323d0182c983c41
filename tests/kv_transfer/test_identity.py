"""What two processes must agree on without talking: block hashes, seeds, checksums."""

import itertools
import random

import pytest
from diptych.kv_transfer.identity import (
    HASH_TOKENS,
    block_hashes,
    digest,
    is_looked_up,
    ticket_id_of,
    ticket_seed,
    tile_seed,
)
from diptych.router.index import positions

IDS = random.Random(1).choices(range(50_000), k=5 * HASH_TOKENS)
SALT = b"model"
HASHES = [
    "264beaa01ee918ef47725f33ca156469",
    "a803c64a5e7a17d44f99b1f2a0341263",
]


def test_equal_prefixes_have_equal_hashes():
    longer = IDS + [1] * HASH_TOKENS
    assert block_hashes(longer, SALT)[:5] == block_hashes(IDS, SALT)
    assert len(set(block_hashes(longer, SALT))) == 6


@pytest.mark.parametrize("position", [0, 63, 64, 200, 319])
def test_another_token_changes_its_block_and_all_later_ones_only(position):
    other = list(IDS)
    other[position] += 1
    pairs = zip(block_hashes(IDS, SALT), block_hashes(other, SALT), strict=True)
    changed = [mine != theirs for mine, theirs in pairs]
    assert changed == [index >= position // HASH_TOKENS for index in range(5)]


def test_a_block_has_another_hash_behind_another_prefix():
    block = IDS[:HASH_TOKENS]
    first, second = block_hashes(block + block, SALT)
    assert first != second


def test_the_salt_changes_every_hash():
    assert not set(block_hashes(IDS, SALT)) & set(block_hashes(IDS, b"other"))


@pytest.mark.parametrize(
    ("tokens", "hashes"), [(0, 0), (63, 0), (64, 1), (65, 1), (127, 1), (128, 2)]
)
def test_a_tail_that_fills_no_block_has_no_hash(tokens, hashes):
    assert len(block_hashes(IDS[:tokens], SALT)) == hashes


def test_a_larger_block_has_the_name_of_its_last_hash():
    assert block_hashes(IDS, SALT, 128) == block_hashes(IDS, SALT)[1::2]
    assert len(block_hashes(IDS, SALT, 128)) == 2


def test_workers_report_what_routers_look_up():
    assert [at for at in range(300) if is_looked_up(at)] == list(positions(300))


def test_the_hash_is_the_same_in_every_process_and_release():
    ids = [*range(2 * HASH_TOKENS - 1), 2**32 - 1]
    assert [digest.hex() for digest in block_hashes(ids, b"salt")] == HASHES


def test_a_ticket_is_one_attempt_at_one_request():
    assert ticket_id_of(("request", 2)) == "request#2"


def test_the_seed_depends_on_model_request_attempt_and_reservation():
    seeds = {
        ticket_seed(compatibility, ticket_id, generation)
        for compatibility in (b"one", b"two")
        for ticket_id in ("a#0", "a#1", "b#0")
        for generation in (1, 2)
    }
    assert len(seeds) == 12


def checksum(data, seed, index, piece):
    """Of a tile that is one run."""
    return digest(memoryview(data), 1, [(0, len(data))], tile_seed(seed, index, piece))


def test_the_checksum_depends_on_bytes_seed_index_and_piece():
    data = memoryview(bytes(range(256)))
    flipped = bytearray(data)
    flipped[100] ^= 1
    sums = {
        checksum(data, 7, 0, 0),
        checksum(data, 7, 1, 0),
        checksum(data, 7, 0, 1),
        checksum(data, 7, 0, -1),
        checksum(data, 8000, 0, 0),
        checksum(flipped, 7, 0, 0),
    }
    assert len(sums) == 6


def test_every_place_in_a_ticket_has_a_checksum_of_its_own():
    """Right bytes in the wrong place are wrong bytes: 40 tiles of 8 pieces, and of all pieces."""
    data = memoryview(bytes(range(256)))
    sums = {checksum(data, 7, i, piece) for i in range(40) for piece in range(-1, 8)}
    assert len(sums) == 40 * 9


@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("borders", [[], [1], [4, 8], [3, 5, 15]])
def test_how_the_bytes_of_a_tile_lie_in_runs_does_not_matter(unit, borders):
    data = memoryview(random.Random(3).randbytes(16 * unit))
    runs = [(a, b - a) for a, b in itertools.pairwise([0, *borders, 16])]
    assert digest(data, unit, runs, 7) == digest(data, unit, [(0, 16)], 7)


def test_runs_in_another_order_are_other_bytes():
    data = memoryview(b"onetwo")
    assert digest(data, 3, [(0, 1), (1, 1)], 7) != digest(data, 3, [(1, 1), (0, 1)], 7)


def test_only_the_bytes_of_the_runs_count():
    one, two = memoryview(b"..one.."), memoryview(b"##one##")
    assert digest(one, 1, [(2, 3)], 7) == digest(two, 1, [(2, 3)], 7)


def test_a_block_of_zeros_does_not_pass_for_another_one():
    """A write that never happened leaves zeros: they must not verify as block 0 of any ticket."""
    zeros = memoryview(bytes(4096))
    real = memoryview(random.Random(2).randbytes(4096))
    assert checksum(zeros, 7, 0, 0) != checksum(real, 7, 0, 0)
    assert checksum(zeros, 7, 0, 0) != 0


def test_the_largest_seed_wraps_instead_of_failing():
    data = memoryview(b"data")
    assert checksum(data, 2**64 - 1, 0, 1) == checksum(data, 0, 0, 0)
