"""Makes what the chart holds that follows from something else: `python helm/build [--check]`.

values.schema.json     from values.yaml's comments, schema.py, and the services' settings
README.md              from values.yaml's comments
files/dashboard.json   from dashboard.py
files/*-rights         what orchestrators and workers need of their stores, from their code

With --check nothing is written; it fails where a file would change.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from comments import comments_of
from dashboard import dashboard
from outrider.kv_store.connection import READER_RIGHTS
from outrider.kv_store.connection import RIGHTS as KV_RIGHTS
from readme import readme
from schema import with_descriptions
from services.orchestrator.store_client import RIGHTS

CHART = Path(__file__).parents[1] / "outrider"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    comments = comments_of(text)
    schema = with_descriptions(comments, values)
    made: dict[str, Callable[[], str]] = {
        "values.schema.json": lambda: json.dumps(schema, indent=1, ensure_ascii=False) + "\n",
        "README.md": lambda: readme(values, comments),
        "files/dashboard.json": lambda: json.dumps(dashboard(), indent=1) + "\n",
        "files/redis-rights": lambda: f"~outrider:* resetchannels -@all {RIGHTS}\n",
        # INFO is for `outrider doctor`, which asks workers how their store is.
        "files/kvstore-rights": lambda: f"~outrider:kv:* resetchannels -@all {KV_RIGHTS} +info\n",
        "files/kvstore-orchestrator-rights": lambda: (
            f"~outrider:kv:* resetchannels -@all {READER_RIGHTS}\n"
        ),
    }
    stale = [name for name, make in made.items() if not write(CHART / name, make(), check=check)]
    if stale:
        sys.exit(f"not what helm/build makes: {', '.join(stale)}; run `make chart`")


def write(path: Path, text: str, *, check: bool) -> bool:
    """Whether the file holds the text, afterwards."""
    if not check:
        path.write_text(text, encoding="utf-8")
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    main()
