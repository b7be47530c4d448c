"""Rounds of a run as a trace, which `outrider simulate` replays."""

from pathlib import Path

from outrider.bench.runner import SystemRun
from outrider.bench.systems import RequestResult
from outrider.speculation.traces import TracedRound, TracedSession, write


def record(path: Path, run: SystemRun) -> None:
    """Write the rounds of each answer; what they cost is fitted from them when they are read."""
    ahead = any(report.hit is not None for result in run.results for report in result.rounds)
    header = {"mode": "pipelined" if ahead else "sequential"}
    write(path, header, traced(run))


def traced(run: SystemRun) -> list[TracedSession]:
    """The rounds of each answer, where these were reported."""
    return [_session(result) for result in run.results]


def _session(result: RequestResult) -> TracedSession:
    rounds = tuple(
        TracedRound(
            proposed=report.proposed,
            accepted=report.accepted,
            draft_us=report.draft_us,
            verify_us=report.verify_us,
            round_us=report.round_us,
            batch_rows=report.batch_rows,
            context_len=report.context_len,
            hit=report.hit,
            proposal_us=report.proposal_us,
        )
        for report in result.rounds
    )
    return TracedSession(result.prompt_id, result.category, rounds)
