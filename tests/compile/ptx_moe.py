"""What the kernels of the fused MoE need of the PTX machine beside what it knows: e4m3, cp.async, TMA of any rank.

Timing hurts here too: the bytes of a `cp.async` arrive only when a wait demands their group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from ptx_machine import (
    COMPARE,
    LANES,
    TENSOR_MAP,
    U64,
    Block,
    Instruction,
    Program,
    Warp,
    f32,
    split_operands,
    to_bits,
)

# value of each of the 256 e4m3 codes
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
# comparisons that hold where an operand is NaN
COMPARE.setdefault("neu", lambda x, y: ~(x == y))
Tensor = Any  # (bytes as an array of any rank, box of as many dimensions): rows of 64 or 128 bytes


def e4m3_codes(values: Any) -> Any:
    """fp32 to the nearest e4m3, saturated."""
    clipped = torch.from_numpy(np.ascontiguousarray(values)).clamp(-448, 448)
    return clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def bf16_codes(values: Any) -> Any:
    """fp32 to the bits of the nearest bf16."""
    rounded = torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.int16).numpy()
    return rounded.view(np.uint16).astype(U64)


class MoeBlock(Block):
    """One CTA of a kernel of the fused MoE; `maps`: parameter -> Tensor."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.copies: dict[int, list[list[Any]]] = {}  # warp -> groups of copies under way, the last one open
        self.boxes: list[tuple[int, ...]] = []  # parameter and corner of each box that TMA brought
        self.f16 = False  # the operands of the matrix instruction at hand, else bf16

    def value(self, warp: Warp, operand: str) -> Any:
        number = operand[:-1] if operand.startswith("0x") and operand.endswith("U") else operand
        return super().value(warp, number)

    # --- numbers ---

    def _cvt(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, *operands = instruction.operands
        to, source = instruction.kinds[-2:]
        bits = [self.value(warp, o) for o in operands]
        if (to, source) == ("e4m3x2", "f32"):
            high, low = (e4m3_codes(f32(b)).astype(U64) for b in bits)
            self.put(warp, target, low | high << U64(8), mask)
        elif (to, source) == ("f16x2", "e4m3x2"):
            halves = [E4M3[(bits[0] >> U64(8 * i) & U64(255)).astype(int)].astype(np.float16).view(np.uint16)
                      for i in (0, 1)]  # fmt: skip
            self.put(warp, target, halves[0].astype(U64) | halves[1].astype(U64) << U64(16), mask)
        elif (to, source) == ("f32", "f16"):
            value = (bits[0] & U64(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)
            self.put(warp, target, to_bits(value, "f32"), mask)
        elif to in ("bf16", "bf16x2"):
            rounded = [bf16_codes(f32(b)) for b in bits]
            packed = rounded[0] if len(bits) == 1 else rounded[1] | rounded[0] << U64(16)
            self.put(warp, target, packed, mask)
        else:
            super()._cvt(warp, instruction, mask)

    def _mul(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        if instruction.kinds[-1] not in ("bf16", "bf16x2", "f16x2"):
            self._compute(warp, instruction, mask)
            return
        target, *operands = instruction.operands
        x, y = (self.value(warp, o) for o in operands)
        out = np.zeros(32, U64)
        if instruction.kinds[-1] == "f16x2":
            a, b = (v.astype(np.uint32).view(np.float16) for v in (x, y))
            self.put(warp, target, (a * b).view(np.uint32).astype(U64), mask)
            return
        for half in range(2 if instruction.kinds[-1] == "bf16x2" else 1):
            shift = U64(16 * half)
            a, b = (f32(((v >> shift) & U64(0xFFFF)) << U64(16)) for v in (x, y))
            out |= bf16_codes(a * b) << shift
        self.put(warp, target, out, mask)

    def _mma(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        self.f16 = instruction.kinds[-2] == "f16"
        super()._mma(warp, instruction, mask)

    def _half(self, warp: Warp, name: str, half: int) -> Any:
        if not self.f16:
            return super()._half(warp, name, half)
        return (self.value(warp, name) >> U64(16 * half)).astype(np.uint16).view(np.float16)

    def _prmt(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, *operands = instruction.operands
        x, y, select = (self.value(warp, o) for o in operands)
        pool = x & U64(0xFFFFFFFF) | y << U64(32)
        out = np.zeros(32, U64)
        for i in range(4):
            code = select >> U64(4 * i) & U64(15)
            assert not (code & U64(8)).any(), instruction.text
            out |= (pool >> (code * U64(8)) & U64(255)) << U64(8 * i)
        self.put(warp, target, out, mask)

    def _abs(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, operand = instruction.operands
        self.put(warp, target, to_bits(np.abs(f32(self.value(warp, operand))), "f32"), mask)

    def _clz(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        raise NotImplementedError(instruction.text)

    # --- memory ---

    def _atom(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        """Addition on global memory, lane after lane."""
        target, place, operand = instruction.operands
        assert "add" in instruction.kinds and "global" in instruction.kinds, instruction.text
        addresses, added = self.address(warp, place), self.value(warp, operand)
        before = np.zeros(32, U64)
        for lane in np.nonzero(mask)[0]:
            words = self.memory[int(addresses[lane]) : int(addresses[lane]) + 4].view(np.uint32)
            before[lane] = words[0]
            words[0] += np.uint32(added[lane])
        self.put(warp, target, before, mask)

    def _cp(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        groups = self.copies.setdefault(warp.index, [[]])
        if "bulk" in instruction.kinds:
            self._tma(warp, instruction)
        elif "commit_group" in instruction.kinds:
            groups.append([])
        elif "wait_group" in instruction.kinds or "wait_all" in instruction.kinds:
            left = int(instruction.operands[0]) if instruction.operands else 0
            while len(groups) - 1 > left:
                for first, data in groups.pop(0):
                    self.shared[first : first + len(data)] = data
        else:
            self._copy(warp, instruction, mask, groups[-1])

    def _copy(self, warp: Warp, instruction: Instruction, mask: Any, group: list[Any]) -> None:
        """`cp.async [shared], [global], size, bytes of the source`; the rest is zeros."""
        target, source, *sizes = instruction.operands
        size = int(self.value(warp, sizes[0])[0])
        given = self.value(warp, sizes[1]) if len(sizes) > 1 else np.full(32, size, U64)
        to, start = self.address(warp, target), self.address(warp, source)
        for lane in np.nonzero(mask)[0]:
            assert to[lane] % size == 0, f"misaligned: {instruction.text}"
            data = np.zeros(size, np.uint8)
            count, first = int(given[lane]), int(start[lane])
            if count:
                assert first % size == 0 and 0 <= first <= len(self.memory) - count, instruction.text
                data[:count] = self.memory[first : first + count]
            group.append((int(to[lane]), data))

    def _tma(self, warp: Warp, instruction: Instruction) -> None:
        """A copy of a box of any rank, rows of 64 or 128 bytes swizzled over as many, zeros out of bounds."""
        target, source, barrier = instruction.operands[:3]
        match = re.fullmatch(r"\[(%\w+),\s*\{(.*)\}\]", source)
        assert match is not None, source
        number = int(self.value(warp, match[1])[0]) - TENSOR_MAP
        tensor, shape = self.maps[number]
        signed = [int(self.value(warp, name)[0]) for name in split_operands(match[2])]
        corner = [(c & 0xFFFFFFFF) - ((c & 0x80000000) << 1) for c in reversed(signed)]
        self.boxes.append((number, *corner))
        box = np.zeros(shape, np.uint8)
        inside = tensor[tuple(slice(c, c + n) for c, n in zip(corner, shape, strict=True))]
        box[tuple(slice(0, n) for n in inside.shape)] = inside
        pitch, first = shape[-1], int(self.address(warp, target)[0])
        places = first + np.arange(box.size)
        self.shared[places ^ (((places >> 7) & (pitch // 16 - 1)) << 4)] = box.reshape(-1)
        self.barriers[int(self.address(warp, barrier)[0])].update(announced=-box.size)

    # --- matrix unit ---

    def _stmatrix(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        """m8n8 matrices of 16-bit elements from the layout of accumulators, one register each."""
        place, source = instruction.operands
        places = self.address(warp, place)
        for i, name in enumerate(split_operands(source[1:-1])):
            words = self.value(warp, name).astype(np.uint32)
            matrix = np.ascontiguousarray(words).view(np.uint16).reshape(8, 8)
            matrix = np.ascontiguousarray(matrix.T) if "trans" in instruction.kinds else matrix
            for row in range(8):
                first = int(places[8 * i + row])
                self.shared[first : first + 16] = matrix[row].view(np.uint8)

    def _wgmma(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        if instruction.kinds[0] != "mma_async":
            super()._wgmma(warp, instruction, mask)
            return
        assert instruction.kinds[-2:] == ("e4m3", "e4m3"), instruction.text
        registers, a, b, use, *_ = instruction.operands
        descriptors = [int(self.value(warp, o)[0]) for o in (a, b)]
        warp.issued.append((split_operands(registers[1:-1]), *descriptors, bool(self.value(warp, use)[0])))

    def _operand(self, descriptor: int, rows: int) -> Any:
        """[rows, 32] of a K-major e4m3 operand."""
        swizzle = descriptor >> 62
        assert swizzle in (1, 2), "rows of 128 or 64 bytes"
        pitch = 256 >> swizzle
        first, stride = (descriptor & 0x3FFF) << 4, ((descriptor >> 32) & 0x3FFF) << 4
        r, k = np.arange(rows)[:, None], np.arange(32)[None, :]
        places = first + r // 8 * stride + r % 8 * pitch + k
        return E4M3[self.shared[places ^ (((places >> 7) & (pitch // 16 - 1)) << 4)]]


def launch(ptx: str, grid: tuple[int, int, int], parameters: Mapping[int, int | float], memory: Any,
           maps: Mapping[int, Tensor], order: Any = None) -> dict[int, list[tuple[int, ...]]]:  # fmt: skip
    """Run every CTA of a grid, in the given order along x, on `memory`; what the last ones of each x brought by TMA."""
    assert LANES.size == 32
    program, boxes = Program(ptx), {}
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in order if order is not None else range(grid[0]):
                block = MoeBlock(program, parameters, memory, (x, y, z), grid, maps)
                block.run()
                boxes[x] = block.boxes
    return boxes
