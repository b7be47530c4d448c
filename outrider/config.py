"""Frozen config dataclasses, built from flags, environment and a TOML file.

A service declares its settings once:

    @dataclass(frozen=True)
    class DraftConfig:
        port: int = setting(50052, help="port to listen on; 0 picks a free one")

and `load_config(DraftConfig, argv, env, prog="...", env_prefix="OUTRIDER_DRAFT_")` builds it. A
flag wins over the environment, the environment over the file (`--config FILE`), the file over
the default. Unknown keys and values of the wrong type are refused with the setting's name.
"""

import argparse
import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from outrider.errors import InvalidArgument

T = TypeVar("T")


def setting(default: Any, *, help: str, choices: Sequence[str] = (), secret: bool = False) -> Any:
    """A dataclass field with what the command line says about it.

    `secret` values are hidden by `describe`.
    """
    metadata = {"help": help, "choices": tuple(choices), "secret": secret}
    return dataclasses.field(default=default, metadata=metadata)


def load_config(
    cls: type[T],
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    prog: str,
    env_prefix: str,
) -> T:
    """Build `cls` from flags, environment and file; raise InvalidArgument for a bad value."""
    flags = _parse_flags(cls, argv, prog)
    path = flags.pop("config", None) or env.get(f"{env_prefix}CONFIG")
    values = _read_file(cls, Path(path)) if path else {}
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key, text in env.items():
        name = key.removeprefix(env_prefix).lower()
        if not key.startswith(env_prefix) or name == "config":
            continue
        if name not in known:
            raise InvalidArgument(f"unknown setting; known: {', '.join(known)}", field=key)
        values[name] = text
    values.update(flags)
    types_ = typing.get_type_hints(cls)
    parsed = {name: _parse(name, value, types_[name]) for name, value in values.items()}
    for name, value in parsed.items():
        choices = known[name].metadata["choices"]
        if choices and value not in choices:
            raise InvalidArgument(f"{value!r} is not one of {', '.join(choices)}", field=name)
    return cls(**parsed)


def describe(config: Any) -> dict[str, Any]:
    """The settings by name, secrets hidden; for the log line at start."""
    return {
        f.name: "***"
        if f.metadata.get("secret") and getattr(config, f.name)
        else getattr(config, f.name)
        for f in dataclasses.fields(config)
    }


def _parse_flags(cls: type, argv: Sequence[str], prog: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog=prog, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", help="TOML file with settings, one key each")
    for f in dataclasses.fields(cls):
        flag = "--" + f.name.replace("_", "-")
        help_text = f"{f.metadata['help']} (default: {f.default!r})".replace("%", "%%")
        if isinstance(f.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=help_text)
        elif isinstance(f.default, tuple):
            parser.add_argument(flag, action="append", help=help_text + "; may be repeated")
        else:
            parser.add_argument(flag, help=help_text)
    return vars(parser.parse_args(argv))


def _read_file(cls: type, path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgument(f"cannot read {path}: {error}", field="config") from error
    known = {f.name for f in dataclasses.fields(cls)}
    for key in values:
        if key not in known:
            raise InvalidArgument(
                f"unknown setting in {path}; known: {', '.join(sorted(known))}", field=key
            )
    return values


def _parse(name: str, value: Any, expected: Any) -> Any:
    """Turn text into `expected`: bool, int, float, str, one of them or None, tuple[str, ...]."""
    if isinstance(expected, types.UnionType):
        if value is None or value == "":
            return None
        expected = next(arg for arg in typing.get_args(expected) if arg is not type(None))
    if typing.get_origin(expected) is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise InvalidArgument(f"{value!r} is not a list of texts", field=name)
        return tuple(item for item in items if item)
    try:
        if expected is bool and isinstance(value, str):
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        # A file's values have types of their own; only a whole number may stand for a float.
        if type(value) not in (str, expected) and (type(value), expected) != (int, float):
            raise ValueError
        return expected(value)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{value!r} is not a valid {expected.__name__}", field=name
        ) from error
