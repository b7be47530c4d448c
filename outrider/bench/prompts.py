"""Prompt files of Spec-Bench and HumanEval, read as they are, and an even choice of prompts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from outrider.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt: a user message when `chat`, raw text otherwise."""

    id: str
    category: str
    text: str
    chat: bool


def default_prompts() -> Path:
    """The Spec-Bench file that is shipped."""
    return Path(str(resources.files("outrider.assets").joinpath("prompts/spec_bench_a.jsonl")))


def read_prompts(path: Path) -> tuple[BenchPrompt, ...]:
    """All prompts of a JSON-lines file; InvalidArgument names the line that is neither format."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read {path}: {error}", field="prompts") from error
    prompts = tuple(
        _parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()
    )
    if not prompts:
        raise InvalidArgument(f"{path} holds no prompts", field="prompts")
    return prompts


def select_evenly(prompts: Sequence[BenchPrompt], limit: int | None) -> tuple[BenchPrompt, ...]:
    """`limit` prompts in rounds of one a category; a last, partial round takes every n-th one."""
    by_category: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    left = len(prompts) if limit is None else min(limit, len(prompts))
    chosen: list[BenchPrompt] = []
    depth = 0
    while left:
        row = [group[depth] for group in by_category.values() if depth < len(group)]
        taken = min(left, len(row))
        chosen += [row[i * len(row) // taken] for i in range(taken)]
        left -= taken
        depth += 1
    return tuple(chosen)


def _parse(line: str, place: str) -> BenchPrompt:
    try:
        row: Any = json.loads(line)
        if "turns" in row:
            text = row["turns"][0]
            prompt = BenchPrompt(str(row["question_id"]), str(row["category"]), text, chat=True)
        else:
            prompt = BenchPrompt(str(row["task_id"]), "code", row["prompt"], chat=False)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise InvalidArgument(
            f"{place} is neither Spec-Bench's format (question_id, category, turns) nor "
            f"HumanEval's (task_id, prompt): {error!r}",
            field="prompts",
        ) from error
    if not isinstance(prompt.text, str) or not prompt.text:
        raise InvalidArgument(f"{place} has an empty prompt", field="prompts")
    return prompt
