"""What is compared: prompts answered by the target, or a text that was given, as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from outrider.engine.engine import Runner
from outrider.engine.loaded_model import TokenizerFiles
from outrider.engine.rows import Draw, Rows
from outrider.errors import Unsupported
from outrider.planner.costs import blocks_for
from outrider.types import GenerationSpec, SamplingParams

CHUNK_ROWS = 64
"""Rows of a pass."""

AT_ONCE = 8
"""Texts that are written together."""

_STEPS = 8
"""Tokens that are decoded before ends of text are looked for."""


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids of a log; what stands from `start` on is compared, if the text was given."""

    id: str
    category: str
    token_ids: tuple[int, ...]
    start: int


class PromptTokenizer:
    """Prompts to token ids as the orchestrator makes them."""

    def __init__(self, files: TokenizerFiles) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = Tokenizer.from_str(files.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        specials = {"bos_token": files.bos_token, "eos_token": files.eos_token}
        self._chat: Any = None
        if files.chat_template is not None:
            self._chat = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
                tokenizer_object=Tokenizer.from_str(files.tokenizer_json),
                chat_template=files.chat_template,
                **{name: token for name, token in specials.items() if token is not None},
            )

    def encode(self, text: str, *, chat: bool) -> list[int]:
        """Raises Unsupported for chat without a template."""
        if not chat:
            return list(self._tokenizer.encode(text).ids)
        if self._chat is None:
            raise Unsupported(
                "the target has no chat template; give prompts in HumanEval's format, or a plain "
                "text",
                field="text",
            )
        rendered = self._chat.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return list(self._tokenizer.encode(rendered, add_special_tokens=False).ids)


def windows(token_ids: Sequence[int], length: int, count: int) -> list[Text]:
    """A given text in pieces of at most `length` tokens, `count` at most."""
    starts = range(0, len(token_ids) - 1, length)
    pieces = [token_ids[start : start + length] for start in starts][:count]
    return [
        Text(str(number), "text", tuple(piece), 1)
        for number, piece in enumerate(pieces, 1)
        if len(piece) > 1
    ]


@dataclass(slots=True)
class _Writing:
    """A text that grows."""

    number: int
    log: list[int]
    blocks: list[int]
    spec: GenerationSpec


def write(
    runner: Runner,
    prompts: Sequence[Text],
    samplings: Sequence[SamplingParams],
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
) -> list[Text]:
    """The prompts with what the model says to them, decoded plainly, all at once.

    KV lies in blocks from 0 on, text after text: `blocks_of` says how many each has.
    """
    writings, first = [], 0
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        count = blocks_of(len(prompt.token_ids), max_tokens)
        blocks = list(range(first, first + count))
        first += count
        writings.append(_Writing(number, list(prompt.token_ids), blocks, GenerationSpec(sampling)))
    for writing in writings:
        prefill(runner, writing.log[:-1], writing.blocks)
    going, left = list(writings), max_tokens
    while going and left > 0:
        steps = min(_STEPS, left)
        left -= steps
        batch = [
            Rows(w.log[-1:], len(w.log) - 1, w.blocks, 1, Draw(w.spec, len(w.log), steps))
            for w in going
        ]
        drawn = runner.run(batch).drawn
        for writing, tokens in zip(list(going), drawn, strict=True):
            assert tokens is not None
            ended = _append(writing.log, tokens.token_ids, stop_ids)
            if ended:
                going.remove(writing)
    return [replace(prompts[w.number], token_ids=tuple(w.log)) for w in writings]


def blocks_of(prompt_len: int, max_tokens: int) -> int:
    """KV blocks of a prompt and its answer."""
    return blocks_for(prompt_len + max_tokens)


def prefill(runner: Runner, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
    """Compute KV from the start on."""
    for start in range(0, len(token_ids), CHUNK_ROWS):
        runner.run([Rows(token_ids[start : start + CHUNK_ROWS], start, blocks, 0)])


def _append(log: list[int], token_ids: Sequence[int], stop_ids: Sequence[int]) -> bool:
    """Add tokens up to the first that ends the text; whether there was one."""
    for token in token_ids:
        log.append(token)
        if token in stop_ids:
            return True
    return False
