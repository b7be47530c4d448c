"""Generate calls in the words of OpenTelemetry's GenAI conventions; nothing of their content."""

from outrider.telemetry.spans import Attribute
from outrider.v1 import generation_pb2

PROVIDER = "outrider"
CHAT, COMPLETION = "chat", "text_completion"
_MAX_INT = (1 << 63) - 1
"""What an attribute can hold; a seed may be larger."""


def operation_of(request: generation_pb2.GenerateRequest) -> str:
    return CHAT if any(part.HasField("chat") for part in request.prompt) else COMPLETION


def span_name(operation: str, model: str) -> str:
    return f"{operation} {model}".strip()


def request_attributes(
    request: generation_pb2.GenerateRequest, operation: str, model: str
) -> dict[str, Attribute]:
    """What a request for a model asks for."""
    found: dict[str, Attribute] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.stream": True,
        "rpc.system.name": "grpc",
        "rpc.method": "outrider.v1.GenerationService/Generate",
    }
    if model:
        found["gen_ai.request.model"] = model
    if request.stop.HasField("max_tokens"):
        found["gen_ai.request.max_tokens"] = request.stop.max_tokens
    sampling = request.sampling
    for name in ("temperature", "top_p", "top_k", "seed"):
        if sampling.HasField(name) and getattr(sampling, name) <= _MAX_INT:
            found[f"gen_ai.request.{name}"] = getattr(sampling, name)
    return found


def usage_attributes(input_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """What it took."""
    return {
        "gen_ai.usage.input_tokens": input_tokens,
        "gen_ai.usage.cache_read.input_tokens": cached_tokens,
        "gen_ai.usage.output_tokens": output_tokens,
    }


def finish_attributes(finish_reason: str) -> dict[str, Attribute]:
    return {"gen_ai.response.finish_reasons": (finish_reason,)}
