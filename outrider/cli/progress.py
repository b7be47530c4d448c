"""What the user sees of a stack that starts, fails and stops; on stderr."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from outrider.cli.stack import Service, StackEvent, Step

_MARKS = {
    Step.SERVING: ("✓", "green"),
    Step.DIED: ("✗", "red"),
    Step.STOPPED: ("✓", "green"),
    Step.KILLED: ("✗", "yellow"),
}
_BUSY = {Step.STARTING: "starting", Step.STOPPING: "draining"}


class StackProgress:
    """A line a process, with a spinner while it starts or drains; plain lines without a terminal.

    `quiet` shows failures only. Give `on_event` to the stack; live lines show inside `with`.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._rows: dict[str, StackEvent] = {}
        self._spinners: dict[str, Spinner] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._rows.clear()
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=8,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def on_event(self, event: StackEvent) -> None:
        self._rows[event.name] = event
        if event.step is Step.DIED:
            self._console.print(Text(f"✗ {event.message}", style="red"))
            show_log(self._console, event.detail)
        elif self._live is None and not self._quiet and event.step in _MARKS:
            self._console.print(self._line(event))

    def _line(self, event: StackEvent) -> Text:
        mark, style = _MARKS[event.step]
        line = Text(f"{mark} ", style=style)
        return line.append(f"{event.name} {event.step.value} {event.message}".rstrip(), "default")

    def _render(self) -> Table:
        grid = Table.grid()
        for name, event in self._rows.items():
            if event.step in _MARKS:
                grid.add_row(self._line(event))
            else:
                spinner = self._spinners.setdefault(name, Spinner("dots"))
                spinner.update(text=f"{name} {_BUSY[event.step]}")
                grid.add_row(spinner)
        return grid


def show_log(console: Console, tail: str) -> None:
    """The last lines of a log, set apart."""
    for line in tail.splitlines():
        console.print(Text(f"  │ {line}", style="dim"), soft_wrap=True)


def services_table(services: tuple[Service, ...]) -> Table:
    """What runs where."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("process", "model", "address", "pid", "dtype", "device"):
        table.add_column(title, overflow="fold")
    for service in services:
        told = (str(service.info.get(key, "")) for key in ("model", "dtype", "device"))
        model, dtype, device = told
        table.add_row(service.name, model, service.address, str(service.pid), dtype, device)
    return table
