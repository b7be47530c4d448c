"""Forms of stored values, and URLs that never show their credentials."""

import json
import re
from dataclasses import replace
from urllib.parse import unquote

import pytest

from outrider.errors import FailedPrecondition, InvalidArgument
from outrider.redis_url import CLUSTER, SENTINEL, RedisServers, parse_redis_url, parse_store_url
from outrider.types import Durability, FinishReason, SamplingParams, VerificationMode
from services.orchestrator.store_values import (
    GenerationRecord,
    Outcome,
    outcome_to_json,
    pack_tokens,
    record_from_json,
    record_to_json,
    unpack_tokens,
)

RECORD = GenerationRecord(
    request_id="r",
    start=3,
    prompt_end=9,
    sampling=SamplingParams(temperature=0.1, top_k=5, top_p=0.9, min_p=0.01, seed=2**64 - 1),
    mode=VerificationMode.REJECTION,
    max_tokens=7,
    min_tokens=2,
    stop_ids=(1, 2),
    stop_strings=("\n\n", "ü"),
    ignore_eos=True,
    logprobs=0,
    eos_ids=(256,),
    context_length=512,
    keep=True,
    resumable=True,
    durability=Durability.BEST_EFFORT,
    idempotency_key="k",
    epoch=1_700_000_000_123,
    num_speculative_tokens=None,
    max_speculative_tokens=3,
    proposer="auto",
    fan_out=0,
    alternatives=2,
    report_rounds=True,
    engine_versions={"torch": "2.11", "outrider": "0.1"},
)


def test_record_survives_json() -> None:
    assert record_from_json(record_to_json(RECORD)) == RECORD


def test_finish_reason_is_kept_apart() -> None:
    outcome = Outcome(FinishReason.STOP_STRING, matched_stop="ü", cut_text="üx")
    ended = replace(RECORD, outcome=outcome)
    assert record_to_json(ended) == record_to_json(RECORD)
    assert record_from_json(record_to_json(ended), outcome_to_json(outcome)) == ended
    assert ended.finish_reason is FinishReason.STOP_STRING and RECORD.finish_reason is None


def test_equal_records_have_equal_text() -> None:
    other = replace(RECORD, engine_versions={"outrider": "0.1", "torch": "2.11"})
    assert record_to_json(other) == record_to_json(RECORD)


@pytest.mark.parametrize("version", [None, 0, 2, "1", [1]])
def test_a_record_of_another_version_is_refused_and_says_so(version: object) -> None:
    values = json.loads(record_to_json(RECORD))
    if version is None:
        del values["version"]
    else:
        values["version"] = version
    with pytest.raises(FailedPrecondition, match=f"version {re.escape(str(version))}") as refused:
        record_from_json(json.dumps(values), session_id="a-session")
    assert "a-session" in refused.value.message and "knows version 1" in refused.value.message


@pytest.mark.parametrize(
    "damage",
    [
        {"sampling": None},
        {"sampling": {"seed": 1, "heat": 2}, "mode": "other"},
        {"durability": "perhaps"},
        {"stop_ids": 5},
        {"start": ...},
    ],
    ids=str,
)
def test_a_damaged_record_is_refused(damage: dict[str, object]) -> None:
    values = json.loads(record_to_json(RECORD))
    values |= damage
    values = {name: value for name, value in values.items() if value is not ...}
    with pytest.raises(FailedPrecondition, match="damaged"):
        record_from_json(json.dumps(values))
    for text in ("", "[]", "{", "null", "7"):
        with pytest.raises(FailedPrecondition, match=r"damaged|version"):
            record_from_json(text)
    with pytest.raises(FailedPrecondition, match="damaged"):
        record_from_json(record_to_json(RECORD), '{"finish_reason":"boredom"}')


def test_unknown_fields_of_a_newer_version_are_left_out() -> None:
    values = json.loads(record_to_json(RECORD))
    values["new"] = 1
    values["sampling"]["newer"] = 2
    assert record_from_json(json.dumps(values)) == RECORD


def test_tokens_are_four_bytes_little_endian() -> None:
    assert pack_tokens([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    assert unpack_tokens(pack_tokens(range(5))) == (0, 1, 2, 3, 4)
    for bad in (-1, 2**32):
        with pytest.raises(InvalidArgument):
            pack_tokens([bad])


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://user:hunter2@host:7000/3", "redis://host:7000/3"),
        ("rediss://:hunter2@[::1]", "rediss://[::1]:6379"),
        ("redis://", "redis://localhost:6379"),
        ("unix:///run/redis.sock?db=1&password=hunter2", "unix:///run/redis.sock"),
    ],
)
def test_address_has_no_credentials(url: str, address: str) -> None:
    found, secrets = parse_redis_url(url, field="redis_url")
    assert found == address
    assert secrets == (("hunter2",) if "hunter2" in url else ())


def test_secret_is_known_in_both_spellings() -> None:
    assert set(parse_redis_url("redis://u:a%2Fb@h", field="redis_url")[1]) == {"a%2Fb", "a/b"}


@pytest.mark.parametrize(
    "url",
    [
        "http://u:hunter2@h",
        "redis://u:hunter2/x@h:1",
        "redis://u:hunter2@h:port",
        "redis://u:hunter2@h:0",
        "hunter2",
    ],
)
def test_bad_url_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_redis_url(url, field="redis_url")
    assert "hunter2" not in str(refused.value) and "redis://" in str(refused.value)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


@pytest.mark.parametrize(
    ("url", "address", "servers"),
    [
        (
            "redis+sentinel://user:hunter2@one,[::1]:7000/sessions/3"
            "?sentinel_user=s&sentinel_password=hunter3",
            "redis+sentinel://one:26379,[::1]:7000/sessions/3",
            RedisServers(
                SENTINEL, False, (("one", 26379), ("::1", 7000)), "sessions", 3, "user", "hunter2",
                "s", "hunter3",
            ),
        ),
        (
            "rediss+sentinel://one:1/a%2Fb",
            "rediss+sentinel://one:1/a/b/0",
            RedisServers(SENTINEL, True, (("one", 1),), "a/b"),
        ),
        (
            "redis+cluster://:hunter2%2F@one,two:7000/0",
            "redis+cluster://one:6379,two:7000",
            RedisServers(CLUSTER, False, (("one", 6379), ("two", 7000)), password="hunter2/"),
        ),
        ("redis://u:hunter2@h", "redis://h:6379", None),
    ],
    ids=["sentinels", "tls", "cluster", "one"],
)  # fmt: skip
def test_urls_of_several_servers(url: str, address: str, servers: RedisServers | None) -> None:
    found, secrets, several = parse_store_url(url, field="redis_url")
    assert (found, several) == (address, servers)
    assert "hunter" not in repr(several)
    for word in re.findall(r"hunter\d(?:%2F)?", url):
        assert {word, unquote(word)} <= set(secrets)
