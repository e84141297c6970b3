"""Public helpers for testing operators: accuracy, poisoned outputs, paged caches.

Nothing here depends on an operator; everything runs on a CPU and on a GPU.
"""

from hpc.testing.accuracy import Accuracy, assert_close, measure
from hpc.testing.buffers import Guarded, fill_nan, guarded, poisoned
from hpc.testing.paged import PagedCache, make_paged_cache, quantize_per_token_head

__all__ = [
    "Accuracy",
    "Guarded",
    "PagedCache",
    "assert_close",
    "fill_nan",
    "guarded",
    "make_paged_cache",
    "measure",
    "poisoned",
    "quantize_per_token_head",
]
