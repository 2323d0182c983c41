"""What the router hears of a worker: everything once, then only what changed."""

from __future__ import annotations

from dataclasses import replace

from diptych.cluster.worker.reporting import TierLoads, WorkerReporter
from diptych.engine.commands import EngineObservation
from diptych.protos.frames import WorkerCard

CARD = WorkerCard("decode/x", "decode", "decode", "127.0.0.1:1", "x", 7)
OBSERVATION = EngineObservation([b"a"], [], [], 100, 50, 0.5, decode_steps=4, decode_s=0.2)


def introduced() -> WorkerReporter:
    reporter = WorkerReporter()
    joining = reporter.joining(OBSERVATION, CARD, 3, [("r", 0, 2)])
    assert (joining.term, joining.cached_hashes) == (3, [b"a"])
    assert joining.held_reservations == [("r", 0, 2)]
    return reporter


def test_the_first_words_are_an_introduction() -> None:
    reporter = WorkerReporter()
    assert reporter.must_join
    reporter.joining(OBSERVATION, CARD, 0, [])
    assert not reporter.must_join


def test_nothing_is_said_when_nothing_changed() -> None:
    assert introduced().report(OBSERVATION, []) is None


def test_a_report_holds_the_difference_to_the_last_observation() -> None:
    reporter = introduced()
    later = replace(
        OBSERVATION, prefill_tokens=70, prefill_s=0.75, decode_steps=9, decode_s=0.45, step_s=0.05
    )
    report = reporter.report(later, [("r", 0)])
    assert report is not None
    assert (report.prefill_tokens, report.steps, report.seq) == (20, 5, 1)
    assert (report.prefill_seconds, report.step_seconds) == (0.25, 0.25)
    assert (report.step_ms, report.ended) == (50.0, [("r", 0)])


def test_a_change_of_the_load_alone_is_reported_too() -> None:
    reporter = introduced()
    for changed in ({"free_blocks": 99}, {"running_sequences": 1}, {"preempted_sequences": 1}):
        report = reporter.report(replace(OBSERVATION, **changed), [])
        assert report is not None, changed
        assert reporter.report(replace(OBSERVATION, **changed), []) is None


def test_reports_are_counted_from_each_introduction_on() -> None:
    reporter = introduced()
    numbers = []
    for tokens in (60, 70):
        report = reporter.report(replace(OBSERVATION, prefill_tokens=tokens), [])
        numbers.append(report and report.seq)
    assert numbers == [1, 2]
    reporter.introduce_again()
    assert reporter.must_join
    reporter.joining(OBSERVATION, CARD, 0, [])
    report = reporter.report(replace(OBSERVATION, prefill_tokens=80), [])
    assert report is not None and report.seq == 1


def test_what_only_the_tiers_hold_is_introduced_and_reported() -> None:
    reporter = WorkerReporter()
    held = replace(OBSERVATION, demoted_hashes=[b"b"], demoted=[b"b"])
    assert reporter.joining(held, CARD, 3, []).demoted_hashes == [b"b"]
    later = replace(OBSERVATION, demoted_hashes=[b"b", b"a"], demoted=[b"a"])
    report = reporter.report(later, [])
    assert report is not None and report.demoted == [b"a"]


def test_loads_are_reported_as_the_difference_to_the_last_report() -> None:
    reporter = introduced()
    assert reporter.report(OBSERVATION, [], TierLoads(64, 0.5)) is None, "later, with other news"
    changed = replace(OBSERVATION, free_blocks=99)
    report = reporter.report(changed, [], TierLoads(128, 0.75))
    assert report is not None and (report.loaded_tokens, report.loading_seconds) == (128, 0.75)
    report = reporter.report(OBSERVATION, [], TierLoads(192, 1.0))
    assert report is not None and (report.loaded_tokens, report.loading_seconds) == (64, 0.25)
