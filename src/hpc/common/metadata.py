"""One C++ call that compares the metadata of many tensors with what it was: 0.1 us a tensor.

Reading shape, stride, dtype and device of a tensor in Python takes 0.5 us, and a call may have ten tensors. torch's
compiler has such a check for its own guards. It is no public interface: where it is missing or changed, callers compare
in Python, which decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_TensorGuards: Any
try:
    from torch._C._dynamo.guards import TensorGuards as _TensorGuards
except ImportError:
    _TensorGuards = None


def metadata_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A function of as many tensors: True only if each has the type, dtype, device, shape and strides of its twin here.

    It holds none of them, and may say False without need (in another autograd mode). None if torch lacks such a check.
    """
    if _TensorGuards is None:
        return None
    try:
        guards = _TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        )
        check: Callable[..., bool] = guards.check
        return check if check(*tensors) is True else None
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None
