"""`transformers` generate as a process that answers JSON lines, for `outrider bench`.

It writes {"dtype", "device", "transformers", "torch"} when loaded. Each line on stdin,
{"prompt_ids", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "eos_token_ids"}, is
answered by {"token_ids", "ttft_s", "last_token_s", "total_s"} or {"error"}; an end of stdin ends
it. Tokens are timed one by one as generate hands them out.
"""

import argparse
import json
import os
import sys
import time
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from outrider.engine import model_files


class TokenClock(BaseStreamer):
    """Takes the time at which each token comes; the prompt comes first and is skipped."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.times += [time.perf_counter()] * value.numel()
        self._prompt_seen = True

    def end(self) -> None:
        pass


def answer(model: Any, assistant: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Generate one completion, batch 1, with nothing of the model's own generation config."""
    prompt = torch.tensor([request["prompt_ids"]], device=model.device)  # [1, prompt]
    clock = TokenClock()
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=_config(request),
            streamer=clock,
            **({"assistant_model": assistant} if assistant is not None else {}),
        )
    total = time.perf_counter() - started
    token_ids = output[0, prompt.shape[1] :].tolist()
    return {
        "token_ids": token_ids,
        "ttft_s": clock.times[0] - started if clock.times else None,
        "last_token_s": clock.times[-1] - started if clock.times else None,
        "total_s": total,
    }


def _config(request: dict[str, Any]) -> Any:
    eos = request["eos_token_ids"]
    config: Any = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=request["max_tokens"] or 512,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
        do_sample=request["temperature"] > 0,
    )
    if config.do_sample:
        torch.manual_seed(request["seed"])
        config.temperature = request["temperature"]
        config.top_k = request["top_k"]
        config.top_p = request["top_p"]
        config.min_p = request["min_p"] or None
    return config


def _load(ref: str, tier: str, dtype: str) -> Any:
    """The files that a worker of `tier` loads, in transformers as it comes: no engine of ours."""
    files = model_files.resolve(ref, tier=tier, cache_dir=model_files.default_cache_dir())
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        files.folder, dtype=getattr(torch, dtype), trust_remote_code=False
    )
    if torch.cuda.is_available():
        model.to("cuda")
    # generate() fills what a request leaves open from here: leave nothing there.
    model.generation_config = transformers.GenerationConfig()  # type: ignore[no-untyped-call]
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--assistant", default="")
    parser.add_argument("--k", type=int, default=0)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What libraries print must not mix with the answers.
    if args.threads:
        torch.set_num_threads(args.threads)
    model = _load(args.model, "target", args.dtype)
    assistant = _load(args.assistant, "draft", args.dtype) if args.assistant else None
    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = args.k or 4
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    device = {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
    answers.write(json.dumps({**device, **versions}) + "\n")
    for line in sys.stdin:
        try:
            reply = answer(model, assistant, json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
