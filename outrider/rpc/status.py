"""Errors over the wire: one table between `outrider.errors` and gRPC status codes."""

from typing import Any, NoReturn

import grpc
import grpc.aio

from outrider import errors

_FIELD_KEY = "outrider-error-field"

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
    """End the call with the error's status; the field's name travels as trailing metadata."""
    metadata = ((_FIELD_KEY, error.field),) if error.field else ()
    await context.abort(status_code(error), error.message, metadata)
    raise AssertionError("abort returned")


def error_from_rpc(rpc_error: grpc.aio.AioRpcError) -> errors.OutriderError:
    """The error that the other side raised, or what the channel made of it."""
    field = ""
    for key, value in rpc_error.trailing_metadata() or ():
        if key == _FIELD_KEY:
            field = value.decode() if isinstance(value, bytes) else value
    cls = _BY_NAME.get(rpc_error.code().name, errors.InternalError)
    return cls(rpc_error.details() or rpc_error.code().name, field=field)
