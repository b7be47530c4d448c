"""A trace to try the simulator with, made from measured figures instead of recorded rounds."""

import random

from outrider.speculation.processes import constant
from outrider.speculation.traces import Trace, TracedRound, TracedSession

ACCEPTANCE = {
    "mt_bench": 0.58,
    "math": 0.64,
    "qa": 0.54,
    "translation": 0.56,
    "summarization": 0.31,
    "rag": 0.22,
}
"""Greedy agreement of SmolLM2-135M with its v0 draft on Spec-Bench."""

COST_LINES = {
    "verify": {"base": 0.0144, "slope": 0.00057},
    "draft": {"base": 0.0001, "slope": 0.00136, "other_slope": 0.00013},
    "plain_trip": {"base": 0.0011},
    "guess_trip": {"base": 0.0020},
    "context": {"base": 1.7e-6},
    "prompt": {"base": 0.0012},
}
"""The same pair on two CPU cores, in seconds, and what orchestrator and gRPC add to a round."""


def demo_trace(
    *, sessions_per_category: int = 4, num_tokens: int = 200, k: int = 4, seed: int = 0
) -> Trace:
    """Rounds of k guesses, each accepted with its category's rate."""
    rng = random.Random(seed)
    sessions = []
    for number in range(sessions_per_category):
        for category, rate in ACCEPTANCE.items():
            process = constant(rate, num_tokens)
            rounds, emitted = [], 0
            while emitted < num_tokens:
                accepted = process.draw(emitted, k, rng)
                rounds.append(TracedRound(k, accepted))
                emitted += accepted + 1
            sessions.append(TracedSession(f"{category}-{number}", category, tuple(rounds)))
    return Trace("sequential", COST_LINES, tuple(sessions))
