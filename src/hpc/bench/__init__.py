"""One bench for every operator: check, time against rivals, compare with the hardware's floor, record.

    from hpc.bench import run
    rows = run(op, op.cases("bench"), device="cuda", json_path="out.jsonl")

Importing this package imports neither triton nor rich.
"""

from hpc.bench.check import CheckRow, check
from hpc.bench.providers import CannotRun, Provider
from hpc.bench.results import Env, Row, Writer, latest, read, result_path
from hpc.bench.roofline import Rates, floor_us, rates
from hpc.bench.runner import Event, run
from hpc.bench.timer import Timing, host_time_us, make_clock, time_interleaved

__all__ = [
    "CannotRun",
    "CheckRow",
    "Env",
    "Event",
    "Provider",
    "Rates",
    "Row",
    "Timing",
    "Writer",
    "check",
    "floor_us",
    "host_time_us",
    "latest",
    "make_clock",
    "rates",
    "read",
    "result_path",
    "run",
    "time_interleaved",
]
