"""Before every call: who it is, whether they may, and what the audit log tells of it."""

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from outrider.errors import OutriderError, PermissionDenied
from outrider.rpc.audit import AuditLog, CallRecord
from outrider.rpc.auth import Authenticator, Caller, set_caller
from outrider.rpc.quota import CallQuota
from outrider.rpc.status import abort_with

_HEALTH = "/grpc.health."
_REFLECTION = "/grpc.reflection."

Context = grpc.aio.ServicerContext
Behaviour = Callable[[Any, Any], Any]


class CallGuard(grpc.aio.ServerInterceptor):
    """Lets calls through whose caller is known, whose client certificate has an allowed name (any,
    where none is given), and who has calls left. Health is open to all; reflection if told so.

    Handlers learn by `current_caller` who calls.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        *,
        audit: AuditLog,
        quota: CallQuota,
        client_names: frozenset[str] = frozenset(),
        reflection_open: bool = False,
    ) -> None:
        self._authenticator = authenticator
        self._audit = audit
        self._quota = quota
        self._client_names = client_names
        self._open = (_HEALTH, _REFLECTION) if reflection_open else (_HEALTH,)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or method.startswith(self._open):
            return handler
        return self._guarded(handler, method)

    def _guarded(self, handler: Any, method: str) -> Any:
        """The handler, behind the guard."""
        requests = "stream" if handler.request_streaming else "unary"
        kind = f"{requests}_{'stream' if handler.response_streaming else 'unary'}"
        inner = getattr(handler, kind)
        wrap = self._stream if inspect.isasyncgenfunction(inner) else self._single
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            wrap(inner, method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _single(self, inner: Behaviour, method: str) -> Behaviour:
        async def behaviour(request: Any, context: "Context[Any, Any]") -> Any:
            async with self._served(method, request, context) as call:
                response = await inner(request, context)
                call.saw(response)
                return response

        return behaviour

    def _stream(self, inner: Behaviour, method: str) -> Behaviour:
        async def behaviour(request: Any, context: "Context[Any, Any]") -> AsyncIterator[Any]:
            async with (
                self._served(method, request, context) as call,
                contextlib.aclosing(inner(request, context)) as responses,
            ):
                first = True
                async for response in responses:
                    if first:
                        call.saw(response)
                        first = False
                    yield response

        return behaviour

    @contextlib.asynccontextmanager
    async def _served(
        self, method: str, request: Any, context: "Context[Any, Any]"
    ) -> AsyncIterator[CallRecord]:
        """Admit a call or abort it, and write down how it ended."""
        call = CallRecord(method, peer=context.peer())
        started = time.monotonic()
        outcome = "OK"
        try:
            await self._admit(call, context)
            yield call
        except BaseException as error:
            outcome = _outcome(error, context)
            raise
        finally:
            call.saw(request)  # Only now: the server may have drawn the ids that it lacked.
            self._audit.write(call, outcome, time.monotonic() - started)

    async def _admit(self, call: CallRecord, context: "Context[Any, Any]") -> None:
        try:
            names = _in_certificate(context, "x509_subject_alternative_name")
            call.subject = next(iter(names or _in_certificate(context, "x509_common_name")), "")
            if self._client_names and self._client_names.isdisjoint(names):
                raise PermissionDenied("no name of the client's certificate is allowed here")
            caller = await self._authenticator.caller(context.invocation_metadata() or ())
            call.tenant, call.subject = caller.tenant, caller.subject or call.subject
            self._quota.take(caller.tenant)
        except OutriderError as error:
            await abort_with(context, error)
        set_caller(Caller(call.tenant, call.subject))


def _in_certificate(context: "Context[Any, Any]", what: str) -> list[str]:
    """What the client's verified certificate says, if it gave one."""
    values = (context.auth_context() or {}).get(what, ())
    return [value.decode("utf-8", "replace") for value in values]


def _outcome(error: BaseException, context: "Context[Any, Any]") -> str:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "CANCELLED"
    code = context.code() if isinstance(error, grpc.aio.AbortError) else None
    if isinstance(code, int):
        code = next((known for known in grpc.StatusCode if known.value[0] == code), None)
    return code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN"
