"""What can be said of the dependencies without a network: `python dependencies/check.py`.

Every requirement has a lower bound that admits no version with a vulnerability named in
policy.toml; nothing older than these is installed or locked for an image; and all that is
delivered, with what it needs in turn, is under a licence that policy.toml allows. New
vulnerabilities are not found here: audit.py asks for those.
"""

import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HERE = Path(__file__).parent
NOT_DELIVERED = ("dev", "load")
"""Extras that are for working on the project."""


@dataclass(frozen=True)
class Fixed:
    """A version from which on vulnerabilities are fixed."""

    package: str
    version: Version
    ids: tuple[str, ...]


def main() -> int:
    policy = tomllib.loads((HERE / "policy.toml").read_text())
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    fixed = [
        Fixed(canonicalize_name(entry["package"]), Version(entry["version"]), tuple(entry["ids"]))
        for entry in policy["fixed"]
    ]
    faults = [
        *check_bounds(requirements(project), fixed),
        *check_versions(installed().items(), fixed, "installed"),
        *check_licences(
            delivered(project), policy["licences"], policy["known_licences"], licence_of
        ),
    ]
    for path in sorted((HERE.parent / "docker" / "locks").glob("*.txt")):
        faults += check_versions(locked(path.read_text()), fixed, f"in {path.name}")
    for fault in faults:
        print(f"dependencies: {fault}", file=sys.stderr)
    if not faults:
        print(f"dependencies: bounds, {len(fixed)} fixed versions and licences are in order")
    return 1 if faults else 0


def requirements(project: Mapping[str, Any]) -> list[Requirement]:
    """All that pyproject.toml names, of all extras, but for the project itself."""
    texts = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        texts += extra
    found = (Requirement(text) for text in texts)
    return [requirement for requirement in found if requirement.name != project["name"]]


def check_bounds(found: Iterable[Requirement], fixed: Iterable[Fixed]) -> Iterator[str]:
    """Requirements without a lower bound, or with one below a fixed version."""
    least = {entry.package: entry for entry in fixed}
    for requirement in found:
        bounds = [
            Version(bound.version)
            for bound in requirement.specifier
            if bound.operator in (">=", "==", "~=", ">")
        ]
        if not bounds:
            yield f"{requirement} has no lower bound"
            continue
        entry = least.get(canonicalize_name(requirement.name))
        if entry and max(bounds) < entry.version:
            yield f"{requirement} admits versions before {entry.version}: {', '.join(entry.ids)}"


def check_versions(
    versions: Iterable[tuple[str, str]], fixed: Iterable[Fixed], where: str
) -> Iterator[str]:
    """Packages that are older than a fixed version."""
    least = {entry.package: entry for entry in fixed}
    for package, version in versions:
        entry = least.get(package)
        if entry and Version(version) < entry.version:
            yield f"{package} {version} is {where}: {', '.join(entry.ids)}"


def installed() -> dict[str, str]:
    """Versions of what is installed here, by name."""
    return {canonicalize_name(dist.name): dist.version for dist in metadata.distributions()}


def locked(text: str) -> list[tuple[str, str]]:
    """Names and versions in a list of pinned requirements; a package has one for each Python or
    platform that needs its own."""
    found = []
    for line in text.splitlines():
        name, pinned, rest = line.partition("==")
        if pinned and not line.startswith(("#", " ")):
            package = canonicalize_name(name.partition("[")[0].strip())
            found.append((package, rest.split()[0].rstrip(";\\")))
    return found


def delivered(project: Mapping[str, Any]) -> set[str]:
    """Names of all that is installed here and is part of what is delivered, directly or not."""
    extras = set(project["optional-dependencies"]) - set(NOT_DELIVERED)
    texts = [*project["dependencies"]]
    for extra in sorted(extras):
        texts += project["optional-dependencies"][extra]
    waiting = [named for named in map(Requirement, texts) if _applies(named, frozenset())]
    seen: set[tuple[str, frozenset[str]]] = set()
    names = set()
    while waiting:
        requirement = waiting.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            needs = metadata.requires(requirement.name) or []
        except metadata.PackageNotFoundError:
            continue  # Not on this machine: another platform's, or an extra that is not here.
        names.add(key[0])
        waiting += [n for n in map(Requirement, needs) if _applies(n, key[1])]
    return names


def _applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({"extra": extra}) for extra in extras or {""})


def check_licences(
    names: Iterable[str],
    allowed: Iterable[str],
    known: Mapping[str, str],
    licence_of: Callable[[str], str],
) -> Iterator[str]:
    """Packages whose licence is not an allowed one, or cannot be told."""
    good = re.compile(r"\b(" + "|".join(map(re.escape, allowed)) + r")\b", re.IGNORECASE)
    for name in sorted(names):
        text = known.get(name) or licence_of(name)
        if not good.search(text) or "GPL" in text:
            yield f"{name} has a licence that policy.toml does not allow: {text!r}"


def licence_of(name: str) -> str:
    """What a package's metadata say of its licence."""
    fields = metadata.metadata(name)
    expression = fields.get("License-Expression")
    classifiers = [
        value.rpartition("::")[2].strip()
        for value in fields.get_all("Classifier", [])
        if value.startswith("License ::")
    ]
    return str(expression or "; ".join(classifiers) or fields.get("License", ""))[:200]


if __name__ == "__main__":
    sys.exit(main())
