"""Runs the SM90 Gluon kernels of this operator on a CPU: their very source, every role a thread, one CTA after another.

What is real: control flow, the order of waits and arrivals, parities, bytes of shared memory with their swizzle, boxes
of TMA with zeros outside the tensor, and values. Asynchronous work happens at the worst time: copies land when issued,
products read shared memory only when waited for, stores leave when waited for. A wait that nothing can satisfy, a
product that is used before its wait, and an access outside a tensor are errors.

What is not: layouts of registers (every tensor is its logical value) and timing. Inline assembly is replaced by what it
computes, warp by warp where it votes.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.experimental.gluon import language as real
from triton.runtime.jit import JITFunction

DTYPES = {
    real.bfloat16: torch.bfloat16, real.float32: torch.float32, real.int32: torch.int32, real.int64: torch.int64,
    real.float8e4nv: torch.float8_e4m3fn, real.int16: torch.int16,
    real.int8: torch.int8,
}  # fmt: skip


class Deadlock(AssertionError):
    """Every role waits."""


# --- values -----------------------------------------------------------------------------------------------------


def raw(x: Any) -> Any:
    """The torch tensor or number behind a value; an error for a product that was not waited for."""
    if isinstance(x, V):
        assert not isinstance(x.t, Pending), "a product is used before its wait"
        return x.t
    return x


class Int(int):
    """A scalar that a kernel loaded."""

    def to(self, dtype: Any) -> Int:
        return self


class V:
    """A tensor in registers."""

    def __init__(self, t: Any) -> None:
        self.t = t

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> V:
        return V(raw(self).view(DTYPES[dtype]) if bitcast else raw(self).to(DTYPES[dtype]))

    def reshape(self, shape: list[int]) -> V:
        return V(raw(self).reshape(shape))

    def permute(self, order: list[int]) -> V:
        return V(raw(self).permute(order))


def _operator(name: str, swap: bool = False) -> Callable[..., V]:
    functions = {
        "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.true_divide, "le": torch.le,
        "floordiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "mod": torch.fmod, "lt": torch.lt,
        "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "and": torch.bitwise_and,
        "rshift": torch.bitwise_right_shift,
    }  # fmt: skip

    def apply(self: V, other: Any) -> V:
        a, b = raw(self), raw(other)
        b = (
            b
            if isinstance(b, torch.Tensor)
            else torch.tensor(b, dtype=None if isinstance(b, bool) else _like(a, b))
        )
        return V(functions[name](b, a) if swap else functions[name](a, b))

    return apply


def _like(a: torch.Tensor, b: Any) -> torch.dtype:
    return a.dtype if a.is_floating_point() or isinstance(b, int) else torch.float32


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "le",
    "lt",
    "gt",
    "ge",
    "eq",
    "and",
    "rshift",
):
    setattr(V, f"__{_name}__", _operator(_name))
    if _name in ("add", "sub", "mul", "truediv"):
        setattr(V, f"__r{_name}__", _operator(_name, swap=True))


@dataclass
class Ptr:
    """A pointer into the storage of a tensor, in elements."""

    tensor: torch.Tensor
    offset: Any = 0

    def __add__(self, other: Any) -> Ptr:
        return Ptr(self.tensor, self.offset + other if not isinstance(other, V) else other + self.offset)

    def flat(self) -> torch.Tensor:
        storage = self.tensor.untyped_storage()
        return torch.empty(0, dtype=self.tensor.dtype).set_(
            storage, 0, (storage.nbytes() // self.tensor.element_size(),)
        )

    def base(self) -> int:
        return self.tensor.storage_offset()


# --- shared memory ----------------------------------------------------------------------------------------------


class Smem:
    """A view of bytes: [slots, ...] of one layout, or one slot of it."""

    def __init__(
        self, data: torch.Tensor, dtype: torch.dtype, shape: list[int], layout: Any, start: int = 0
    ) -> None:
        self.data, self.dtype, self.shape, self.layout, self.start = data, dtype, shape, layout, start
        self.turned, self.columns = False, slice(None)

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Smem:
        return Smem(self.data, DTYPES[dtype], shape, layout, self.start)

    def index(self, i: int) -> Smem:
        assert 0 <= i < self.shape[0], f"slot {i} of {self.shape}"
        size = torch.Size(self.shape[1:]).numel() * self.dtype.itemsize
        return Smem(self.data, self.dtype, self.shape[1:], self.layout, self.start + i * size)

    def permute(self, order: list[int]) -> Smem:
        view = Smem(self.data, self.dtype, self.shape, self.layout, self.start)
        view.turned = not self.turned
        assert order == [1, 0]
        return view

    def slice(self, start: int, length: int, dim: int) -> Smem:
        view = Smem(self.data, self.dtype, self.shape, self.layout, self.start)
        assert dim == 1 and len(self.shape) == 2 and 0 <= start <= start + length <= self.shape[1]
        view.columns = slice(start, start + length)
        return view

    def addresses(self) -> torch.Tensor:
        """Byte address of each element [rows, cols]: 128-byte pieces along cols, 16-byte chunks exchanged by row."""
        cols, size = self.shape[-1], self.dtype.itemsize
        rows = torch.Size(self.shape).numel() // cols
        byte = torch.arange(cols) * size
        row = torch.arange(rows)[:, None]
        if not isinstance(self.layout, real.NVMMASharedLayout):
            return self.start + row * cols * size + byte
        assert self.layout.swizzle_byte_width == 128 and self.layout.element_bitwidth == 8 * size
        assert self.start % 1024 == 0, "a swizzled tile starts at a multiple of 1024 bytes"
        piece, inside = byte // 128, byte % 128
        chunk = (inside // 16) ^ (row % 8)
        return self.start + piece * rows * 128 + row * 128 + chunk * 16 + inside % 16

    def read(self) -> torch.Tensor:
        first = self.addresses()[..., None] + torch.arange(self.dtype.itemsize)
        value = self.data[first].reshape(*first.shape[:-1], -1).view(self.dtype).squeeze(-1)
        return value.T if self.turned else value

    def write(self, value: torch.Tensor) -> None:
        first = self.addresses()[:, self.columns, None] + torch.arange(self.dtype.itemsize)
        value = value.reshape(first.shape[:2]).to(self.dtype).contiguous()
        self.data[first] = value.view(torch.uint8).reshape(first.shape)

    def load(self, layout: Any) -> V:
        return V(self.read().clone())

    def store(self, value: V) -> None:
        assert raw(value).dtype == self.dtype
        self.write(raw(value))


@dataclass
class Desc:
    """A TMA descriptor: a strided tensor and the box that one copy moves."""

    tensor: torch.Tensor
    box: list[int]

    def window(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """(inside the tensor, inside the box); both empty where the box lies outside."""
        outer, inner = [], []
        for start, length, size in zip(at, self.box, self.tensor.shape, strict=True):
            assert -(2**31) <= start < 2**31
            first, last = max(start, 0), max(min(start + length, size), max(start, 0))
            first = min(first, last)
            outer.append(slice(first, last))
            inner.append(slice(first - start if last > first else 0, last - start if last > first else 0))
        return tuple(outer), tuple(inner)


# --- one CTA ----------------------------------------------------------------------------------------------------


@dataclass
class Barrier:
    count: int = 0
    pending: int = 0
    bytes: int = 0
    phase: int = 0


class BarrierArray:
    def __init__(self, shape: list[int]) -> None:
        self.bars = [Barrier() for _ in range(shape[0])]

    def index(self, i: int) -> Barrier:
        return self.bars[i]


@dataclass
class Pending:
    """A product that has been issued."""

    a: Any
    b: Smem
    acc: Any
    fresh: bool

    def compute(self) -> torch.Tensor:
        a = self.a.read() if isinstance(self.a, Smem) else raw(self.a)
        product = a.float() @ self.b.read().float()
        return product if self.fresh else raw(self.acc) + product


class Cta:
    """Roles of a CTA as threads of which one runs at a time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.turn = threading.Condition()
        self.waiting = 0
        self.alive = 0
        self.failure: BaseException | None = None
        self.local = threading.local()

    def wait(self, bar: Any, parity: int) -> None:
        bar = bar.index(0) if isinstance(bar, BarrierArray) else bar
        while bar.phase == parity:
            self.waiting += 1  # since the last change, which sets it to 0
            if self.failure is None and self.waiting == self.alive:
                self.failure = Deadlock(f"all {self.alive} roles of CTA {self.number} wait")
                self.turn.notify_all()
            if self.failure is not None:
                raise Deadlock("another role failed")
            self.turn.wait()

    def arrive(self, bar: Any, count: int, num_bytes: int) -> None:
        bar = bar.index(0) if isinstance(bar, BarrierArray) else bar
        bar.pending -= count
        bar.bytes += num_bytes
        assert bar.pending >= 0, "more arrivals than the barrier counts"
        if bar.pending == 0 and bar.bytes == 0:
            bar.phase ^= 1
            bar.pending = bar.count
            self.waiting = 0
            self.turn.notify_all()

    def run(self, roles: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        self.alive = len(roles)

        def role(function: Callable[..., None], args: tuple[Any, ...]) -> None:
            with self.turn:
                self.local.products, self.local.stores = [], []
                try:
                    function(*args)
                    assert not self.local.products and not self.local.stores, (
                        "a role ends with work under way"
                    )
                except BaseException as error:
                    self.failure = self.failure or error
                self.alive -= 1
                self.waiting = 0
                self.turn.notify_all()

        threads = [threading.Thread(target=role, args=x) for x in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure


@dataclass
class Machine:
    """What kernel code finds in place of `gl`, `mbarrier`, `tma` and the rest."""

    cta: Cta = field(default_factory=lambda: Cta(0))
    instead: dict[str, Callable[..., Any]] = field(default_factory=dict)
    memo: dict[int, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:  # layouts, dtypes
        if name.endswith("Layout"):
            return (lambda *a, **k: None) if name != "NVMMASharedLayout" else real.NVMMASharedLayout
        return getattr(real, name)

    static_range = staticmethod(range)

    def program_id(self, axis: int) -> int:
        return self.cta.number

    @staticmethod
    def load(ptr: Ptr, mask: Any = None, other: Any = None) -> Any:
        flat, base = ptr.flat(), ptr.base()
        if not isinstance(ptr.offset, V):
            if mask is not None and not bool(raw(mask)):
                return Int(other)
            assert 0 <= base + ptr.offset < flat.numel(), "a load outside its tensor"
            value = flat[base + ptr.offset].item()
            return Int(value) if isinstance(value, int) else value
        at = raw(ptr.offset).long() + base
        live = torch.ones_like(at, dtype=torch.bool) if mask is None else raw(mask).expand(at.shape)
        assert bool(((at >= 0) & (at < flat.numel()) | ~live).all()), "a load outside its tensor"
        fill = torch.full(at.shape, 0 if other is None else other, dtype=flat.dtype)
        return V(torch.where(live, flat[at.clamp(0, flat.numel() - 1)], fill))

    @staticmethod
    def store(ptr: Ptr, value: Any, mask: V | None = None) -> None:
        flat = ptr.flat()
        if not isinstance(ptr.offset, V):
            assert mask is None and 0 <= ptr.base() + ptr.offset < flat.numel(), "a store outside its tensor"
            flat[ptr.base() + ptr.offset] = value
            return
        at = raw(ptr.offset).long() + ptr.base()
        live = raw(mask).expand(at.shape)
        assert bool(((at >= 0) & (at < flat.numel()))[live].all()), "a store outside its tensor"
        flat[at[live]] = raw(value).expand(at.shape)[live]

    @staticmethod
    def arange(first: int, last: int, layout: Any) -> V:
        return V(torch.arange(first, last, dtype=torch.int32))

    @staticmethod
    def full(shape: list[int], value: Any, dtype: Any, layout: Any) -> V:
        return V(torch.full(shape, value, dtype=DTYPES[dtype]))

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        if not isinstance(condition, V):
            return a if condition else b
        x, y = raw(a), raw(b)
        like = next(t for t in (x, y) if isinstance(t, torch.Tensor))
        x, y = (t if isinstance(t, torch.Tensor) else torch.tensor(t, dtype=like.dtype) for t in (x, y))
        return V(torch.where(raw(condition), x, y))

    @staticmethod
    def _pick(a: Any, b: Any, scalar: Any, tensor: Any) -> Any:
        x, y = raw(a), raw(b)
        if not isinstance(x, torch.Tensor) and not isinstance(y, torch.Tensor):
            return Int(scalar(x, y))
        like = x if isinstance(x, torch.Tensor) else y
        return V(
            tensor(*(t if isinstance(t, torch.Tensor) else torch.tensor(t, dtype=like.dtype) for t in (x, y)))
        )

    def maximum(self, a: Any, b: Any) -> Any:
        return self._pick(a, b, max, torch.fmax)

    def minimum(self, a: Any, b: Any) -> Any:
        return self._pick(a, b, min, torch.fmin)

    @staticmethod
    def exp2(x: V) -> V:
        return V(torch.exp2(raw(x)))

    @staticmethod
    def log2(x: V) -> V:
        return V(torch.log2(raw(x)))

    @staticmethod
    def max(x: V, axis: int) -> V:
        t = raw(x)
        return V(t.masked_fill(t.isnan(), -torch.inf).amax(axis))

    @staticmethod
    def sum(x: V, axis: int) -> V:
        return V(raw(x).sum(axis))

    @staticmethod
    def split(x: V) -> tuple[V, V]:
        return V(raw(x)[..., 0]), V(raw(x)[..., 1])

    @staticmethod
    def join(a: V, b: V) -> V:
        return V(torch.stack([raw(a), raw(b)], -1))

    @staticmethod
    def expand_dims(x: V, axis: int) -> V:
        return V(raw(x).unsqueeze(axis))

    @staticmethod
    def convert_layout(x: V, layout: Any) -> V:
        return V(raw(x))

    @staticmethod
    def inline_asm_elementwise(text: str, constraints: str, args: list[V], **_: Any) -> V:
        values = [raw(x) for x in args]
        if text.startswith("cvt.rn.bf16x2"):
            return V(values[0].bfloat16())
        if "e4m3x2.f32" in text:
            return V(torch.stack(_e4m3(values), -1).view(torch.int32).squeeze(-1))
        if text.startswith("prmt"):
            return V(_unpair(values[0]))
        if "shfl" in text:
            return V(_lazy_max(*values))
        return V(values[0] if len(values) == 1 else values[0] * values[1])

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        if layout == "barriers":
            return BarrierArray(shape)
        size = torch.Size(shape).numel() * DTYPES[dtype].itemsize
        return Smem(torch.full((size,), 0xFF, dtype=torch.uint8), DTYPES[dtype], shape, layout)

    def warp_specialize(self, roles: Any, warps: list[int], registers: list[int]) -> None:
        self.cta.run(roles)

    # mbarrier
    @staticmethod
    def MBarrierLayout() -> str:
        return "barriers"

    @staticmethod
    def init(bar: Any, count: int) -> None:
        bar = bar.index(0) if isinstance(bar, BarrierArray) else bar
        bar.count = bar.pending = count

    def wait(self, bar: Any, parity: int) -> None:
        self.cta.wait(bar, parity)

    def expect(self, bar: Any, num_bytes: int) -> None:
        self.cta.arrive(bar, 1, num_bytes)

    def arrive(self, bar: Any, count: int) -> None:
        self.cta.arrive(bar, count, 0)

    # tma
    def tma_load(self, desc: Desc, at: list[int], bar: Any, smem: Smem) -> None:
        assert list(smem.shape) == desc.box
        outer, inner = desc.window(at)
        box = torch.zeros(desc.box, dtype=torch.uint8 if desc.tensor.element_size() == 1 else torch.int16)
        source = desc.tensor.view(box.dtype)
        box[inner] = source[outer]
        smem.write(box.view(smem.dtype))
        self.cta.arrive(bar, 0, -box.numel() * box.element_size())

    def async_copy_shared_to_global(self, desc: Desc, at: list[int], smem: Smem) -> None:
        assert list(smem.shape) == desc.box
        self.cta.local.stores.append((desc, at, smem))

    def store_wait(self, left: int) -> None:
        for desc, at, smem in self.cta.local.stores:
            outer, inner = desc.window(at)
            desc.tensor[outer] = smem.read().reshape(desc.box)[inner]
        self.cta.local.stores.clear()

    # wgmma
    def warpgroup_mma(self, a: Any, b: Smem, acc: V, *, use_acc: bool = True, is_async: bool = True) -> V:
        product = V(Pending(a, b, acc if use_acc else None, not use_acc))
        self.cta.local.products.append(product)
        return product

    def warpgroup_mma_wait(self, left: int, deps: tuple[V, ...]) -> Any:
        products = self.cta.local.products
        while len(products) > left:
            product = products.pop(0)
            product.t = product.t.compute()
        return deps[0] if len(deps) == 1 else deps


def _e4m3(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Bytes of e4m3."""
    return [x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8) for x in values]


def _unpair(x: torch.Tensor) -> torch.Tensor:
    """int16 [keys, pairs of d]; registers of a thread: keys k, k + 1, k + 8, k + 9 of each 16, k even."""
    n = len(x) // 16
    low, high = (x.int() & 0xFF).view(n, 16, -1), ((x.int() >> 8) & 0xFF).view(n, 16, -1)
    out = torch.empty_like(low)
    for k in (0, 2, 4, 6):
        four = [k, k + 1, k + 8, k + 9]
        for place, source in ((0, low), (2, high)):
            out[:, four[place]] = source[:, k] | source[:, k + 1] << 8
            out[:, four[place + 1]] = source[:, k + 8] | source[:, k + 9] << 8
    return torch.where(out >= 0x8000, out - 0x10000, out).short().view(len(x), -1)


def _lazy_max(lane: torch.Tensor, m: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """The maximum of a row replaced for all 16 rows of a warp, or for none."""
    vote = (lane > m + threshold).view(4, 64).any(1).repeat_interleave(16)[:, None]
    whole = torch.fmax(lane, m).amax(1, keepdim=True).expand(-1, 4)
    return torch.where(vote, whole, m)


# --- kernels ----------------------------------------------------------------------------------------------------


def emulate(
    kernel: JITFunction, grid: int, *args: Any, instead: dict[str, Callable[..., Any]] | None = None
) -> None:
    """Run a kernel of `grid` CTAs with `Desc`, `Ptr` and numbers as arguments, the config last; functions of the names
    in `instead` are replaced."""
    for number in range(grid):
        machine = Machine(Cta(number), instead or {})
        _function(kernel, machine)(*args)


def _function(jitted: JITFunction, machine: Machine) -> Callable[..., Any]:
    if id(jitted) in machine.memo:
        return machine.memo[id(jitted)]
    fn = jitted.fn
    space: dict[str, Any] = {"__builtins__": __builtins__}
    made = machine.memo[id(jitted)] = types.FunctionType(fn.__code__, space, fn.__name__, fn.__defaults__)
    names = ("tma_load", "warpgroup_mma", "warpgroup_mma_wait")
    nothing = ("fence_async_shared", "pdl_wait", "pdl_launch", "barrier")
    for name in fn.__code__.co_names:
        value = fn.__globals__.get(name)
        if name in machine.instead:
            space[name] = machine.instead[name]
        elif name in ("gl", "mbarrier", "tma"):
            space[name] = machine
        elif name in names:
            space[name] = getattr(machine, name)
        elif name in nothing:
            space[name] = lambda *a: None
        elif isinstance(value, JITFunction):
            space[name] = _function(value, machine)
        elif isinstance(value, real.constexpr):
            space[name] = value.value
    return made
