"""The exception tree, and nothing else. `outrider.rpc.status` maps it to gRPC status codes.

OutriderError
├── InvalidArgument      a field is outside its range; `field` names it
├── Unauthenticated      no credentials, or wrong ones
├── PermissionDenied     another caller's session
├── NotFound             no such session or model
├── AlreadyRunning       the session or the request id is in use
├── FailedPrecondition   the system's state forbids it (tokenizers differ, session unfit)
├── ResourceExhausted    no KV, queue or quota left; retry later
├── DeadlineExceeded     the time given ran out
├── Cancelled            the caller went away
├── Unavailable          a worker or the store is away; retry
├── Unsupported          understood, but this build or model cannot do it
├── Fenced               epoch, nonce or prefix does not match; dropped, never applied
├── DataLoss             the store has less, or other, than was told; going on would alter it
└── InternalError        a fault of ours
"""


class OutriderError(Exception):
    """Anything that a caller, a peer or the surroundings can cause.

    `message` says what was wrong and what is allowed; `field` names the offending field, if one
    is; `retry_after_s` is when trying again makes sense, where that is known; `grpc_name` is the
    name of the gRPC status code.
    """

    grpc_name = "UNKNOWN"

    def __init__(
        self, message: str, *, field: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidArgument(OutriderError):
    grpc_name = "INVALID_ARGUMENT"


class Unauthenticated(OutriderError):
    grpc_name = "UNAUTHENTICATED"


class PermissionDenied(OutriderError):
    grpc_name = "PERMISSION_DENIED"


class NotFound(OutriderError):
    grpc_name = "NOT_FOUND"


class AlreadyRunning(OutriderError):
    grpc_name = "ALREADY_EXISTS"


class FailedPrecondition(OutriderError):
    grpc_name = "FAILED_PRECONDITION"


class ResourceExhausted(OutriderError):
    grpc_name = "RESOURCE_EXHAUSTED"


class DeadlineExceeded(OutriderError):
    grpc_name = "DEADLINE_EXCEEDED"


class Cancelled(OutriderError):
    grpc_name = "CANCELLED"


class Unavailable(OutriderError):
    grpc_name = "UNAVAILABLE"


class Unsupported(OutriderError):
    grpc_name = "UNIMPLEMENTED"


class Fenced(OutriderError):
    grpc_name = "ABORTED"


class DataLoss(OutriderError):
    grpc_name = "DATA_LOSS"


class InternalError(OutriderError):
    grpc_name = "INTERNAL"
