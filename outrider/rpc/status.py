"""Errors over the wire: one table between `outrider.errors` and gRPC status codes.

When to retry travels as google.rpc.RetryInfo among the status's details, where clients of any
language look for it, and as gRPC's own push-back, which channels with a retry policy obey.
"""

from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from outrider import errors

_FIELD_KEY = "outrider-error-field"
_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_MAX_MESSAGE_BYTES = 1024
"""Messages quote what a caller sent, which may be long; headers have a limit."""

_BY_NAME: dict[str, type[errors.OutriderError]] = {
    cls.grpc_name: cls
    for cls in (
        errors.InvalidArgument,
        errors.Unauthenticated,
        errors.PermissionDenied,
        errors.NotFound,
        errors.AlreadyRunning,
        errors.FailedPrecondition,
        errors.ResourceExhausted,
        errors.DeadlineExceeded,
        errors.Cancelled,
        errors.Unavailable,
        errors.Unsupported,
        errors.Fenced,
        errors.DataLoss,
        errors.InternalError,
    )
}


def status_code(error: errors.OutriderError) -> grpc.StatusCode:
    return grpc.StatusCode[error.grpc_name]


async def abort_with(
    context: "grpc.aio.ServicerContext[Any, Any]", error: errors.OutriderError
) -> NoReturn:
    """End the call with the error's status; the rest of it travels as trailing metadata."""
    metadata: list[tuple[str, str | bytes]] = []
    if error.field:
        metadata.append((_FIELD_KEY, error.field))
    if error.retry_after_s is not None:
        metadata.append((_DETAILS_KEY, _details(error, error.retry_after_s)))
        metadata.append((_PUSHBACK_KEY, str(int(error.retry_after_s * 1000))))
    message = error.message.encode("utf-8", "replace")[:_MAX_MESSAGE_BYTES]
    await context.abort(status_code(error), message.decode("utf-8", "ignore"), tuple(metadata))
    raise AssertionError("abort returned")


def _details(error: errors.OutriderError, retry_after_s: float) -> bytes:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromMicroseconds(int(retry_after_s * 1e6))
    status = status_pb2.Status(code=status_code(error).value[0], message=error.message)
    status.details.add().Pack(info)
    data: bytes = status.SerializeToString()
    return data


def _retry_after_s(details: bytes) -> float | None:
    """What the details say of it; None where they don't, or cannot be read."""
    info = error_details_pb2.RetryInfo()
    try:
        for detail in status_pb2.Status.FromString(details).details:
            if detail.Unpack(info):
                return float(info.retry_delay.ToMicroseconds()) / 1e6
    except (DecodeError, ValueError):
        pass
    return None


def error_from_rpc(rpc_error: grpc.aio.AioRpcError) -> errors.OutriderError:
    """The error that the other side raised, or what the channel made of it."""
    field, retry_after_s = "", None
    for key, value in rpc_error.trailing_metadata() or ():
        if key == _FIELD_KEY:
            field = value.decode() if isinstance(value, bytes) else value
        elif key == _DETAILS_KEY and isinstance(value, bytes):
            retry_after_s = _retry_after_s(value)
    cls = _BY_NAME.get(rpc_error.code().name, errors.InternalError)
    message = rpc_error.details() or rpc_error.code().name
    return cls(message, field=field, retry_after_s=retry_after_s)
