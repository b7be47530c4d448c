"""The chart's README: what it installs, the names that certificates need, and all values."""

import json
from typing import Any

from comments import Path
from schema import has_below

HEAD = """\
# Outrider's chart

Orchestrators, drafts and targets as tiers that scale apart, a session store, and what keeps them
apart from everything else. How to install, upgrade and run it: `docs/operations.md`.

| profile | what it is |
|---|---|
| `values.yaml` alone | the demo pair on CPUs: mTLS, a durable store, no operator needed |
| `values-demo.yaml` | the same on a laptop's cluster, which needs no operator at all |
| `values-gpu.yaml` | Llama 3.1 8B with drafts of 1B, a GPU a pod, scaled by KEDA |
| `values-70b.yaml` | Llama 3.1 70B in groups of two pods, with drafts of 1B |

## Names to certify

Supplied certificates (`tls.secrets`) have these DNS names, each followed by
`.NAMESPACE.svc.cluster.local`, RELEASE being the release's full name, and the extended key usages
server and client authentication:

| tier | names |
|---|---|
| orchestrator | `RELEASE-orchestrator`, and all that callers use |
| draft | `RELEASE-workers`, `RELEASE-drafts`, `*.RELEASE-drafts` |
| target | `RELEASE-workers`, `RELEASE-targets`, `*.RELEASE-targets` |
| redis | `RELEASE-redis` |
| kvStore | `RELEASE-kvstore` |

With `tls.checkClientNames` the names `RELEASE-orchestrator` and `RELEASE-targets` also say who may
call a worker.

## Values

Made by `make chart` from the comments of `values.yaml`. What is not listed is refused.
"""


def readme(values: dict[str, Any], comments: dict[Path, str]) -> str:
    sections = [name for name in values if has_below(comments, (name,))]
    general = [_row(values[name], comments, (name,)) for name in values if name not in sections]
    lines = [HEAD, "### General\n", *_table(general)]
    for name in sections:
        lines += [f"\n### {name}\n", *_table(_rows(values[name], comments, (name,)))]
    return "\n".join(lines) + "\n"


def _table(rows: list[str]) -> list[str]:
    return ["| value | default | meaning |", "|---|---|---|", *rows]


def _rows(value: Any, comments: dict[Path, str], path: Path) -> list[str]:
    if not has_below(comments, path):
        return [_row(value, comments, path)]
    return [row for name in value for row in _rows(value[name], comments, (*path, name))]


def _row(value: Any, comments: dict[Path, str], path: Path) -> str:
    default = json.dumps(value, ensure_ascii=False)
    return f"| `{'.'.join(path)}` | `{_cell(default)}` | {_cell(comments[path])} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
