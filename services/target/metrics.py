"""The metrics that only a target has."""

from outrider.telemetry.metrics import Metrics, Sample
from services.target.speculation import BufferUse


def watch_buffer(metrics: Metrics, use: BufferUse, *, model: str) -> None:
    """Tell what becomes of what drafts prepare for this target."""

    def by_result(used: int, unused: int) -> list[Sample]:
        return [
            (used, {"model": model, "result": "used"}),
            (unused, {"model": model, "result": "unused"}),
        ]

    metrics.observe(
        "outrider.buffer.outcomes", lambda: by_result(use.outcomes_used, use.outcomes_unused)
    )
    metrics.observe(
        "outrider.buffer.guesses", lambda: by_result(use.guesses_used, use.guesses_unused)
    )
