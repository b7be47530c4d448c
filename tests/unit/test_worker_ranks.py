"""Who runs where: one host, the pods of a LeaderWorkerSet, and settings that do not go together."""

import asyncio
import logging

import pytest
import torch

from outrider.config import load_config
from outrider.errors import InvalidArgument
from outrider.telemetry.logs import JsonFormatter
from outrider.worker import ranks
from outrider.worker.crew import Crew
from outrider.worker.ranks import (
    DEFAULT_PORT,
    GroupConfig,
    Layout,
    device_of,
    layout_of,
    name_rank,
    threads_of,
)
from outrider.worker.service import WorkerConfig


def lws(index, size, leader="leader.example"):
    return {
        "LWS_GROUP_SIZE": str(size),
        "LWS_WORKER_INDEX": str(index),
        "LWS_LEADER_ADDRESS": leader,
    }


@pytest.mark.parametrize(
    ("size", "env", "layout"),
    [
        (1, {}, Layout()),
        (4, {}, Layout(4, 0, 4)),
        (1, lws(0, 1), Layout()),
        (2, lws(0, 2), Layout(2, 0, 1, "leader.example")),
        (2, lws(1, 2), Layout(2, 1, 1, "leader.example")),
        (16, lws(1, 2), Layout(16, 8, 8, "leader.example")),
    ],
)
def test_the_same_command_lays_out_every_pod(size, env, layout):
    found = layout_of(GroupConfig(tensor_parallel=size), env)
    assert found == layout
    assert found.one_host is (found.here == size)


@pytest.mark.parametrize(
    ("size", "env", "field", "told"),
    [
        (0, {}, "tensor_parallel", "0 is not at least 1"),
        (1, lws(0, 2), "tensor_parallel", "1 ranks cannot be spread evenly over the 2 pods"),
        (3, lws(0, 2), "tensor_parallel", "3 ranks cannot be spread evenly over the 2 pods"),
        (2, lws(2, 2), "LWS_GROUP_SIZE", "LWS_WORKER_INDEX below that"),
        (2, {"LWS_GROUP_SIZE": "2"}, "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"),
        (2, {"LWS_GROUP_SIZE": "two"}, "LWS_GROUP_SIZE", "'two' is not a number"),
    ],
)
def test_layouts_that_cannot_be_are_refused(size, env, field, told):
    with pytest.raises(InvalidArgument, match=told) as refused:
        layout_of(GroupConfig(tensor_parallel=size), env)
    assert refused.value.field == field


def test_both_tiers_have_the_settings_of_groups():
    argv = ["--tensor-parallel", "2", "--group-timeout-s", "3", "--group-sums", "nccl"]
    config = load_config(WorkerConfig, argv, {}, prog="x", env_prefix="X_")
    assert (config.tensor_parallel, config.group_timeout_s, config.group_sums) == (2, 3.0, "nccl")
    with pytest.raises(InvalidArgument, match="auto, nccl"):
        load_config(WorkerConfig, ["--group-sums", "mpi"], {}, prog="x", env_prefix="X_")


@pytest.fixture
def gpus(monkeypatch):
    def make(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return make


@pytest.mark.parametrize(
    ("wanted", "count", "local", "device"),
    [
        ("auto", 0, 1, "cpu"),
        ("cpu", 4, 1, "cpu"),
        ("auto", 4, 0, "cuda:0"),
        ("cuda", 4, 3, "cuda:3"),
        ("cuda:2", 4, 1, "cuda:3"),
    ],
)
def test_ranks_take_gpus_in_a_row(gpus, wanted, count, local, device):
    gpus(count)
    assert device_of(wanted, local, local + 1) == device


def test_too_few_gpus_are_refused_with_numbers(gpus):
    gpus(3)
    with pytest.raises(InvalidArgument, match=r"2 ranks from GPU 2 on need 4 GPUs.*there are 3"):
        device_of("cuda:2", 1, 2)
    gpus(0)
    with pytest.raises(InvalidArgument, match="need 2 GPUs on this host; there are 0"):
        device_of("cuda", 0, 2)


def test_ranks_of_one_host_share_its_cores(monkeypatch):
    monkeypatch.setattr(ranks.os, "cpu_count", lambda: 16)
    assert [threads_of(0, 2), threads_of(0, 32), threads_of(5, 2)] == [8, 1, 5]


def crew(config, layout):
    async def make():
        return Crew(config, layout)

    return asyncio.run(make())


def test_ranks_of_one_host_meet_at_loopback_with_a_token_drawn_for_them():
    first, second = (crew(GroupConfig(tensor_parallel=2), Layout(2, 0, 2)) for _ in range(2))
    assert first._address == "127.0.0.1" and first._port not in (0, second._port)
    assert len(first._token) == 32 and first._token != second._token
    for made in (first, second):
        made._listener.close()


def test_pods_meet_at_the_leader_with_the_token_of_a_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("known to all pods\n")
    config = GroupConfig(tensor_parallel=2, group_token_file=str(path))
    other = crew(config, Layout(2, 1, 1, "leader.example"))
    assert (other._address, other._port) == ("leader.example", DEFAULT_PORT)
    assert other._token == b"known to all pods" and other._listener is None and not other.leads


@pytest.mark.parametrize("content", [None, " \n"])
def test_a_token_file_that_holds_none_is_refused(tmp_path, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    config = GroupConfig(tensor_parallel=2, group_token_file=str(path))
    with pytest.raises(InvalidArgument) as refused:
        crew(config, Layout(2, 0, 2))
    assert refused.value.field == "group_token_file"


def test_one_rank_starts_and_listens_for_nobody():
    alone = crew(GroupConfig(), Layout())
    alone.start({}, "target")
    assert alone._listener is None and not alone._children


@pytest.mark.parametrize("as_json", [True, False])
def test_log_records_say_which_rank_they_come_from(monkeypatch, as_json, capsys):
    logger = logging.getLogger()
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter("%(message)s"))
    monkeypatch.setattr(logger, "handlers", [handler])
    name_rank(3)
    logging.getLogger("some.module").warning("hot")
    told = capsys.readouterr().err
    assert ('"rank": 3' if as_json else "WARNING rank 3 some.module: hot") in told
