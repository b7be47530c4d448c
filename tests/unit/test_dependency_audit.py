"""The audit of dependencies asks, believes only who knows something, and says what it found."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "dependencies"))
audit = pytest.importorskip("audit")

OLD, NEW = audit.Pinned("some-package", "1.4"), audit.Pinned("some-package", "1.5")
ADVISORY = {
    "id": "PYSEC-1",
    "aliases": ["CVE-1", "GHSA-1"],
    "summary": "Reads what it should not.\nAt length.",
    "affected": [
        {
            "package": {"name": "Some_Package", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.5"}]}],
        },
        {
            "package": {"name": "another", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "9"}]}],
        },
    ],
}
RECORDS = {
    "PYSEC-1": ADVISORY,
    "PYSEC-0": {"id": "PYSEC-0"},
    "PYSEC-2": {"id": "PYSEC-2", "withdrawn": "2020-01-01T00:00:00Z"},
}


class Osv:
    """A service that answers as OSV does, from a table."""

    def __init__(self):
        self.known = {audit.CONTROL: [["PYSEC-0"]], OLD: [["PYSEC-2"], ["PYSEC-1"]]}
        """Ids by version, page by page."""
        self.status = 200
        self.raw = None
        """Said instead of an answer."""
        self.queries = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(RECORDS[self.path.rpartition("/")[2]])

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.queries += asked["queries"]
                self.answer({"results": [service.result(query) for query in asked["queries"]]})

            def answer(self, value):
                data = service.raw if service.raw is not None else json.dumps(value).encode()
                self.send_response(service.status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def result(self, query):
        assert query["package"]["ecosystem"] == "PyPI"
        pages = self.known.get(audit.Pinned(query["package"]["name"], query["version"]), [])
        if not pages:
            return {}
        page = int(query.get("page_token", 0))
        more = {"next_page_token": str(page + 1)} if page + 1 < len(pages) else {}
        return {"vulns": [{"id": id_, "modified": "x"} for id_ in pages[page]], **more}

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def osv():
    with Osv() as running:
        yield running


def run(monkeypatch, capsys, *arguments):
    """The exit status, and all that was said."""
    monkeypatch.setattr(sys, "argv", ["audit", *arguments])
    status = audit.main()
    said = capsys.readouterr()
    return status, said.out + said.err


def test_all_that_is_in_use_is_asked_for_and_nothing_is_found(osv, monkeypatch, capsys):
    status, said = run(monkeypatch, capsys, "--service", osv.url, "--required")
    assert status == 0 and "none known in" in said
    asked = {(query["package"]["name"], query["version"]) for query in osv.queries}
    assert ("pytest", pytest.__version__) in asked, "what is installed"
    for name in ("orchestrator", "worker", "cuda"):
        lock = (Path(__file__).parents[2] / f"docker/locks/{name}.txt").read_text()
        locked = audit.locked(lock)
        assert len(locked) > 10, name
        assert {(n, version.partition("+")[0]) for n, version in locked} <= asked, name
    assert not any("+" in version or name == "outrider" for name, version in asked)


def test_what_is_vulnerable_is_named_with_what_mends_it(osv, monkeypatch, capsys):
    monkeypatch.setattr(
        audit, "versions_in_use", lambda: {OLD: "installed, worker.txt", NEW: "cuda.txt"}
    )
    status, said = run(monkeypatch, capsys, "--service", osv.url)
    assert status == 1
    assert said.splitlines() == [
        "vulnerabilities: some-package 1.4 (installed, worker.txt): CVE-1, GHSA-1, PYSEC-1: "
        "Reads what it should not. (fixed in 1.5)"
    ], "and none that was withdrawn, or is another package's"


def test_who_knows_nothing_of_a_known_vulnerability_does_not_count(osv, monkeypatch, capsys):
    del osv.known[audit.CONTROL]
    for arguments, expected, word in (((), 0, "SKIPPED"), (("--required",), 1, "FAILED")):
        status, said = run(monkeypatch, capsys, "--service", osv.url, *arguments)
        assert (status, word in said) == (expected, True)
        assert "knows nothing of jinja2" in said and "none known" not in said


@pytest.mark.parametrize(
    ("status", "raw"),
    [
        (404, b"{}"),
        (503, b""),
        (200, b"<html>"),
        (200, b"[]"),
        (200, b"{}"),
        (200, b'{"results": [1]}'),
    ],
)
def test_no_answer_is_not_a_good_answer_and_none_that_makes_sense_is_no_answer(
    osv, monkeypatch, capsys, status, raw
):
    osv.status, osv.raw = status, raw
    assert run(monkeypatch, capsys, "--service", osv.url, "--required")[0] == 1
    skipped, said = run(monkeypatch, capsys, "--service", osv.url)
    assert skipped == 0 and "SKIPPED" in said and "none known" not in said


def test_without_a_network_it_says_so_and_passes(monkeypatch, capsys):
    with Osv() as osv:
        pass  # Nobody is there any more.
    status, said = run(monkeypatch, capsys, "--service", osv.url)
    assert status == 0 and "SKIPPED, no network to ask on" in said


def test_what_is_accepted_is_no_fault_for_as_long_as_it_is_there():
    found, where = {OLD: [audit._advisory(ADVISORY, "some-package")]}, {OLD: "installed"}
    entry = {"package": "Some_Package", "reason": "we do not call it"}
    for id_ in ("CVE-1", "PYSEC-1"):
        assert not list(audit.judge(found, where, [entry | {"id": id_}]))
    of_another = entry | {"package": "another", "id": "CVE-1"}
    fault, unused = audit.judge(found, where, [of_another])
    assert "some-package 1.4" in fault and "CVE-1 of another" in unused
    [gone] = audit.judge({}, where, [entry | {"id": "CVE-1"}])
    assert "not there (any more)" in gone
