"""The metrics that only a draft has."""

from outrider.telemetry.metrics import Metrics, Sample
from services.draft.drafter import DraftWork


def watch_drafter(metrics: Metrics, made: DraftWork, *, model: str) -> None:
    """Tell what a draft makes."""

    def by_use(chains: int, outcomes: int) -> list[Sample]:
        return [
            (chains, {"model": model, "for": "chain"}),
            (outcomes, {"model": model, "for": "outcome"}),
        ]

    metrics.observe("outrider.draft.proposals", lambda: by_use(made.proposals, made.outcomes))
    metrics.observe("outrider.draft.guesses", lambda: by_use(made.guesses, made.outcome_guesses))
