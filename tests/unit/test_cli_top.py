"""`outrider top`: figures from two scrapes of real HTTP endpoints."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from outrider.cli import top_view
from outrider.cli.__main__ import main
from outrider.cli.scrape import Scrape, addresses_of, parse, scrape
from outrider.errors import InvalidArgument
from outrider.telemetry.catalog import prometheus_names

pytest.importorskip("prometheus_client")

ORCHESTRATOR = """
# TYPE outrider_rounds_total counter
outrider_rounds_total{{model="m",proposer="draft"}} {rounds}
# TYPE outrider_round_tokens_total counter
outrider_round_tokens_total{{model="m",proposer="draft",source="accepted"}} {accepted}
outrider_round_tokens_total{{model="m",proposer="draft",source="recovered"}} {rounds}
# TYPE outrider_guesses_proposed_total counter
outrider_guesses_proposed_total{{model="m",proposer="draft",position="0"}} {rounds}
outrider_guesses_proposed_total{{model="m",proposer="draft",position="1"}} {rounds}
# TYPE outrider_guesses_accepted_total counter
outrider_guesses_accepted_total{{model="m",proposer="draft",position="0"}} {accepted}
# TYPE outrider_controller_decisions_total counter
outrider_controller_decisions_total{{model="m",proposer="draft",k="0"}} {accepted}
outrider_controller_decisions_total{{model="m",proposer="draft",k="3"}} {rounds}
outrider_controller_decisions_total{{model="m",proposer="draft",k="16"}} 7
# TYPE outrider_streams gauge
outrider_streams 3
"""
WORKER = """
# TYPE outrider_pass_rows_limit gauge
outrider_pass_rows_limit{tier="target",model="m"} 512
# TYPE outrider_kv_blocks gauge
outrider_kv_blocks{tier="target",model="m",state="used"} 25
outrider_kv_blocks{tier="target",model="m",state="free"} 75
"""
PREFIXES = """
# TYPE outrider_prefix_tokens_total counter
outrider_prefix_tokens_total{{tier="target",model="m",result="shared"}} {shared}
outrider_prefix_tokens_total{{tier="target",model="m",result="computed"}} {computed}
"""
STORE = """
# TYPE outrider_kv_store_up gauge
outrider_kv_store_up{{tier="target",model="m"}} {up}
# TYPE outrider_kv_store_blocks_total counter
outrider_kv_store_blocks_total{{tier="target",model="m",result="written"}} {written}
# TYPE outrider_kv_store_restores_total counter
outrider_kv_store_restores_total{{tier="target",model="m",result="declined"}} 7
"""


def orchestrator(rounds, accepted):
    return ORCHESTRATOR.format(rounds=rounds, accepted=accepted)


@pytest.fixture
def endpoint():
    """Serves one text after the other, the last one for ever; its address."""
    servers = []

    def start(*texts):
        left = list(texts)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = (left.pop(0) if len(left) > 1 else left[0]).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def scraped(text, at, address="a"):
    return Scrape(address, at, parse(text))


def test_figures_are_of_the_time_between_two_scrapes():
    before = [scraped(orchestrator(100, 80), 10.0), scraped(WORKER, 10.0, "b")]
    now = [scraped(orchestrator(300, 180), 15.0), scraped(WORKER, 15.0, "b")]
    found = top_view.summary(before, now)
    assert found["requests"]["tokens_per_s"] == (200 + 100) / 5
    assert found["requests"]["streams"] == 3
    speculation = found["speculation"]
    assert speculation["mean_acceptance_length"] == 1.5
    assert speculation["guesses_a_round"] == 2
    assert speculation["acceptance"] == 0.25
    assert speculation["acceptance_by_position"][:3] == [0.5, 0.0, None]
    assert speculation["buffer_hits"] is None
    assert speculation["k_chosen"] == {"0": 1 / 3, "3": 2 / 3}, (
        "and what was not chosen is left out"
    )
    front, target = found["processes"]
    assert (front["tier"], target["tier"]) == ("orchestrator", "target")
    assert target["kv_used"] == 0.25


def test_prefix_hits_are_a_workers_own():
    before = scraped(WORKER + PREFIXES.format(shared=10, computed=90), 0.0)
    now = scraped(WORKER + PREFIXES.format(shared=40, computed=100), 1.0)
    assert top_view.summary([before], [now])["processes"][0]["prefix_hits"] == 0.75
    assert top_view.summary([now], [now])["processes"][0]["prefix_hits"] is None


def test_a_process_that_was_started_anew_counts_from_nothing():
    before, now = scraped(orchestrator(1000, 900), 0.0), scraped(orchestrator(10, 4), 2.0)
    assert top_view.summary([before], [now])["speculation"]["rounds_per_s"] == 5.0


def test_a_process_that_does_not_answer_is_shown_and_the_others_count(endpoint, capsys):
    alive = endpoint(orchestrator(0, 0), orchestrator(7, 7))
    assert main(["top", alive, "127.0.0.1:1", "--interval", "0.1", "--count", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["speculation"]["mean_acceptance_length"] == 2.0
    assert "refused" in found["processes"][1]["error"]


def test_tables(endpoint, capsys):
    both = endpoint(orchestrator(0, 0), orchestrator(50, 20)), endpoint(WORKER)
    assert main(["top", *both, "--interval", "0.1", "--count", "1"]) == 0
    shown = capsys.readouterr().out
    for part in ("1.40", "40%  0%", "k chosen: 0: 28.6%  3: 71.4%", "target", "25%"):
        assert part in shown


def test_the_block_store_is_shown_by_workers_that_have_one(endpoint, capsys):
    before = scraped(WORKER + STORE.format(up=1, written=10), 0.0)
    now = scraped(WORKER + STORE.format(up=0, written=50), 2.0)
    store = top_view.summary([before], [now])["processes"][0]["kv_store"]
    assert (store["up"], store["blocks_written_per_s"], store["restores_declined"]) == (
        False,
        20,
        0,
    )
    assert top_view.summary([scraped(WORKER, 0.0)], [now])["processes"][0]["kv_store"] is not None
    without = top_view.summary([scraped(WORKER, 0.0)], [scraped(WORKER, 1.0)])
    assert without["processes"][0]["kv_store"] is None
    assert main(["top", endpoint(WORKER), "--interval", "0.1", "--count", "1"]) == 0
    assert "KV blocks in the store" not in capsys.readouterr().out
    both = WORKER + STORE.format(up=0, written=3)
    assert main(["top", endpoint(both), "--interval", "0.1", "--count", "1"]) == 0
    shown = capsys.readouterr().out
    assert "KV blocks in the store" in shown and "away" in shown


def test_what_is_no_metrics_endpoint(endpoint):
    assert scrape(endpoint("{not metrics")).error


def test_nothing_to_watch(capsys, tmp_path):
    assert main(["top"]) == 1
    assert "--stack" in capsys.readouterr().err
    stack = tmp_path / "stack.json"
    stack.write_text(json.dumps({"services": [{"info": {}}, {"info": {"metrics": "h:1"}}]}))
    assert addresses_of(stack) == ["h:1"]
    stack.write_text(json.dumps({"services": [{"info": {}}]}))
    with pytest.raises(InvalidArgument, match="METRICS_ADDRESS"):
        addresses_of(stack)
    stack.write_text("[]")
    with pytest.raises(InvalidArgument, match="up --json"):
        addresses_of(stack)


def test_every_metric_that_is_shown_exists():
    source = Path(top_view.__file__).read_text()
    asked = set(re.findall(r'"((?:outrider|gen_ai)_[a-z_]+)"', source))
    histograms = {name for name in asked if name.endswith("token_seconds")}
    asked -= {"gen_ai_request_model"}  # A label.
    asked = (asked - histograms) | {name + "_sum" for name in histograms}
    assert len(asked) > 15
    assert asked <= set(prometheus_names())
