"""Known vulnerabilities of what is installed and of what images are locked to, as OSV knows them
(osv.dev, which has PyPI's advisories): `python dependencies/audit.py`.

All packages are asked for in one call. An answer counts only where the service names what is known
of a version that has vulnerabilities for certain: a mirror that knows nothing finds nothing.
Without such an answer the audit says that it was skipped, and passes; with --required it fails.
What policy.toml accepts, with its reason, is no fault as long as it is there.
"""

import argparse
import json
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from check import HERE, installed, locked
from packaging.utils import canonicalize_name

SERVICE = "https://api.osv.dev"
_TIMEOUT_S = 10.0
_BATCH = 1000
_MAX_BYTES = 16 << 20
_MAX_PAGES = 20


class Unanswered(Exception):
    """The service cannot be reached, or knows nothing."""


class Pinned(NamedTuple):
    """A version of a package."""

    name: str
    version: str


CONTROL = Pinned("jinja2", "2.4.1")
"""Vulnerable since 2014: whoever knows nothing of it does not answer."""


@dataclass(frozen=True)
class Advisory:
    """One vulnerability; `names` are all that it is known by."""

    id: str
    names: frozenset[str]
    summary: str
    fixed: tuple[str, ...]
    """Versions of the package that have it no more."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--required", action="store_true", help="fail where nobody answers")
    parser.add_argument("--service", default=SERVICE, help="who is asked, as osv.dev answers")
    args = parser.parse_args()
    if not args.service.startswith(("https://", "http://")):
        parser.error("--service is an http or https URL")
    where = versions_in_use()
    try:
        found = look_up(args.service, list(where))
    except Unanswered as error:
        outcome = "FAILED" if args.required else "SKIPPED, no network to ask on"
        print(f"vulnerabilities: {outcome}: {error}", file=sys.stderr)
        return 1 if args.required else 0
    accepted = tomllib.loads((HERE / "policy.toml").read_text()).get("accepted", [])
    faults = list(judge(found, where, accepted))
    for fault in faults:
        print(f"vulnerabilities: {fault}", file=sys.stderr)
    if not faults:
        print(f"vulnerabilities: none known in {len(where)} versions, by {args.service}")
    return 1 if faults else 0


def versions_in_use(root: Path = HERE.parent) -> dict[Pinned, str]:
    """All that is installed here or locked for an image, but the project itself; and where."""
    lists = {"installed": list(installed().items())}
    for path in sorted((root / "docker" / "locks").glob("*.txt")):
        lists[path.name] = locked(path.read_text())
    found: dict[Pinned, list[str]] = {}
    for where, versions in lists.items():
        for name, version in versions:
            # A build of our own choice (2.13.0+cpu) is that version.
            found.setdefault(Pinned(name, version.partition("+")[0]), []).append(where)
    return {
        pinned: ", ".join(where) for pinned, where in found.items() if pinned.name != "outrider"
    }


def look_up(service: str, pinned: Sequence[Pinned]) -> dict[Pinned, list[Advisory]]:
    """What is known of each version that something is known of. Raises Unanswered."""
    ids = _ids(service, [CONTROL, *pinned])
    if not ids.pop(CONTROL, None):
        raise Unanswered(f"{service} knows nothing of {CONTROL.name} {CONTROL.version}")
    distinct = set().union(*ids.values())
    details = {id_: _ask(f"{service}/v1/vulns/{quote(id_)}") for id_ in sorted(distinct)}
    try:
        return {
            key: [
                _advisory(details[id_], key.name)
                for id_ in sorted(known)
                if not details[id_].get("withdrawn")
            ]
            for key, known in ids.items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise Unanswered(f"{service} answers what makes no sense: {error!r}") from None


def judge(
    found: Mapping[Pinned, Sequence[Advisory]],
    where: Mapping[Pinned, str],
    accepted: Iterable[Mapping[str, str]],
) -> Iterator[str]:
    """A line for each vulnerability that is not accepted, and each acceptance of what is not
    there."""
    reasons = {(canonicalize_name(a["package"]), a["id"]): a["reason"] for a in accepted}
    used = set()
    for pinned, advisories in sorted(found.items()):
        for advisory in advisories:
            keys = {(pinned.name, name) for name in advisory.names} & reasons.keys()
            used |= keys
            if not keys:
                names = ", ".join(sorted(advisory.names))
                fixed = f"fixed in {', '.join(advisory.fixed)}" if advisory.fixed else "not fixed"
                place = where.get(pinned, "")
                yield (
                    f"{pinned.name} {pinned.version} ({place}): {names}: {advisory.summary} "
                    f"({fixed})"
                )
    for package, id_ in sorted(reasons.keys() - used):
        yield f"policy.toml accepts {id_} of {package}, which is not there (any more)"


def _ids(service: str, pinned: Sequence[Pinned]) -> dict[Pinned, set[str]]:
    """Ids of advisories; versions without any are left out."""
    found: dict[Pinned, set[str]] = {}
    waiting = [(key, "") for key in pinned]
    for _ in range(_MAX_PAGES):
        if not waiting:
            return found
        batch, waiting = waiting[:_BATCH], waiting[_BATCH:]
        answer = _ask(f"{service}/v1/querybatch", {"queries": [_query(*each) for each in batch]})
        try:
            results = answer["results"]
            for (key, _page), result in zip(batch, results, strict=True):
                ids = {vulnerability["id"] for vulnerability in result.get("vulns") or ()}
                if ids:
                    found.setdefault(key, set()).update(ids)
                if result.get("next_page_token"):
                    waiting.append((key, str(result["next_page_token"])))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise Unanswered(f"{service} answers what makes no sense: {error!r}") from None
    raise Unanswered(f"{service} has no end")


def _query(pinned: Pinned, page: str) -> dict[str, Any]:
    query = {"package": {"name": pinned.name, "ecosystem": "PyPI"}, "version": pinned.version}
    return query | ({"page_token": page} if page else {})


def _advisory(record: Mapping[str, Any], package: str) -> Advisory:
    fixed = {
        event["fixed"]
        for affected in record.get("affected", ())
        if canonicalize_name(affected.get("package", {}).get("name", "")) == package
        for part in affected.get("ranges", ())
        if part.get("type") == "ECOSYSTEM"
        for event in part.get("events", ())
        if "fixed" in event
    }
    names = frozenset({record["id"], *record.get("aliases", ())})
    summary = str(record.get("summary") or record.get("details") or "").partition("\n")[0][:120]
    return Advisory(record["id"], names, summary, tuple(sorted(fixed)))


def _ask(url: str, question: Mapping[str, Any] | None = None) -> Any:
    """Raises Unanswered."""
    data = json.dumps(question).encode() if question is not None else None
    headers = {"Content-Type": "application/json", "User-Agent": "outrider-audit"}
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            text = response.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise Unanswered(f"{url} answers with more than {_MAX_BYTES} bytes")
        answer = json.loads(text)
    except urllib.error.HTTPError as error:
        raise Unanswered(f"{url}: {error.code} {error.reason}") from None
    except (OSError, ValueError) as error:
        raise Unanswered(f"{url}: {getattr(error, 'reason', error)}") from None
    if not isinstance(answer, dict):
        raise Unanswered(f"{url} answers what makes no sense")
    return answer


if __name__ == "__main__":
    sys.exit(main())
