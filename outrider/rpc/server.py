"""A gRPC server as every service runs it: TLS, authentication, health, reflection, draining."""

import asyncio
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.config import describe, load_config, setting
from outrider.errors import OutriderError, Unavailable
from outrider.rpc.audit import configure_audit
from outrider.rpc.channel import (
    KEEPALIVE_S,
    MAX_MESSAGE_BYTES,
    MAX_METADATA_BYTES,
    MIN_KEEPALIVE_S,
    keepalive_options,
)
from outrider.rpc.security import SecuritySettings
from outrider.telemetry.logs import configure_logging
from outrider.telemetry.service import PROTOCOLS, TelemetrySettings

logger = logging.getLogger(__name__)

_MIN_PING_MS = int(MIN_KEEPALIVE_S * 900)
LOG_LEVELS = ("debug", "info", "warning", "error")
_HEALTH_CALLS = 32
HANDSHAKE_S = 20.0
"""Seconds that a client has for TLS and HTTP/2 before it is hung up on."""


@dataclass(frozen=True)
class ServerConfig(SecuritySettings):
    """What all services can be told about their server."""

    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(0, help="port to listen on; 0 picks a free one")
    socket: str = setting("", help="path of a Unix socket to listen on instead")
    health_port: int = setting(
        0,
        help="port of health alone, without TLS, for probes that speak none; 0: only where the "
        "other services are",
    )
    ready_file: str = setting("", help="file that gets address, pid and info once serving")
    max_message_bytes: int = setting(MAX_MESSAGE_BYTES, help="largest message taken, in bytes")
    max_concurrent_calls: int = setting(4096, help="calls served at once; more are refused")
    drain_s: float = setting(30.0, help="seconds that running calls get after SIGTERM")
    log_level: str = setting("info", help="least severe level to log", choices=LOG_LEVELS)
    log_json: bool = setting(True, help="log JSON objects rather than text")
    metrics_address: str = setting(
        "", help="host:port to serve metrics to Prometheus on, for example 0.0.0.0:9464"
    )
    otlp_endpoint: str = setting(
        "",
        help="URL of a collector that gets traces and metrics by OTLP, for example "
        "http://collector:4317; default: OTEL_EXPORTER_OTLP_ENDPOINT. Other OTEL_* variables of "
        "OpenTelemetry's SDK hold too",
    )
    otlp_protocol: str = setting(
        "auto",
        help="grpc or http; auto is as OTEL_EXPORTER_OTLP_PROTOCOL says, else grpc",
        choices=PROTOCOLS,
    )

    @property
    def telemetry(self) -> TelemetrySettings:
        return TelemetrySettings(self.metrics_address, self.otlp_endpoint, self.otlp_protocol)


C = TypeVar("C", bound=ServerConfig)


def run_service(
    cls: type[C], serve: Callable[[C], Coroutine[Any, Any, None]], *, name: str
) -> None:
    """The `main` of a service: config from flags, environment and file, then `serve` until it
    ends. An error that the user can mend ends the process with status 1 and one line."""
    try:
        config = load_config(
            cls,
            sys.argv[1:],
            os.environ,
            prog=f"python -m services.{name}",
            env_prefix=f"OUTRIDER_{name.upper()}_",
        )
        configure_logging(config.log_level, as_json=config.log_json)
        configure_audit(config.audit_file)
        _end_on_sigterm()
        logger.info("starting", extra={"service": name, "config": describe(config)})
        _run(serve(config))
    except OutriderError as error:
        sys.exit(f"error: {error}")


def _end_on_sigterm() -> None:
    """Until a service serves, and drains at SIGTERM, the signal ends it at once.

    That is what it does anyhow, but not to process 1 of a container: there the kernel drops
    signals that have no handler, and a model may take minutes to load.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))


def _run(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


class Server:
    """`start`, `serving`, then `until_stopped`; health says NOT_SERVING outside of that."""

    def __init__(self, config: ServerConfig, service_names: Sequence[str]) -> None:
        self._config = config
        self._service_names = service_names
        self._health = health.aio.HealthServicer()
        self._health_grpc: grpc.aio.Server | None = None
        self._stop = asyncio.Event()
        self.grpc = grpc.aio.server(
            interceptors=[config.make_guard()],
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", config.max_message_bytes),
                *keepalive_options(KEEPALIVE_S),
                ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_MS),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
                ("grpc.so_reuseport", 0),
                ("grpc.http2.bdp_probe", 0),
            ],
            maximum_concurrent_rpcs=config.max_concurrent_calls,
        )
        self.address = ""

    async def start(self) -> None:
        """Listen; everything but health answers from now on, health after `serving`."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._start_health_port()
        if self._config.socket:
            self.address = f"unix:{self._config.socket}"
            self._bind(self.address)
        else:
            port = self._bind(f"{self._config.host}:{self._config.port}")
            self.address = f"{self._config.host}:{port}"
        await self.grpc.start()

    async def serving(self, info: dict[str, Any]) -> None:
        """Health says SERVING, and the ready file appears. SIGTERM and SIGINT drain from now on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        # Modules and models stay: the collector need not look through them again and again.
        gc.collect()
        gc.freeze()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        if self._config.ready_file:
            content = {"address": self.address, "pid": os.getpid(), "info": info}
            path = Path(self._config.ready_file)
            scratch = path.with_name(path.name + ".new")
            scratch.write_text(json.dumps(content))
            scratch.rename(path)
        logger.info("serving", extra={"address": self.address, **info})

    def request_stop(self) -> None:
        self._stop.set()

    async def until_stopped(
        self, drain: Callable[[], Awaitable[None]], *, hang_up: bool = False
    ) -> None:
        """Wait for SIGTERM, SIGINT or `request_stop`; then drain within `drain_s` and end.

        New calls are taken until `drain` returns. With `hang_up` none are, and clients are told to
        connect anew (GOAWAY) once their running calls are over: behind a load balancer they find
        another server there.
        """
        loop = asyncio.get_running_loop()
        await self._stop.wait()
        logger.info("draining", extra={"seconds": self._config.drain_s})
        await self._health.enter_graceful_shutdown()
        if hang_up:
            await asyncio.gather(drain(), self.grpc.stop(self._config.drain_s))
        else:
            started = loop.time()
            await drain()
            left = max(self._config.drain_s - (loop.time() - started), 0.0)
            await self.grpc.stop(left)
        if self._health_grpc:
            await self._health_grpc.stop(None)
        logger.info("stopped")

    async def _start_health_port(self) -> None:
        """A server that answers nothing but health, from where nothing else can be reached."""
        if not self._config.health_port:
            return
        address = f"{self._config.host}:{self._config.health_port}"
        self._health_grpc = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 1024)],
            maximum_concurrent_rpcs=_HEALTH_CALLS,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_grpc)
        try:
            self._health_grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise Unavailable(
                f"cannot listen on {address}: {error}", field="health_port"
            ) from error
        await self._health_grpc.start()

    async def _set_health(self, status: "health_pb2.HealthCheckResponse.ServingStatus") -> None:
        for name in ("", *self._service_names):
            await self._health.set(name, status)

    def _bind(self, address: str) -> int:
        tls = self._config.server_tls
        try:
            if tls is None:
                return self.grpc.add_insecure_port(address)
            return self.grpc.add_secure_port(address, tls.credentials())
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {address}: {error}", field="port") from error
