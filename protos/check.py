"""Lint the protos, compare them with the last commit, and verify the generated code."""

import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from generate import ROOT, generate

GENERATED = ROOT.parent / "outrider" / "v1"


def main() -> None:
    buf("lint", str(ROOT))
    buf("format", "--diff", "--exit-code", str(ROOT))
    check_breaking()
    check_generated()


def buf(*arguments: str) -> None:
    program = shutil.which("buf", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    if program is None:
        sys.exit("buf is missing; run `make setup`")
    if subprocess.run([program, *arguments]).returncode != 0:
        sys.exit(f"buf {' '.join(arguments)} failed")


def check_breaking() -> None:
    """Against the last commit in which the protos differ from now, or HEAD."""
    base = last_other_commit()
    if base is None:
        print("protos: no earlier version to compare with")
        return
    with tempfile.TemporaryDirectory() as scratch:
        archive = subprocess.run(
            ["git", "archive", base, "protos"], cwd=ROOT.parent, check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", scratch], input=archive.stdout, check=True)
        buf("breaking", str(ROOT), "--against", str(Path(scratch, "protos")))
    print(f"protos: nothing breaks against {base[:12]}")


def last_other_commit() -> str | None:
    """The newest commit whose protos are not those of the working tree."""
    log = subprocess.run(
        ["git", "log", "--format=%H", "--", "protos/outrider"],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
    )
    for commit in log.stdout.split():
        same = subprocess.run(
            ["git", "diff", "--quiet", commit, "--", "protos/outrider"], cwd=ROOT.parent
        )
        if same.returncode != 0:
            return commit
    return None


def check_generated() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        generate(fresh)
        names = {path.name for path in fresh.iterdir()}
        committed = {path.name for path in GENERATED.glob("*_pb2*.py*")}
        _, different, missing = filecmp.cmpfiles(fresh, GENERATED, names, shallow=False)
        stale = sorted({*different, *missing, *(committed - names)})
    if stale:
        sys.exit(f"generated code is not that of the protos: {', '.join(stale)}; run `make proto`")
    print("protos: generated code is up to date")


if __name__ == "__main__":
    main()
