"""What values.yaml says about each value: the comment above its key."""

import re

Path = tuple[str, ...]

_KEY = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z0-9_.-]+):(?: |$)")


def comments_of(text: str) -> dict[Path, str]:
    """By path, the comment that stands right above a key, its lines joined."""
    found: dict[Path, str] = {}
    open_keys: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.removeprefix("#").strip())
            continue
        if key := _KEY.match(line):
            indent = len(key["indent"])
            open_keys = [pair for pair in open_keys if pair[0] < indent]
            open_keys.append((indent, key["key"]))
            if comment:
                found[tuple(name for _, name in open_keys)] = " ".join(comment)
        comment = []
    return found
