"""What decode's kernel for many query rows needs of the PTX machine beyond the other's: `wgmma` in all its forms.

A of 16-bit or e4m3 elements in shared memory, or of 16-bit ones in registers; B along the contraction or across it.
Operands are read when a product is issued and when it is awaited, and must be the same: data that comes late, a stage
handed back early and a register written meanwhile all show.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from ptx_decode import DecodeBlock
from ptx_machine import LANES, U64, Instruction, Warp, f32, split_operands, to_bits

SIZES = {"e4m3": 1, "f16": 2, "bf16": 2}


def numbers(raw: Any, kind: str) -> Any:
    """[rows, bytes] of elements as float64."""
    raw = np.ascontiguousarray(raw)
    if kind == "e4m3":
        return torch.from_numpy(raw).view(torch.float8_e4m3fn).double().numpy()
    if kind == "f16":
        return raw.view(np.float16).astype(np.float64)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class RowsBlock(DecodeBlock):
    """One CTA."""

    def _wgmma(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        if instruction.kinds[0] != "mma_async":
            if instruction.kinds[0] == "wait_group":
                while len(warp.groups) > int(instruction.operands[0]):
                    for product in warp.groups.pop(0):
                        self._finish(warp, *product)
            else:
                super()._wgmma(warp, instruction, mask)
            return
        registers, a, b, use, *rest = instruction.operands
        shape, kind, other = instruction.kinds[3], instruction.kinds[-2], instruction.kinds[-1]
        assert kind == other and instruction.kinds[-3] == "f32", instruction.text
        match = re.fullmatch(r"m64n(\d+)k(\d+)", shape)
        assert match is not None and int(match[2]) * SIZES[kind] == 32, instruction.text
        n, k = int(match[1]), int(match[2])
        assert rest[:2] == ["1", "1"], instruction.text
        transposed = rest[2:]
        in_registers = a.startswith("{")
        across = bool(transposed) and transposed[-1] == "1"
        assert in_registers or transposed in ([], ["0", "0"]), "A in shared memory must lie along K"
        where = (
            split_operands(a[1:-1]) if in_registers else int(self.value(warp, a)[0]),
            int(self.value(warp, b)[0]), kind, n, k, across,
        )  # fmt: skip
        warp.issued.append(
            (
                split_operands(registers[1:-1]),
                where,
                bool(self.value(warp, use)[0]),
                self._operands(warp, *where),
            )
        )

    def _operands(
        self, warp: Warp, a: Any, b: int, kind: str, n: int, k: int, across: bool
    ) -> tuple[Any, Any]:
        """The warp's 16 rows of A, and B as [n, k] or, across, [k, n]; bytes."""
        rows = slice(16 * (warp.index % 4), 16 * (warp.index % 4) + 16)
        if isinstance(a, int):
            first = self._along(a, 64)[rows]
        else:
            assert SIZES[kind] == 2
            halves = np.zeros((16, 16), np.uint16)
            for i, name in enumerate(a):
                for half in (0, 1):
                    column = 2 * (LANES % 4) + half + 8 * (i // 2)
                    halves[LANES // 4 + 8 * (i % 2), column] = (
                        self.value(warp, name) >> U64(16 * half)
                    ).astype(np.uint16)
            first = halves.view(np.uint8)
        return first, self._across(b, n, k) if across else self._along(b, n)

    def _along(self, descriptor: int, rows: int) -> Any:
        """[rows, 32 bytes] of an operand that lies along the contraction, swizzled by 128, 64 or 32 bytes."""
        swizzle = descriptor >> 62
        assert 1 <= swizzle <= 3, "no swizzle is not known"
        pitch = 256 >> swizzle
        first, stride = (descriptor & 0x3FFF) << 4, ((descriptor >> 32) & 0x3FFF) << 4
        r, k = np.arange(rows)[:, None], np.arange(32)[None, :]
        places = first + r // 8 * stride + r % 8 * pitch + k
        return self.shared[places ^ (((places >> 7) & (8 >> (swizzle - 1)) - 1) << 4)]

    def _across(self, descriptor: int, n: int, k: int) -> Any:
        """[k, 2 n bytes] of a 16-bit operand across the contraction: pieces of 64 columns, 128-byte swizzle."""
        assert descriptor >> 62 == 1
        first = (descriptor & 0x3FFF) << 4
        piece, stride = ((descriptor >> 16) & 0x3FFF) << 4, ((descriptor >> 32) & 0x3FFF) << 4
        r, c = np.arange(k)[:, None], np.arange(2 * n)[None, :]
        places = first + c // 128 * piece + r // 8 * stride + r % 8 * 128 + c % 128
        return self.shared[places ^ (((places >> 7) & 7) << 4)]

    def _finish(
        self, warp: Warp, registers: tuple[str, ...], where: Any, accumulate: bool, issued: Any
    ) -> None:
        found = self._operands(warp, *where)
        _, _, kind, n, _, across = where
        assert all(np.array_equal(x, y) for x, y in zip(issued, found, strict=True)), (
            "an operand changed under way"
        )
        assert len(registers) * 2 == n
        a, b = numbers(found[0], kind), numbers(found[1], kind)
        product = a @ (b if across else b.T)
        for number, name in enumerate(registers):
            column, row = number // 4 * 8 + number % 2 + LANES % 4 * 2, LANES // 4 + 8 * (number // 2 % 2)
            before = f32(warp.registers[name]).astype(np.float64) if accumulate else 0.0
            warp.registers[name] = to_bits(before + product[row, column], "f32")
