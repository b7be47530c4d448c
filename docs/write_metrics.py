"""Write the tables of docs/metrics.md: `python docs/write_metrics.py`. A test compares them."""

from pathlib import Path

from outrider.telemetry.catalog import markdown

PAGE = Path(__file__).with_name("metrics.md")
START, END = "<!-- written by docs/write_metrics.py -->\n", "<!-- end -->\n"


def written(page: str) -> str:
    """The page with the tables that the code has now."""
    head, _, rest = page.partition(START)
    _, _, tail = rest.partition(END)
    return head + START + "\n" + markdown() + "\n" + END + tail


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
