"""How a quantised attention call is scaled."""

from enum import Enum


class QuantType(Enum):
    """Granularity of the dequantisation scales of queries, keys and values (real = stored * scale)."""

    QPERTOKEN_PERHEAD_KPERTOKEN_PERHEAD_VPERHEAD = 0
    QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR = 1
    QPERTENSOR_KPERTENSOR_VPERTENSOR = 2
    QPERTOKEN_PERHEAD_KPERTOKEN_PERHEAD_VPERHEAD_QKHADAMARD = 3
