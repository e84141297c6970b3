"""What the SM90 prefill kernels need of the PTX machine beyond the MoE's: inline assembly with labels of its own, e4m3
and bf16 products with A in registers or B along its rows, votes, TMA stores.

A store of the copy engine reads shared memory only when a wait demands it.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from ptx_machine import LANES, READ, TENSOR_MAP, U64, Instruction, Warp, bf16, f32, split_operands, to_bits
from ptx_moe import E4M3, MoeBlock

ROW, PAIR = LANES // 4, LANES % 4  # a lane's row and place in it, of accumulators and of A in registers


def unfolded(ptx: str) -> str:
    """PTX with an instruction a line where inline assembly has several, its labels and registers under their own names.

    `@!p bra.uni SKIP` of the n-th such block goes to `$L__BBinline<n>`.
    """
    lines = []
    for number, line in enumerate(ptx.splitlines()):
        text = line.split("//")[0].strip()
        if ";" in text[:-1] and not text.startswith("{"):
            lines += [f"{part};" for part in text.split(";") if part.strip()]
            continue
        if not (text.startswith("{.reg") and text.endswith("}")):
            lines.append(line)
            continue
        parts = [part.strip() for part in text[1:-1].replace("SKIP:", "SKIP:;").split(";")]
        names = [
            name for part in parts if part.startswith(".reg") for name in part.split(None, 2)[2].split(",")
        ]
        for part in parts:
            if not part or part.startswith(".reg"):
                continue
            if part == "SKIP:":
                lines.append(f"$L__BBinline{number}:")
                continue
            for name in names:
                part = re.sub(rf"(?<![\w%.]){name.strip()}(?!\w)", f"%inline{number}{name.strip()}", part)
            lines.append(part.replace("bra.uni", "bra").replace("SKIP", f"$L__BBinline{number}") + ";")
    return "\n".join(lines)


class PrefillBlock(MoeBlock):
    """One CTA; `maps`: parameter -> (array of any rank in bytes, box of as many dimensions in bytes)."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.stores: dict[int, list[Any]] = {}  # warp -> stores of the copy engine under way
        self.spans: list[tuple[int, int]] = []  # of global memory that may be touched; empty: all

    def _access(self, warp: Warp, instruction: Instruction, where: str, *rest: Any) -> Any:
        if self.spans and any(kind.startswith("global") for kind in instruction.kinds):
            for first in self.address(warp, where)[rest[1]]:
                inside = any(start <= first < end for start, end in self.spans)
                assert inside, f"outside of every tensor: {instruction.text}"
        return super()._access(warp, instruction, where, *rest)

    # --- numbers ---

    def _extreme(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        """`min` and `max`; of a number and a NaN the number."""
        target, *operands = instruction.operands
        kind = instruction.kinds[-1]
        names = {"max": np.fmax, "min": np.fmin} if kind == "f32" else {"max": np.maximum, "min": np.minimum}
        given = [READ[kind](self.value(warp, o)) for o in operands]
        result = given[0]
        for more in given[1:]:
            result = names[instruction.name](result, more)
        self.put(warp, target, to_bits(result, kind), mask)

    _max = _min = _extreme

    def _lg2(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, operand = instruction.operands
        with np.errstate(all="ignore"):
            self.put(warp, target, to_bits(np.log2(f32(self.value(warp, operand))), "f32"), mask)

    def _vote(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, source, _ = instruction.operands
        assert instruction.kinds[:2] == ("sync", "any"), instruction.text
        self.put(warp, target, np.full(32, int(self.value(warp, source).any()), U64), mask)

    def _cvt(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        if instruction.kinds[-2] == "f32" and instruction.kinds[-1] in ("s32", "u32"):
            target, operand = instruction.operands
            value = READ[instruction.kinds[-1]](self.value(warp, operand))
            self.put(warp, target, to_bits(value.astype(np.float32), "f32"), mask)
        else:
            super()._cvt(warp, instruction, mask)

    # --- copies ---

    def _cp(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        if "bulk" not in instruction.kinds:
            super()._cp(warp, instruction, mask)
        elif "wait_group" in instruction.kinds:
            for store in self.stores.pop(warp.index, []):
                self._leave(*store)
        elif "global" in instruction.kinds[:5] and "shared::cluster" not in instruction.text:
            target, source = instruction.operands
            match = re.fullmatch(r"\[(%\w+),\s*\{(.*)\}\]", target)
            assert match is not None, target
            place = int(self.address(warp, source)[int(np.argmax(mask))])
            corner = self._corner(warp, match[2])
            which = self.maps[int(self.value(warp, match[1])[0]) - TENSOR_MAP]
            self.stores.setdefault(warp.index, []).append((which, corner, place))
        elif "commit_group" not in instruction.kinds:
            self._tma(warp, instruction)

    def _corner(self, warp: Warp, names: str) -> list[int]:
        """Coordinates, the slowest first; the fastest in bytes is left to the caller."""
        words = [int(self.value(warp, name)[0]) for name in split_operands(names)]
        return [(c & 0xFFFFFFFF) - ((c & 0x80000000) << 1) for c in reversed(words)]

    def _places(self, first: int, box: Any) -> Any:
        pitch = box[-1]
        places = first + np.arange(int(np.prod(box)))
        return places ^ (((places >> 7) & (pitch // 16 - 1)) << 4)

    def _inside(self, tensor: Any, corner: list[int], box: Any) -> tuple[Any, Any]:
        """Slices of the tensor and of the box where they meet."""
        outer, inner = [], []
        for start, length, size in zip(corner, box, tensor.shape, strict=True):
            first = min(max(start, 0), size)
            last = max(min(start + length, size), first)
            outer.append(slice(first, last))
            inner.append(slice(first - start, last - start) if last > first else slice(0, 0))
        return tuple(outer), tuple(inner)

    def _tma(self, warp: Warp, instruction: Instruction) -> None:
        """A copy of a box into shared memory, zeros out of bounds, negative coordinates too."""
        target, source, barrier = instruction.operands
        match = re.fullmatch(r"\[(%\w+),\s*\{(.*)\}\]", source)
        assert match is not None, source
        tensor, box, element = self.maps[int(self.value(warp, match[1])[0]) - TENSOR_MAP]
        corner = self._corner(warp, match[2])
        corner[-1] *= element
        outer, inner = self._inside(tensor, corner, box)
        data = np.zeros(box, np.uint8)
        data[inner] = tensor[outer]
        first = int(self.address(warp, target)[0])
        assert first % 128 == 0, "a box starts at a multiple of 128 bytes"
        self.shared[self._places(first, box)] = data.reshape(-1)
        self.barriers[int(self.address(warp, barrier)[0])].update(announced=-data.size)

    def _leave(self, which: Any, corner: list[int], place: int) -> None:
        tensor, box, element = which
        corner[-1] *= element
        outer, inner = self._inside(tensor, corner, box)
        tensor[outer] = self.shared[self._places(place, box)].reshape(box)[inner]

    # --- matrix unit ---

    def _wgmma(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        if instruction.kinds[0] != "mma_async":
            super()._wgmma(warp, instruction, mask)
            return
        registers, a, b, use, *signs = instruction.operands
        kind = instruction.kinds[-1]
        assert kind in ("e4m3", "bf16") and signs[:2] == ["1", "1"], instruction.text
        given: Any = split_operands(a[1:-1]) if a.startswith("{") else int(self.value(warp, a)[0])
        turned = kind == "bf16" and signs[-1] == "1"
        accumulate = bool(self.value(warp, use)[0])
        product = (
            split_operands(registers[1:-1]),
            given,
            int(self.value(warp, b)[0]),
            accumulate,
            kind,
            turned,
        )
        warp.issued.append(product)

    def _multiply(self, warp: Warp, registers: Any, a: Any, b: int, accumulate: bool, *how: Any) -> None:
        """The 16 rows of an m64 product that belong to this warp of its warpgroup."""
        kind, turned = how
        first = 16 * (warp.index % 4)
        left = (
            self._tile(a, 64, kind)[first : first + 16] if isinstance(a, int) else self._rows(warp, a, kind)
        )
        columns = 2 * len(registers)
        right = self._turned(b, columns) if turned else self._tile(b, columns, kind).T
        product = left.astype(np.float64) @ right.astype(np.float64)
        for number, name in enumerate(registers):
            column, row = number // 4 * 8 + number % 2 + PAIR * 2, ROW + 8 * (number // 2 % 2)
            before = f32(warp.registers[name]).astype(np.float64) if accumulate else 0.0
            warp.registers[name] = to_bits(before + product[row, column], "f32")

    def _tile(self, descriptor: int, rows: int, kind: str) -> Any:
        """[rows, 32 bytes] of an operand that lies along K."""
        swizzle = descriptor >> 62
        assert 1 <= swizzle <= 3, "no swizzle is not known"
        pitch = 256 >> swizzle
        first, stride = (descriptor & 0x3FFF) << 4, ((descriptor >> 32) & 0x3FFF) << 4
        r, k = np.arange(rows)[:, None], np.arange(32)[None, :]
        places = first + r // 8 * stride + r % 8 * pitch + k
        found = self.shared[places ^ (((places >> 7) & (pitch // 16 - 1)) << 4)]
        return E4M3[found] if kind == "e4m3" else bf16(np.ascontiguousarray(found).view(np.uint16))

    def _turned(self, descriptor: int, columns: int) -> Any:
        """[16, columns] bf16 of an operand whose rows are K, 64 columns wide pieces one after the other."""
        assert descriptor >> 62 == 1, "rows of 128 bytes"
        first, piece, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        k, n = np.arange(16)[:, None], np.arange(columns)[None, :]
        places = first + n // 64 * piece + k // 8 * stride + k % 8 * 128 + n % 64 * 2
        places = places ^ (((places >> 7) & 7) << 4)
        return bf16(self.shared[places].astype(np.uint16) | self.shared[places + 1].astype(np.uint16) << 8)

    def _rows(self, warp: Warp, names: Any, kind: str) -> Any:
        """[16, K] of A in the registers of this warp."""
        each = 4 if kind == "e4m3" else 2
        out = np.zeros((16, 8 * each), np.float32)
        for i, name in enumerate(names):
            words = self.value(warp, name)
            for j in range(each):
                part = (words >> U64(32 // each * j)).astype(np.uint16)
                value = E4M3[part & np.uint16(0xFF)] if kind == "e4m3" else bf16(part)
                out[ROW + 8 * (i % 2), PAIR * each + j + 4 * each * (i // 2)] = value
        return out
