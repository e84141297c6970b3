"""Uniform registers of a compiled kernel that a role of warps may read before it has set them.

ptxas keeps what a whole warp shares, such as the descriptors of `wgmma`, in uniform registers. That of Triton 3.6 was
seen to set a register ahead of the first of several loops only, although that loop may be skipped, and to read it in
the later ones: there it holds what the kernel's start left, and no tool warns. All builds that were wrong on an H200
and right as PTX have such reads, FP8 with a window and BF16 whose tiles overlap; none of those that are right has.

So for each descriptor of a product: either all values that may reach it come from the role's own code, or all come from
before it. `stray_reads(cubin)` names the others. A role begins where `setmaxnreg` is executed. Other reads are not
named: an address of shared memory that the code ahead of a role made is rightly read in it, and counted up in loops.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

# The address of shared memory, which every part of the code makes anew: always the same value, so it counts neither as
# the role's nor as older.
SAME = re.compile(r"UMOV UR\d+, 0x400$|ULEA UR\d+, UR\d+, UR\d+, 0x18$|S2UR UR\d+, SR_CgaCtaId$")
# A uniform register kept in a vector register, and brought back.
COPY = re.compile(r"(?:MOV|IMAD\.U32|R2UR) (U?R)(\d+), (?:RZ, RZ, )?(U?R)(\d+)$")
VECTOR = 64  # number of vector register 0, behind the uniform ones
WIDTHS = {"64": 2, "WIDE": 2, "128": 4}


class Instruction:
    """Registers written, uniform registers read, and where control goes."""

    def __init__(self, address: int, text: str) -> None:
        self.address, self.text = address, text
        match = re.match(r"(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*)", text)
        assert match is not None
        self.guard, self.name = match[1], match[2]
        parts = self.name.split(".")
        named = [(int(x), at) for x, at in ((m[1], m.start()) for m in re.finditer(r"\bUR(\d+)", match[3]))]
        self.writes: set[int] = set()
        self.reads: set[int] = set()
        writes_first = re.match(r"(U|R2UR|S2UR|VOTEU|ELECT)", self.name) and not self.name.startswith(
            ("UTM", "USETMAXREG")
        )
        for order, (register, at) in enumerate(named):
            inside = "[" in match[3][:at] and match[3][:at].count("[") > match[3][:at].count("]")
            if writes_first and order == 0 and re.match(r"(UP\w+,\s*)?UR", match[3]) and not inside:
                width = next((WIDTHS[p] for p in parts if p in WIDTHS), 1)
                self.writes |= set(range(register, register + width))
                continue
            self.reads |= set(range(register, register + self._width(parts, inside, match[3][:at])))
        if "GMMA" in self.name and re.match(r"R\d+, R\d+,", match[3]):
            self.reads = {register for register in self.reads if register % 4 > 1}  # A is in registers
        if vector := re.match(r"(?:U?P[T\d]+,\s*)?R(\d+)", match[3]):
            width = next((WIDTHS[p] for p in parts if p in WIDTHS), 1)
            self.writes |= {VECTOR + int(vector[1]) + i for i in range(width)}
        copy = COPY.match(text)
        self.source = None  # of a copy
        if copy and copy[1] != copy[3]:
            self.source = int(copy[4]) + VECTOR * (copy[3] == "R")

    def _width(self, parts: list[str], inside: bool, before: str) -> int:
        if "GMMA" in parts[0]:  # the descriptors of A and B
            return 4
        if parts[0] in ("UTMALDG", "UTMASTG"):  # shared memory, a barrier of loads, the corner; then the map
            return 2 if "]" in before else 1 + (parts[0] == "UTMALDG") + int(parts[1][0])
        if inside:
            return 2 if before.endswith("desc[") else 1
        return 2 if "64" in parts else 1

    @property
    def ends(self) -> bool:
        return self.guard is None and self.name.split(".")[0] in ("EXIT", "BRX", "RET")

    def target(self) -> int | None:
        found = re.findall(r"0x[0-9a-f]+", self.text)
        return int(found[-1], 16) if self.name.split(".")[0] == "BRA" and found else None


def parse(cubin: Path) -> list[Instruction]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([str(tool), "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", text, re.M)
    return [Instruction(int(at, 16), code) for at, code in lines]


def stray_reads(cubin: Path) -> list[str]:
    """`register at address: instruction` of matrix products whose descriptors may be such values, or made of them."""
    return strays(parse(cubin))


def strays(code: list[Instruction]) -> list[str]:
    place = {instruction.address: i for i, instruction in enumerate(code)}
    starts = [i + 1 for i, x in enumerate(code) if x.name.startswith("USETMAXREG")]
    found = {read for start in starts for read in _mixed(code, place, start)}
    return [f"UR{register} at {code[i].address:#x}: {code[i].text}" for i, register in sorted(found)]


def _mixed(code: list[Instruction], place: dict[int, int], start: int) -> list[tuple[int, int]]:
    """(place, register) of such reads in the role that starts at `start`.

    A state is three masks: registers that may hold a value of the role, such that may hold an older one, and such that
    hold a value made of one that may be either.
    """
    states = {start: (0, (1 << 64) - 1, 0)}
    todo = [start]
    while todo:
        i = todo.pop()
        x = code[i]
        if x.name.startswith("USETMAXREG"):
            continue
        after = _after(x, *states[i])
        for j in _following(code, place, i):
            old = states.get(j, (0, 0, 0))
            new = (old[0] | after[0], old[1] | after[1], old[2] | after[2])
            if new != old or j not in states:
                states[j] = new
                todo.append(j)
    return [
        (i, register)
        for i, (inside, before, made) in states.items()
        for register in code[i].reads
        if "GMMA" in code[i].name and (inside & before | made) >> register & 1
    ]


def _after(x: Instruction, inside: int, before: int, made: int) -> tuple[int, int, int]:
    """The state behind an instruction; one under a guard counts as executed, since its result is used under it."""
    same = SAME.match(x.text) is not None
    if x.source is not None and (inside | before | made) >> x.source & 1:
        (to,) = x.writes
        return tuple(bits & ~(1 << to) | (bits >> x.source & 1) << to for bits in (inside, before, made))  # type: ignore[return-value]
    stray = not same and any((inside & before | made) >> register & 1 for register in x.reads)
    for register in x.writes:
        inside = inside & ~(1 << register) if same else inside | 1 << register
        before &= ~(1 << register)
        made &= ~(1 << register)
        if stray:
            made |= 1 << register
    return inside, before, made


def _following(code: list[Instruction], place: dict[int, int], i: int) -> list[int]:
    """Places that control may go to from place i."""
    x, target = code[i], code[i].target()
    jumps = target is not None and x.guard is None and not re.search(r"BRA\S*\s+!?U?P", x.text)
    onwards = [] if x.ends or jumps or i + 1 == len(code) else [i + 1]
    return onwards + ([place[target]] if target in place else [])  # type: ignore[index]
