"""The report of a bench run, as one JSON object."""

from collections.abc import Sequence
from typing import Any

from outrider.bench.machine import describe_git, describe_machine
from outrider.bench.runner import SystemRun
from outrider.bench.summary import of_best_fixed, ratios, summarise


def build_report(
    runs: Sequence[SystemRun],
    *,
    models: dict[str, Any],
    settings: dict[str, Any],
    command: str,
) -> dict[str, Any]:
    """`models` names what was served, `settings` what was asked for, `command` how to repeat it."""
    plain = next((run for run in runs if run.system == "plain"), None)
    summaries = [summarise(run, plain) for run in runs]
    return {
        "runs": summaries,
        "ratios": ratios(summaries),
        "of_best_fixed": of_best_fixed(summaries),
        "models": models,
        "settings": settings,
        "machine": describe_machine(),
        "command": command,
        "git": describe_git(),
    }
