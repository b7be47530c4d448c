"""How much a synthetic target and its draft agree, by eps: for targets that fit on no card, since
one layer is made at a time.

    python benchmarks/synthetic_overlap.py --target 70b --eps 0.002,0.003,0.004,0.005
    python benchmarks/synthetic_overlap.py --target tiny --eps 0.01,0.5 --device cpu

Random tokens in one pass, T=1: the mean overlap (sum of the lesser of both probabilities) and how
often both have the same likeliest token. The weights are distributed as those of
outrider.engine.synthetic, not the same ones.
"""

import argparse

import torch
from torch import Tensor
from torch.nn import functional

from outrider.engine.synthetic import SHAPES, Shape

_ROPE_BASE = 10_000.0
_NORM_EPS = 1e-6


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=sorted(SHAPES), default="70b")
    parser.add_argument(
        "--eps", type=lambda text: [float(e) for e in text.split(",")], default=[0.01]
    )
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    shape = SHAPES[args.target]
    torch.manual_seed(0)
    width = shape.hidden // shape.copies
    with torch.device(args.device):
        embeddings = torch.randn(shape.vocab, width)
        head = (0.12 * torch.randn(shape.vocab, width)).bfloat16()
        ids = torch.randint(shape.vocab, (args.tokens,))
        start = embeddings[ids].repeat(1, shape.copies).bfloat16()
        hidden = {eps: start for eps in args.eps}
        for _ in range(shape.layers):
            weights = _layer(shape)
            hidden = {eps: _through(shape, weights, x, eps) for eps, x in hidden.items()}
        draft = (_norm(embeddings[ids].bfloat16()) @ head.T).float()
        whole = head.repeat(1, shape.copies) / shape.copies
        for eps, x in hidden.items():
            target = (_norm(x) @ whole.T).float()
            lesser = torch.minimum(target.softmax(-1), draft.softmax(-1))
            same = (target.argmax(-1) == draft.argmax(-1)).float()
            print(f"eps {eps:g}: overlap {lesser.sum(-1).mean():.3f}, greedy {same.mean():.3f}")


def _layer(shape: Shape) -> list[Tensor]:
    """Query, key, value, output, gate, up and down projections."""
    own, shared = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = [
        (own, shape.hidden),
        (shared, shape.hidden),
        (shared, shape.hidden),
        (shape.hidden, own),
        (shape.intermediate, shape.hidden),
        (shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
    ]
    return [torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02) for size in sizes]


def _through(
    shape: Shape, weights: list[Tensor], x: Tensor, eps: float
) -> Tensor:  # [tokens, hidden]
    query, key, value, output, gate, up, down = weights
    normed = _norm(x)
    q, k, v = (
        (normed @ weight.T).view(len(x), -1, shape.head_dim) for weight in (query, key, value)
    )
    attended = functional.scaled_dot_product_attention(
        _rotated(q).transpose(0, 1)[None],
        _rotated(k).transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=True,
    )
    x = x + (attended[0].transpose(0, 1).reshape(len(x), -1) @ output.T) * eps
    normed = _norm(x)
    return x + ((functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T) * eps


def _norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x.float(), (x.shape[-1],), eps=_NORM_EPS).bfloat16()


def _rotated(x: Tensor) -> Tensor:  # [tokens, heads, head_dim]
    size = x.shape[-1]
    rates = _ROPE_BASE ** (-torch.arange(0, size, 2) / size)
    angles = (torch.arange(len(x))[:, None] * rates).repeat(1, 2)[:, None]
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x.float() * angles.cos() + turned * angles.sin()).bfloat16()


if __name__ == "__main__":
    main()
