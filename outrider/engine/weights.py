"""What tells the weights of two models apart, those of one that was trained on included: the
fingerprint that `Info` tells."""

import hashlib
import json
from pathlib import Path

from outrider.errors import FailedPrecondition

_PIECES = 16
_PIECE_BYTES = 512
_MAX_HEADER = 1 << 26


def weights_digest(folder: Path) -> str:
    """SHA-256 over the configuration and, of every tensor of a model folder, its description and
    pieces spread over all of it: training touches more of a tensor than lies between two pieces,
    even where a checkpoint's head (embeddings, often) stays. Reads a few megabytes. Raises
    FailedPrecondition."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode())
        _add_file(digest, path)
    return digest.hexdigest()


def _add_file(digest: "hashlib._Hash", path: Path) -> None:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER:
            raise FailedPrecondition(f"{path} is no safetensors file")
        header = file.read(size)
        digest.update(header)
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        for name in sorted(tensors):
            start, stop = tensors[name]["data_offsets"]
            for piece in range(_PIECES):
                offset = start + (stop - start) * piece // _PIECES
                file.seek(8 + size + offset)
                digest.update(file.read(min(_PIECE_BYTES, stop - offset)))
