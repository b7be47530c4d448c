"""Fixtures that several kinds of tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny models: a target, drafts of it, and ones that do not fit it."""
    from tiny import make_model

    root = tmp_path_factory.mktemp("models")
    return {
        "target": make_model(root / "target"),
        "draft": make_model(root / "draft", noise=0.02),
        "bad-draft": make_model(root / "bad-draft", noise=0.3),
        "short-draft": make_model(root / "short-draft", noise=0.02, context_length=96),
        "padded-target": make_model(root / "padded-target", padded_vocab=320),
        "other-tokenizer": make_model(root / "other-tokenizer", extra_tokens=("the", "and")),
    }
