"""docs/security.md claims nothing that no test shows."""

import re
from pathlib import Path

from outrider.rpc.server import ServerConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()


def test_every_test_that_the_page_names_exists():
    named = set(re.findall(r"`(test_\w+)`", PAGE)) - {"test_security_page"}
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    missing = {name for name in named if not re.search(rf"def {name}\(", sources)}
    assert len(named) > 50 and not missing


def test_every_defence_names_one():
    section = PAGE.partition("## What somebody bad could do")[2].partition("\n## ")[0]
    claims = [line for line in section.splitlines() if line.startswith(("- ", "**"))]
    bare = [line for line in claims if "`test_" not in line and not line.endswith("**")]
    assert len(claims) > 12 and not bare


def test_every_setting_that_the_page_names_exists():
    table = PAGE.partition("## Settings")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", table)) - {"ca", "cert", "key", "token_file", "jwt"}
    named -= {name for name in named if name.startswith(("test_", "OUTRIDER_"))}
    fields = set(ServerConfig.__dataclass_fields__)
    assert len(named) > 15 and named <= fields, named - fields
    secure = {name for name in fields if name.startswith(("tls_", "jwt_", "auth_", "audit"))}
    assert secure <= named
