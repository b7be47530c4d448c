"""The offline check of dependencies notices what it is there to notice."""

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parents[2] / "dependencies"))
check = pytest.importorskip("check")

FIXED = [check.Fixed("some-package", Version("1.5"), ("CVE-1",))]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("some-package>=1.5", ""),
        ("Some_Package[extra]>=2,<3", ""),
        ("some-package==1.5.1", ""),
        ("some-package>=1.4", "before 1.5: CVE-1"),
        ("some-package==1.4.9", "before 1.5: CVE-1"),
        ("some-package<3", "no lower bound"),
        ("other", "no lower bound"),
        ("other>=0.1", ""),
    ],
)
def test_bounds(text, fault):
    found = list(check.check_bounds([Requirement(text)], FIXED))
    assert bool(found) == bool(fault) and fault in "".join(found)


def test_versions_installed_and_locked():
    text = (
        "# made by\nsome-package==1.4 ; python_version < '3.12' \\\n    --hash=sha256:00\n"
        "some-package==1.5 ; python_version >= '3.12'\nother[x]==2.0 ; extra == 'y'\n"
    )
    locked = check.locked(text)
    assert locked == [("some-package", "1.4"), ("some-package", "1.5"), ("other", "2.0")]
    assert list(check.check_versions(locked, FIXED, "in a.txt")) == [
        "some-package 1.4 is in a.txt: CVE-1"
    ]
    assert not list(check.check_versions([("some-package", "1.5")], FIXED, "installed"))
    assert check.installed()["pytest"] == pytest.__version__


@pytest.mark.parametrize(
    ("licence", "good"),
    [
        ("MIT", True),
        ("BSD-3-Clause AND MIT", True),
        ("Apache Software License", True),
        ("GPL-3.0-only", False),
        ("GNU Lesser General Public License v3 (LGPLv3)", False),
        ("MIT AND GPL-2.0", False),
        ("PERMITTED", False),
        ("", False),
    ],
)
def test_licences(licence, good):
    found = check.check_licences(["a"], ["MIT", "BSD", "Apache"], {}, lambda name: licence)
    assert (not list(found)) == good
    assert not list(check.check_licences(["a"], ["MIT"], {"a": "MIT"}, lambda name: licence))


def test_what_is_delivered_has_what_it_needs_in_turn_and_no_tools():
    project = {
        "dependencies": ["jinja2>=3"],
        "optional-dependencies": {"dev": ["pytest>=8"], "jwt": ["pyjwt[crypto]>=2"]},
    }
    names = check.delivered(project)
    assert {"jinja2", "markupsafe", "pyjwt", "cryptography"} <= names and "pytest" not in names
