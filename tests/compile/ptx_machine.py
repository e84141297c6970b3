"""A machine that executes the PTX of a compiled kernel on the CPU, for kernels that Triton's interpreter does not know.

One CTA at a time, its warps one after the other until each blocks. Timing is chosen to hurt: a TMA copy is complete as
soon as it is issued, a `wgmma` reads its operands only when a wait demands its result. So a stage that is handed back
too early is overwritten before it is read, and a barrier that nobody completes is a `Deadlock`. Registers hold raw
bits, 32 lanes of a warp in one array. Branches must be uniform in a warp, as Triton makes them, or jump over some code.

It knows the instructions of the kernels tested with it, and says so when it meets another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

U64 = np.uint64
LOW = U64(0xFFFFFFFF)
LANES = np.arange(32)
SHARED_BYTES = 232448
POISON = U64(0x7FC0DEAD)  # of registers that nobody has written: a NaN
TENSOR_MAP = 0x7000_0000_0000_0000  # "address" of a tensor map: this plus the number of its parameter
Bits = Any  # array of 32 uint64


class Deadlock(RuntimeError):
    """No warp of the CTA can go on."""


# --- numbers ----------------------------------------------------------------------------------------


def f32(bits: Bits) -> Any:
    return bits.astype(np.uint32).view(np.float32)


def s32(bits: Bits) -> Any:
    return bits.astype(np.uint32).view(np.int32).astype(np.int64)


def s16(bits: Bits) -> Any:
    return bits.astype(np.uint16).view(np.int16).astype(np.int64)


def s64(bits: Bits) -> Any:
    return bits.view(np.int64)


def bf16(halves: Any) -> Any:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def to_bits(value: Any, kind: str) -> Bits:
    """A result of the PTX type `kind` as raw bits."""
    if kind == "f32":
        return np.asarray(value, np.float32).view(np.uint32).astype(U64)
    wide = np.asarray(value).astype(np.int64).view(U64) if np.asarray(value).dtype != U64 else value
    return wide & LOW if kind.endswith("32") else wide & U64(0xFFFF) if kind.endswith("16") else wide


READ: dict[str, Callable[[Bits], Any]] = {
    "f32": f32,
    "s16": s16,
    "s32": s32,
    "s64": s64,
    "u16": lambda bits: (bits & U64(0xFFFF)).astype(np.int64),
    "u32": lambda bits: (bits & LOW).astype(np.int64),
    "u64": lambda bits: bits,
    "b16": lambda bits: bits & U64(0xFFFF),
    "b32": lambda bits: bits & LOW,
    "b64": lambda bits: bits,
    "pred": lambda bits: bits,
}


def quotient(x: Any, y: Any) -> Any:
    """Division of integers towards zero."""
    return np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y))


def shift_right(x: Any, n: Any) -> Any:
    return x >> n.astype(x.dtype)


# name -> function of operands that are read by the instruction's type
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "mad": lambda x, y, z: x * y + z,
    "fma": lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32),
    "min": np.minimum, "max": np.maximum, "neg": lambda x: -x, "rem": lambda x, y: x - y * quotient(x, y),
    "and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y,
    "ex2": np.exp2, "rcp": lambda x: np.float32(1) / x,
}  # fmt: skip
COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)), "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}  # fmt: skip
NOTHING = ("setmaxnreg", "griddepcontrol", "fence", "prefetch")  # nothing to do here


# --- the program ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """`@[!]guard name.kinds operands`."""

    text: str
    name: str
    kinds: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str | None
    negated: bool


def split_operands(text: str) -> tuple[str, ...]:
    """At commas outside of brackets."""
    return tuple(
        part.strip() for part in re.findall(r"(?:[^,\[{]|\[[^\]]*\]|\{[^}]*\})+", text) if part.strip()
    )


class Program:
    """Instructions, labels and branch tables of a kernel's PTX."""

    def __init__(self, ptx: str) -> None:
        match = re.search(r"\.reqntid (\d+)", ptx)
        assert match is not None, "no .reqntid"
        self.threads = int(match[1])
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.loops: list[int] = []  # starts of inline-assembly wait loops, whose label is the same everywhere
        self.tables: dict[str, list[str]] = {}
        body = ptx[ptx.index("{", ptx.index(".visible .entry")) :]
        table: str | None = None
        for line in (raw.split("//")[0].strip() for raw in body.splitlines()):
            if line.startswith(".section"):
                break
            if line.startswith("$L_brx"):
                table = line.split(":")[0]
                self.tables[table] = []
            elif table is not None and line.startswith("$L__BB"):
                self.tables[table].append(line.rstrip(",; "))
                table = None if line.endswith(";") else table
            else:
                self._line(line)

    def _line(self, line: str) -> None:
        label = re.match(r"(\$L__BB\w+|waitLoop):", line)
        if label is not None:
            if label[1] == "waitLoop":
                self.loops.append(len(self.instructions))
            self.labels[label[1]] = len(self.instructions)
            line = line[label.end() :].strip()
        if not line or line[0] in "{}.$)":
            return
        match = re.match(r"(?:@(!?)([%\w]+)\s+)?([\w.:]+);?\s*(.*?);?$", line)
        assert match is not None, line
        name, *kinds = match[3].split(".")
        operands = split_operands(match[4].rstrip("; "))
        self.instructions.append(Instruction(line, name, tuple(kinds), operands, match[2], match[1] == "!"))


# --- the machine ------------------------------------------------------------------------------------


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all arrivals and all announced bytes are in."""

    count: int
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def update(self, arrivals: int = 0, announced: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += announced
        assert self.pending >= 0, "more arrivals than the barrier expects"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count


@dataclass
class Warp:
    """Registers and place of 32 threads; `groups` are wgmma that were issued and have not been waited for."""

    index: int
    registers: dict[str, Bits] = field(default_factory=dict)
    place: int = 0
    done: bool = False
    waits_for: tuple[int, int] | None = None  # (named barrier, its generation)
    issued: list[Any] = field(default_factory=list)
    groups: list[list[Any]] = field(default_factory=list)
    jumped: Any = None  # lanes that wait at `until` for those that did not jump
    until: int = -1


class Block:
    """One CTA. `parameters`: number -> integer; `maps`: number -> (uint16 [rows, k], box rows) for TMA."""

    def __init__(
        self, program: Program, parameters: Mapping[int, int | float], memory: Any, block: tuple[int, int, int],
        grid: tuple[int, int, int], maps: Mapping[int, tuple[Any, int]],
    ) -> None:  # fmt: skip
        self.program, self.parameters, self.memory, self.maps = program, parameters, memory, maps
        self.shared = np.full(SHARED_BYTES, 0xA5, np.uint8)
        self.barriers: dict[int, Barrier] = {}
        self.arrived: dict[int, list[int]] = {}
        self.generation: dict[int, int] = {}
        self.warps = [Warp(index) for index in range(program.threads // 32)]
        axes = "xyz"
        self.special = {f"%ctaid.{axes[i]}": block[i] for i in range(3)}
        self.special |= {f"%nctaid.{axes[i]}": grid[i] for i in range(3)}

    def run(self) -> None:
        """Until every warp has returned."""
        while not all(warp.done for warp in self.warps):
            if not any([self._advance(warp) for warp in self.warps if not warp.done]):
                stuck = [
                    f"warp {w.index} at `{self.program.instructions[w.place].text}`"
                    for w in self.warps
                    if not w.done
                ]
                raise Deadlock("; ".join(stuck))

    def _advance(self, warp: Warp) -> bool:
        """Run a warp until it waits; whether it got anywhere."""
        moved = False
        while not warp.done:
            if warp.waits_for is not None:
                name, generation = warp.waits_for
                if self.generation.get(name, 0) == generation:
                    return moved
                warp.waits_for = None
            outcome = self._step(warp)
            if outcome == "spin":
                return moved
            moved = moved or outcome != "poll"
        return moved

    def _step(self, warp: Warp) -> str | None:
        instruction = self.program.instructions[warp.place]
        mask = np.ones(32, bool)
        if instruction.guard is not None:
            mask = warp.registers[instruction.guard].astype(bool) ^ instruction.negated
        if warp.jumped is not None:
            if warp.place == warp.until:
                warp.jumped = None
            else:
                mask = mask & ~warp.jumped
        warp.place += 1
        if instruction.name in NOTHING or (instruction.name != "bra" and not mask.any()):
            return None
        if instruction.name in ("bra", "brx", "ret"):
            return self._branch(warp, instruction, mask)
        special: Callable[..., str | None] | None = getattr(self, f"_{instruction.name}", None)
        if special is not None:
            return special(warp, instruction, mask)
        self._compute(warp, instruction, mask)
        return None

    # --- operands ---

    def value(self, warp: Warp, operand: str) -> Bits:
        """Bits of a register, a special register, a symbol or a number."""
        if operand in warp.registers:
            return warp.registers[operand]
        if operand == "%tid.x":
            return (LANES + 32 * warp.index).astype(U64)
        if operand in self.special:
            return np.full(32, self.special[operand], U64)
        if operand.startswith("global_smem"):
            return np.full(32, int(operand.partition("+")[2] or 0), U64)
        if operand.startswith("0f"):
            return np.full(32, int(operand[2:], 16), U64)
        if operand.startswith("%"):
            return np.full(32, POISON, U64)
        return np.full(32, int(operand, 0) % 2**64, U64)

    def put(self, warp: Warp, operand: str, bits: Bits, mask: Any) -> None:
        """Write a register in the lanes of `mask`."""
        if operand == "_":
            return
        before = warp.registers.get(operand, np.full(32, POISON, U64))
        warp.registers[operand] = np.where(mask, np.broadcast_to(bits, (32,)), before).astype(U64)

    def address(self, warp: Warp, operand: str) -> Any:
        """Of `[register + offset]`."""
        match = re.fullmatch(r"\[\s*([%\w+]+?)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        assert match is not None, operand
        return s64(self.value(warp, match[1])) + int(match[2] or 0)

    # --- arithmetic ---

    def _compute(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        name, kinds, (target, *operands) = instruction.name, instruction.kinds, instruction.operands
        kind = kinds[-1]
        read = READ.get(kind)
        if name not in ARITHMETIC or read is None:
            raise NotImplementedError(instruction.text)
        wide = "wide" in kinds
        with np.errstate(all="ignore"):
            given = [read(self.value(warp, o)) for o in operands]
            if wide and name == "mad":
                given[2] = s64(self.value(warp, operands[2]))
            result = ARITHMETIC[name](*given)
            if "hi" in kinds:
                result = result >> int(kind[1:])
        self.put(warp, target, to_bits(result, f"{kind[0]}64" if wide else kind), mask)

    def _div(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, *operands = instruction.operands
        kind = instruction.kinds[-1]
        x, y = (READ[kind](self.value(warp, o)) for o in operands)
        with np.errstate(all="ignore"):
            self.put(warp, target, to_bits(x / y if kind == "f32" else quotient(x, y), kind), mask)

    def _not(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, operand = instruction.operands
        bits = self.value(warp, operand)
        kind = instruction.kinds[-1]
        self.put(warp, target, U64(1) - bits if kind == "pred" else to_bits(~bits, kind), mask)

    def _shl(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, x, n = instruction.operands
        self.put(
            warp, target, to_bits(self.value(warp, x) << self.value(warp, n), instruction.kinds[-1]), mask
        )

    def _shr(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, x, n = instruction.operands
        kind = instruction.kinds[-1]
        self.put(
            warp,
            target,
            to_bits(shift_right(READ[kind](self.value(warp, x)), self.value(warp, n)), kind),
            mask,
        )

    def _bfe(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, *operands = instruction.operands
        x, start, length = (self.value(warp, o) for o in operands)
        found = (x >> start) & ((U64(1) << length) - U64(1))
        if instruction.kinds[-1] == "s32":
            found = np.where((found >> (length - U64(1))) & U64(1), found - (U64(1) << length), found) & LOW
        self.put(warp, target, found, mask)

    def _cvt(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, operand = instruction.operands
        to, source = instruction.kinds[-2:]
        bits = self.value(warp, operand)
        if (to, source) == ("f32", "bf16"):
            self.put(warp, target, (bits & U64(0xFFFF)) << U64(16), mask)
        elif to[0] in "su" and source[0] in "su":
            self.put(warp, target, to_bits(READ[source](bits), to), mask)
        else:
            raise NotImplementedError(instruction.text)

    def _cvta(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        self.put(warp, instruction.operands[0], self.value(warp, instruction.operands[1]), mask)

    def _setp(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, *operands = instruction.operands
        x, y = (READ[instruction.kinds[-1]](self.value(warp, o)) for o in operands)
        self.put(warp, target, COMPARE[instruction.kinds[0]](x, y).astype(U64), mask)

    def _selp(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, yes, no, choice = instruction.operands
        taken = self.value(warp, choice).astype(bool)
        self.put(warp, target, np.where(taken, self.value(warp, yes), self.value(warp, no)), mask)

    def _mov(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, source = instruction.operands
        kind = instruction.kinds[-1]
        if "{" in instruction.text.partition(" ")[2]:
            self._pack(warp, target, source, U64(16 if kind == "b32" else 32), mask)
        elif "_param_" in source:
            self.put(warp, target, np.full(32, TENSOR_MAP + int(source.rsplit("_", 1)[1]), U64), mask)
        elif kind == "pred":
            self.put(warp, target, (self.value(warp, source) != 0).astype(U64), mask)
        else:
            self.put(warp, target, to_bits(self.value(warp, source), kind), mask)

    def _pack(self, warp: Warp, target: str, source: str, width: Any, mask: Any) -> None:
        """`mov {low, high}, x` or `mov x, {low, high}`."""
        every = (U64(1) << width) - U64(1)
        if target.startswith("{"):
            bits = self.value(warp, source)
            for part, found in zip(
                split_operands(target[1:-1]), (bits & every, (bits >> width) & every), strict=True
            ):
                self.put(warp, part, found, mask)
        else:
            low, high = (self.value(warp, part) & every for part in split_operands(source[1:-1]))
            self.put(warp, target, low | (high << width), mask)

    # --- control ---

    def _branch(self, warp: Warp, instruction: Instruction, mask: Any) -> str | None:
        if instruction.name == "ret":
            warp.done = True
            return None
        if instruction.name == "brx":
            index, table = instruction.operands
            warp.place = self.program.labels[self.program.tables[table][int(self.value(warp, index)[0])]]
            return None
        (label,) = instruction.operands
        if not mask.any():
            return None
        if not mask.all():
            target = self.program.labels[label]
            assert warp.jumped is None and target > warp.place, f"divergent: {instruction.text}"
            warp.jumped, warp.until = mask, target
            return None
        if label == "waitLoop":
            warp.place = max(start for start in self.program.loops if start < warp.place)
            return "spin"
        warp.place = self.program.labels[label]
        return None

    def _bar(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        """`bar.sync` and `barrier.sync` on a named barrier, by all threads unless a count is given."""
        if "warp" in instruction.kinds:
            return
        name, *count = (int(self.value(warp, o)[0]) for o in instruction.operands)
        arrived = self.arrived.setdefault(name, [])
        arrived.append(warp.index)
        warp.waits_for = (name, self.generation.get(name, 0))
        if len(arrived) * 32 == (count[0] if count else self.program.threads):
            self.generation[name] = self.generation.get(name, 0) + 1
            arrived.clear()

    _barrier = _bar

    def _elect(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        lane, chosen = (part.strip() for part in instruction.operands[0].split("|"))
        self.put(warp, lane, np.zeros(32, U64), mask)
        self.put(warp, chosen, (LANES == 0).astype(U64), mask)

    def _shfl(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, source, lane, *_ = instruction.operands
        which = self.value(warp, lane).astype(int)
        if "bfly" in instruction.kinds:
            which = LANES ^ which
        elif "idx" not in instruction.kinds:
            raise NotImplementedError(instruction.text)
        self.put(warp, target.split("|")[0], self.value(warp, source)[which & 31], mask)

    def _redux(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, source, *_ = instruction.operands
        _, operation, kind = instruction.kinds
        given = READ[kind](self.value(warp, source))[mask]
        self.put(
            warp, target, to_bits(np.full(32, {"min": given.min, "max": given.max}[operation]()), kind), mask
        )

    def _popc(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, source = instruction.operands
        bits = READ[instruction.kinds[-1]](self.value(warp, source))
        self.put(warp, target, np.array([int(b).bit_count() for b in bits]).astype(U64), mask)

    # --- memory ---

    def _ld(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, source = instruction.operands
        if "param" in instruction.kinds:
            match = re.search(r"_param_(\d+)", source)
            assert match is not None
            given = self.parameters[int(match[1])]
            bits = to_bits(given, "f32") if isinstance(given, float) else U64(given)
            self.put(warp, target, np.full(32, bits, U64), mask)
            return
        targets = split_operands(target.strip("{}"))
        loaded = self._access(warp, instruction, source, len(targets), mask, None)
        for name, bits in zip(targets, loaded, strict=True):
            self.put(warp, name, bits, mask)

    def _st(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, source = instruction.operands
        values = [self.value(warp, name) for name in split_operands(source.strip("{}"))]
        self._access(warp, instruction, target, len(values), mask, values)

    def _access(
        self,
        warp: Warp,
        instruction: Instruction,
        where: str,
        count: int,
        mask: Any,
        values: list[Bits] | None,
    ) -> list[Bits]:
        """Load or store `count` words a lane; aligned and in bounds, or an error."""
        size = int(instruction.kinds[-1][1:]) // 8
        word = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[size]
        (space,) = (kind for kind in instruction.kinds if kind.startswith(("shared", "global")))
        buffer = self.memory if space == "global" else self.shared
        addresses = self.address(warp, where)
        loaded = [np.zeros(32, U64) for _ in range(count)]
        for lane in np.nonzero(mask)[0]:
            first = int(addresses[lane])
            assert first >= 0 and first + count * size <= len(buffer), f"out of bounds: {instruction.text}"
            assert first % (count * size) == 0, f"misaligned: {instruction.text}"
            words = buffer[first : first + count * size].view(word)
            for i in range(count):
                if values is None:
                    loaded[i][lane] = words[i]
                else:
                    words[i] = word(int(values[i][lane]) % 2 ** (8 * size))
        return loaded

    def _mbarrier(self, warp: Warp, instruction: Instruction, mask: Any) -> str | None:
        operands = [o for o in instruction.operands if o != "_"]
        at = next(o for o in operands if o.startswith("["))
        place = int(self.address(warp, at)[int(np.argmax(mask))])
        number = int(self.value(warp, operands[-1])[0]) if operands[-1] != at else 0
        if instruction.kinds[0] == "init":
            self.barriers[place] = Barrier(number)
        elif "expect_tx" in instruction.text:
            self.barriers[place].update(arrivals=1, announced=number)
        elif instruction.kinds[0] == "arrive":
            self.barriers[place].update(arrivals=1)
        else:  # try_wait.parity: has the phase of this parity ended?
            ended = self.barriers[place].phase != number
            self.put(warp, operands[0], np.full(32, int(ended), U64), mask)
            return None if ended else "poll"
        return None

    def _cp(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        """A two-dimensional TMA copy of rows of 64 16-bit elements, 128-byte swizzle, zeros out of bounds."""
        assert instruction.text.find("cp.async.bulk.tensor.2d.shared") >= 0, instruction.text
        target, source, barrier = instruction.operands
        match = re.fullmatch(r"\[(%\w+),\s*\{(%\w+),\s*(%\w+)\}\]", source)
        assert match is not None, source
        tensor, rows = self.maps[int(self.value(warp, match[1])[0]) - TENSOR_MAP]
        column, row = (int(s32(self.value(warp, match[i]))[0]) for i in (2, 3))
        box = np.zeros((rows, 64), np.uint16)
        inside = tensor[row : row + rows, column : column + 64]
        box[: inside.shape[0], : inside.shape[1]] = inside
        first = int(self.address(warp, target)[0])
        places = first + 128 * np.arange(rows)[:, None] + np.arange(128)[None, :]
        self.shared[places ^ (((places >> 7) & 7) << 4)] = box.view(np.uint8)
        self.barriers[int(self.address(warp, barrier)[0])].update(announced=-128 * rows)

    # --- matrix units ---

    def _wgmma(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        if instruction.kinds[0] == "mma_async":
            registers, a, b, use, *_ = instruction.operands
            assert instruction.operands[-2:] == ("0", "0"), "operands must lie along K"
            descriptors = [int(self.value(warp, o)[0]) for o in (a, b)]
            warp.issued.append(
                (split_operands(registers[1:-1]), *descriptors, bool(self.value(warp, use)[0]))
            )
        elif instruction.kinds[0] == "commit_group":
            warp.groups.append(warp.issued)
            warp.issued = []
        elif instruction.kinds[0] == "wait_group":
            while len(warp.groups) > int(instruction.operands[0]):
                for product in warp.groups.pop(0):
                    self._multiply(warp, *product)

    def _operand(self, descriptor: int, rows: int) -> Any:
        """[rows, 16] of a K-major shared-memory operand with a swizzle of 128, 64 or 32 bytes."""
        swizzle = descriptor >> 62
        assert 1 <= swizzle <= 3, "no swizzle is not known"
        pitch = 256 >> swizzle
        first, stride = (descriptor & 0x3FFF) << 4, ((descriptor >> 32) & 0x3FFF) << 4
        r, k = np.arange(rows)[:, None], np.arange(16)[None, :]
        places = first + r // 8 * stride + r % 8 * pitch + 2 * k
        places = places ^ (((places >> 7) & (8 >> (swizzle - 1)) - 1) << 4)
        return bf16(self.shared[places].astype(np.uint16) | (self.shared[places + 1].astype(np.uint16) << 8))

    def _multiply(self, warp: Warp, registers: Sequence[str], a: int, b: int, accumulate: bool) -> None:
        """The 16 rows of an m64 product that belong to this warp of its warpgroup."""
        rows = slice(16 * (warp.index % 4), 16 * (warp.index % 4) + 16)
        product = (
            self._operand(a, 64)[rows].astype(np.float64)
            @ self._operand(b, 2 * len(registers)).astype(np.float64).T
        )
        for number, name in enumerate(registers):
            column, row = number // 4 * 8 + number % 2 + LANES % 4 * 2, LANES // 4 + 8 * (number // 2 % 2)
            before = f32(warp.registers[name]).astype(np.float64) if accumulate else 0.0
            warp.registers[name] = to_bits(before + product[row, column], "f32")

    def _mma(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        """m16n8k16, bf16."""
        assert instruction.kinds[2] == "m16n8k16", instruction.text
        names = [split_operands(o[1:-1]) for o in instruction.operands]
        g, t = LANES // 4, LANES % 4
        a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for i, name in enumerate(names[1]):
            for half in (0, 1):
                a[g + 8 * (i % 2), 2 * t + half + 8 * (i // 2)] = self._half(warp, name, half)
        for i, name in enumerate(names[2]):
            for half in (0, 1):
                b[2 * t + half + 8 * i, g] = self._half(warp, name, half)
        for i, name in enumerate(names[3]):
            c[g + 8 * (i // 2), 2 * t + i % 2] = f32(self.value(warp, name))
        result = a @ b + c
        for i, name in enumerate(names[0]):
            warp.registers[name] = to_bits(result[g + 8 * (i // 2), 2 * t + i % 2], "f32")

    def _half(self, warp: Warp, name: str, half: int) -> Any:
        return bf16((self.value(warp, name) >> U64(16 * half)).astype(np.uint16))

    def _ldmatrix(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        """m8n8.x4 of 16-bit elements."""
        target, source = instruction.operands
        places = self.address(warp, source)
        for i, name in enumerate(split_operands(target[1:-1])):
            rows = np.stack([self.shared[p : p + 16].view(np.uint16) for p in places[8 * i : 8 * i + 8]])
            words = np.ascontiguousarray(rows.T if "trans" in instruction.kinds else rows).view(np.uint32)
            self.put(warp, name, words.reshape(-1).astype(U64), mask)


def launch(
    ptx: str, grid: tuple[int, int, int], parameters: Mapping[int, int | float], memory: Any,
    maps: Mapping[int, tuple[Any, int]] | None = None,
) -> None:  # fmt: skip
    """Run every CTA of a grid, one after the other, on `memory` (uint8; pointers are offsets into it)."""
    program = Program(ptx)
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                Block(program, parameters, memory, (x, y, z), grid, maps or {}).run()
