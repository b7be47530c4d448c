"""The metrics of connections to workers, summed over each tier (addresses come and go), and of what
drafts prepare for whoever asks them."""

from collections.abc import Callable, Iterable, Mapping

from outrider.remote.link import WorkerLink
from outrider.remote.outcomes import BufferUse
from outrider.telemetry.metrics import Metrics, Sample, Summed

Links = Callable[[], Iterable[WorkerLink]]


def watch_links(metrics: Metrics, tiers: Mapping[str, Links]) -> None:
    """Tell of the links that these functions give, by tier; they are called from any thread."""

    def observe(name: str, value: Callable[[str, Iterable[WorkerLink]], int]) -> None:
        def read() -> list[Sample]:
            return [(value(tier, links()), {"tier": tier}) for tier, links in tiers.items()]

        metrics.observe(name, read)

    def total(count: Callable[[WorkerLink], int]) -> Callable[[str, Iterable[WorkerLink]], int]:
        sums = {tier: Summed(count) for tier in tiers}
        return lambda tier, links: sums[tier].over(links)

    observe("outrider.links.up", lambda _, links: sum(link.up for link in links))
    observe("outrider.links.waiting", lambda _, links: sum(link.num_awaited for link in links))
    observe("outrider.links.losses", total(lambda link: link.counters.reconnects))
    observe("outrider.links.late_replies", total(lambda link: link.counters.late_replies))


def watch_buffers(metrics: Metrics, uses: Callable[[], Mapping[str, BufferUse]]) -> None:
    """Tell what becomes of outcomes that drafts prepare, by served model."""

    def observe(name: str, counts: Callable[[BufferUse], tuple[int, int]]) -> None:
        def read() -> list[Sample]:
            return [
                (count, {"model": model, "result": result})
                for model, use in uses().items()
                for count, result in zip(counts(use), ("used", "unused"), strict=True)
            ]

        metrics.observe(name, read)

    observe("outrider.buffer.outcomes", lambda use: (use.outcomes_used, use.outcomes_unused))
    observe("outrider.buffer.guesses", lambda use: (use.guesses_used, use.guesses_unused))
