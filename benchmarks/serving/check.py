"""Agreement of two sets of backends on identical weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LENS = (1, 33, 64, 65, 200, 511, 1024, 2050)  # ends of pages and tiles, and between them
CUT = 100  # tokens of the first of two passes over a prompt
CHUNKED_LENS = (101, 164, 200, 257, 511, 1024, 1500, 2050)


def compare(reference: Path, free: Path, forced: Path) -> dict[str, Any]:
    """How far a candidate is from a reference.

    Args:
        reference: greedy tokens and first logits of the reference.
        free: those of the candidate, feeding on its own tokens.
        forced: those of the candidate fed with the reference's tokens, so that each step compares like with like.

    Returns:
        agreement: of the forced choices, over requests and steps.
        cosine, cosine_min: of the logits of the first steps, forced.
        relative_error: norm of the difference of these logits over the norm of the reference's.
        flipped_margin: largest distance of the reference's first two logits where the choice differs, and the median
            distance of all, for comparison: a flip at a large margin is an error, at a small one a rounding.
        same_prefix: tokens, mean over requests, until the free run differs.
    """
    import torch

    ref, own, fed = (torch.load(path) for path in (reference, free, forced))
    agree = ref["tokens"] == fed["tokens"]
    a, b = ref["logits"].double(), fed["logits"].double()
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1)
    top = a.topk(2, -1).values
    margin = top[..., 0] - top[..., 1]
    flipped = margin[~agree[:, : margin.shape[1]]]
    same = (ref["tokens"] == own["tokens"]).long().cumprod(1).sum(1)
    return {
        "requests": agree.shape[0], "steps": agree.shape[1], "agreement": round(float(agree.float().mean()), 5),
        "cosine": round(float(cosine.mean()), 6), "cosine_min": round(float(cosine.min()), 6),
        "relative_error": round(float((a - b).norm() / a.norm()), 5),
        "flipped_margin": round(float(flipped.max()), 4) if flipped.numel() else 0.0,
        "median_margin": round(float(margin.median()), 4), "same_prefix": round(float(same.float().mean()), 2),
        "finite": bool(torch.isfinite(a).all() and torch.isfinite(b).all()),
    }  # fmt: skip


def identical(first: Path, second: Path) -> bool:
    """Whether tokens and logits of two runs have the same bits."""
    import torch

    a, b = torch.load(first), torch.load(second)
    return all(torch.equal(a[key], b[key]) for key in ("tokens", "logits"))
