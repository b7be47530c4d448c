"""The software in this image, as a CycloneDX 1.6 bill of materials on stdout.

Run inside of the image by its Dockerfile: what is listed are the Python distributions of the
interpreter that runs this, and the packages of Debian.
"""

import argparse
import json
import re
import subprocess
import sys
import uuid
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

DPKG = "${binary:Package}\t${Version}\t${Architecture}\t${db:Status-Status}\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--version", required=True)
    args = parser.parse_args()
    components = [*python_components(), *debian_components()]
    json.dump(bill(args.name, args.version, components), sys.stdout, indent=1)


def bill(name: str, version: str, components: list[dict]) -> dict:
    """The same contents have the same serial number, so that images can be built alike."""
    content = json.dumps([name, version, components], sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, content)}",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": name, "version": version}},
        "components": components,
    }


def python_components() -> list[dict]:
    found = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        purl = f"pkg:pypi/{quote(name)}@{quote(distribution.version)}"
        found[purl] = component(name, distribution.version, purl) | licence(distribution)
    return [found[purl] for purl in sorted(found)]


def licence(distribution: metadata.Distribution) -> dict:
    expression = distribution.metadata.get("License-Expression")
    if expression:
        return {"licenses": [{"expression": expression}]}
    text = (distribution.metadata.get("License") or "").strip()
    # Some put the whole text of their licence here.
    return {"licenses": [{"license": {"name": text}}]} if text and len(text) < 80 else {}


def debian_components() -> list[dict]:
    if not Path("/var/lib/dpkg").is_dir():
        return []
    listing = subprocess.run(
        ["dpkg-query", "-W", "-f", DPKG], check=True, capture_output=True, text=True
    ).stdout
    found = []
    for line in sorted(listing.splitlines()):
        name, version, architecture, status = line.split("\t")
        if status == "installed":
            name = name.partition(":")[0]
            purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}"
            found.append(component(name, version, purl))
    return found


def component(name: str, version: str, purl: str) -> dict:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


if __name__ == "__main__":
    main()
