"""Settings from flags, environment and file: who wins, and what is refused."""

import dataclasses
from dataclasses import dataclass

import pytest

from outrider.config import describe, load_config, setting
from outrider.errors import InvalidArgument
from outrider.worker.service import WorkerConfig, parse_bytes
from services.orchestrator.config import OrchestratorConfig


@dataclass(frozen=True)
class Demo:
    port: int = setting(1, help="a port")
    share: float = setting(0.5, help="50% of it")
    name: str = setting("none", help="a name", choices=("none", "a", "b"))
    loud: bool = setting(True, help="noise")
    limit: int | None = setting(None, help="perhaps a limit")
    peers: tuple[str, ...] = setting((), help="some peers")
    token: str = setting("", help="a secret", secret=True)


def load(argv=(), env=None, **kwargs):
    return load_config(Demo, argv, env or {}, prog="demo", env_prefix="DEMO_", **kwargs)


def refused(argv=(), env=None):
    with pytest.raises(InvalidArgument) as caught:
        load(argv, env)
    return caught.value


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "demo.toml"
        path.write_text(text)
        return ["--config", str(path)]

    return write


def test_flags_win_over_environment_over_file_over_default(file):
    argv = file("port = 2\n")
    assert load().port == 1
    assert load(argv).port == 2
    assert load(argv, {"DEMO_PORT": "3"}).port == 3
    assert load([*argv, "--port", "4"], {"DEMO_PORT": "3"}).port == 4
    assert load([*argv, "--port", "1"], {"DEMO_PORT": "3"}).port == 1


def test_the_file_may_be_named_by_the_environment(file):
    _, path = file("port = 7")
    assert load(env={"DEMO_CONFIG": path}).port == 7


def test_other_programs_environment_is_left_alone():
    assert load(env={"OTHER_PORT": "x", "PATH": "/bin"}) == Demo()


@pytest.mark.parametrize(
    ("argv", "env", "file_text", "field"),
    [
        ([], {"DEMO_PROT": "1"}, "", "DEMO_PROT"),
        ([], {}, "prot = 1", "prot"),
        (["--port", "x"], {}, "", "port"),
        (["--port", "1.5"], {}, "", "port"),
        ([], {"DEMO_SHARE": "half"}, "", "share"),
        ([], {"DEMO_LOUD": "maybe"}, "", "loud"),
        ([], {"DEMO_NAME": "c"}, "", "name"),
        ([], {}, 'name = "c"', "name"),
        ([], {}, "port = 'x'", "port"),
        ([], {}, "port = 1.5", "port"),
        ([], {}, "port = true", "port"),
        ([], {}, "share = true", "share"),
        ([], {}, "loud = 1", "loud"),
        ([], {}, "name = 5", "name"),
        ([], {}, "token = 5", "token"),
        ([], {}, "limit = false", "limit"),
        ([], {}, "peers = 5", "peers"),
        ([], {}, "peers = [5]", "peers"),
        ([], {}, "port = [1]", "port"),
        ([], {}, "port = ", "config"),
    ],
)
def test_unknown_keys_and_wrong_values_are_refused_by_name(argv, env, file_text, field, file):
    argv = [*argv, *file(file_text)]
    assert refused(argv, env).field == field


def test_a_missing_file_is_refused():
    assert refused(["--config", "/nowhere.toml"]).field == "config"


def test_unknown_flags_end_the_program(capsys):
    with pytest.raises(SystemExit):
        load(["--prot", "1"])
    assert "--prot" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "env", "loud"),
    [
        ([], {}, True),
        (["--no-loud"], {}, False),
        (["--loud"], {"DEMO_LOUD": "false"}, True),
        ([], {"DEMO_LOUD": "0"}, False),
        ([], {"DEMO_LOUD": "TRUE"}, True),
    ],
)
def test_booleans(argv, env, loud):
    assert load(argv, env).loud is loud


def test_tuples_come_from_repeated_flags_commas_and_lists(file):
    assert load(["--peers", "a", "--peers", "b"]).peers == ("a", "b")
    assert load(env={"DEMO_PEERS": "a,b"}).peers == ("a", "b")
    assert load(env={"DEMO_PEERS": ""}).peers == ()
    assert load(file('peers = ["a", "b"]')).peers == ("a", "b")


def test_values_that_may_be_none():
    assert load().limit is None
    assert load(["--limit", "3"]).limit == 3
    assert load(env={"DEMO_LIMIT": ""}).limit is None
    assert refused(["--limit", "x"]).field == "limit"


def test_numbers_of_the_file_are_numbers(file):
    loaded = load(file('share = 1\nlimit = 4\nname = "a"\nloud = false'))
    assert loaded == Demo(share=1.0, limit=4, name="a", loud=False)
    assert isinstance(loaded.share, float)


def test_secrets_are_hidden():
    config = load(["--token", "s3cret"], {"DEMO_PORT": "9"})
    assert config.token == "s3cret"
    described = describe(config)
    assert "s3cret" not in str(described) and described["token"] == "***"
    assert described["port"] == 9 and set(described) == {f.name for f in dataclasses.fields(Demo)}
    assert describe(Demo())["token"] == ""


def test_help_shows_every_setting_and_its_default(capsys):
    with pytest.raises(SystemExit) as ended:
        load(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(part in text for part in ("--port", "50% of it", "--no-loud", "default: 0.5"))


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().port = 3


def test_worker_settings_are_read_like_any_other(tmp_path):
    path = tmp_path / "worker.toml"
    path.write_text('model = "demo"\nkv_memory = "2GiB"\nmax_rows = 64\n')
    env = {"OUTRIDER_TARGET_DTYPE": "bfloat16", "OUTRIDER_CACHE": "/elsewhere"}
    config = load_config(
        WorkerConfig,
        ["--config", str(path), "--port", "50051", "--no-log-json"],
        env,
        prog="target",
        env_prefix="OUTRIDER_TARGET_",
    )
    expected = WorkerConfig(
        kv_memory="2GiB", max_rows=64, dtype="bfloat16", port=50051, log_json=False
    )
    assert config == expected


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20),
        ("1GiB", 1 << 30),
        ("1.5 KiB", 1536),
        ("12345", 12345),
        ("0.5GiB", 1 << 29),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text, field="kv_memory") == size


@pytest.mark.parametrize(
    "text", ["", "0", "0GiB", "-1GiB", "1GB", "1 gib", "GiB", "1e3", "1GiBs", "nan", "0.1", "1.2.3"]
)
def test_other_sizes_are_refused_by_name(text):
    with pytest.raises(InvalidArgument, match="write for example") as caught:
        parse_bytes(text, field="kv_memory")
    assert caught.value.field == "kv_memory"


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("num_speculative_tokens", -1, 16),
        ("max_speculative_tokens", 0, 16),
        ("fan_out", 0, 64),
        ("alternatives", -1, 3),
    ],
)
def test_the_orchestrators_numbers_are_checked(name, least, most):
    for value in (least, most):
        assert getattr(OrchestratorConfig(**{name: value}), name) == value
    for value in (least - 1, most + 1):
        with pytest.raises(InvalidArgument, match=f"{value} is not in") as refused:
            OrchestratorConfig(**{name: value})
        assert refused.value.field == name
