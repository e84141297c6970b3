"""What decode's kernels need of the PTX machine beyond the router's.

8- and 16-bit floats, byte permutes, atomics, TMA of rank 4.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from ptx_machine import (
    READ,
    TENSOR_MAP,
    U64,
    Block,
    Instruction,
    Warp,
    f32,
    s32,
    split_operands,
    to_bits,
)

# e4m3 byte -> bits of the f16 of the same value, exact
_E4M3 = (
    torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float16).view(torch.int16).numpy()
)
E4M3 = _E4M3.view(np.uint16).astype(U64)
BYTE = U64(0xFF)


def bf16_bits(values: Any) -> Any:
    """Rounded to nearest even."""
    rounded = torch.from_numpy(np.ascontiguousarray(values, np.float32)).bfloat16().view(torch.int16)
    return rounded.numpy().view(np.uint16).astype(U64)


def f16_bits(values: Any) -> Any:
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float32).astype(np.float16).view(np.uint16).astype(U64)


class DecodeBlock(Block):
    """One CTA. `maps`: number -> (uint8 [pages, page_size, heads, row bytes], tokens of a box, bytes of a box row)."""

    maps: Any

    def _cvt(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, *sources = instruction.operands
        kinds = instruction.kinds[-2:]
        bits = [self.value(warp, source) for source in sources]
        if kinds == ("f16x2", "e4m3x2"):
            found = E4M3[(bits[0] & BYTE).astype(int)] | E4M3[
                ((bits[0] >> U64(8)) & BYTE).astype(int)
            ] << U64(16)
        elif kinds[0] in ("bf16x2", "f16x2") and kinds[1] == "f32":
            convert = bf16_bits if kinds[0] == "bf16x2" else f16_bits
            found = convert(f32(bits[0])) << U64(16) | convert(f32(bits[1]))
        elif kinds == ("bf16", "f32"):
            found = bf16_bits(f32(bits[0]))
        elif kinds[0] == "f32" and kinds[1][0] in "su":
            found = to_bits(READ[kinds[1]](bits[0]), "f32")
        else:
            super()._cvt(warp, instruction, mask)
            return
        self.put(warp, target, found, mask)

    def _prmt(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        target, low, high, selector = instruction.operands
        both = (self.value(warp, low) & U64(0xFFFFFFFF)) | self.value(warp, high) << U64(32)
        chosen = self.value(warp, selector)
        found = np.zeros(32, U64)
        for i in range(4):
            nibble = (chosen >> U64(4 * i)) & U64(15)
            assert not (nibble & U64(8)).any(), "sign replication is not known"
            found |= ((both >> (nibble * U64(8))) & BYTE) << U64(8 * i)
        self.put(warp, target, found, mask)

    def _extreme(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        """`min` and `max`; of a number and a NaN the number."""
        target, *operands = instruction.operands
        kind = instruction.kinds[-1]
        names = {"max": np.fmax, "min": np.fmin} if kind == "f32" else {"max": np.maximum, "min": np.minimum}
        given = [READ[kind](self.value(warp, o)) for o in operands]
        self.put(warp, target, to_bits(names[instruction.name](*given), kind), mask)

    _max = _min = _extreme

    def _atom(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        assert instruction.kinds[-2:] == ("add", "u32"), instruction.text
        target, where, operand = instruction.operands
        addresses, added = self.address(warp, where), self.value(warp, operand)
        before = np.zeros(32, U64)
        for lane in np.nonzero(mask)[0]:
            word = self.memory[int(addresses[lane]) : int(addresses[lane]) + 4].view(np.uint32)
            before[lane] = word[0]
            word[0] = (int(word[0]) + int(added[lane])) % 2**32
        self.put(warp, target, before, mask)

    def _cp(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        """A TMA copy of [1, tokens, 1, bytes] of a cache, swizzled by the row's width, zeros out of bounds."""
        assert "cp.async.bulk.tensor.4d.shared" in instruction.text, instruction.text
        target, source, barrier = instruction.operands
        match = re.fullmatch(r"\[(%\w+),\s*\{(.*)\}\]", source)
        assert match is not None, source
        cache, tokens, width = self.maps[int(self.value(warp, match[1])[0]) - TENSOR_MAP]
        d, head, token, page = (int(s32(self.value(warp, c))[0]) for c in split_operands(match[2]))
        d *= width // self.elements_per_box
        box = np.zeros((tokens, width), np.uint8)
        if 0 <= page < cache.shape[0] and 0 <= head < cache.shape[2]:
            before = max(-token, 0)  # rows ahead of the page
            inside = cache[page, token + before : max(token + tokens, 0), head, d : d + width]
            box[before : before + inside.shape[0], : inside.shape[1]] = inside
        first = int(self.address(warp, target)[0])
        places = first + width * np.arange(tokens)[:, None] + np.arange(width)[None, :]
        self.shared[places ^ (((places >> 7) & (width // 16 - 1)) << 4)] = box
        self.barriers[int(self.address(warp, barrier)[0])].update(announced=-width * tokens)

    elements_per_box = 1

    def _half(self, warp: Warp, name: str, half: int) -> Any:
        bits = (self.value(warp, name) >> U64(16 * half)).astype(np.uint16)
        if self.f16:
            return bits.view(np.float16).astype(np.float32)
        return (bits.astype(np.uint32) << 16).view(np.float32)

    f16 = False

    def _mma(self, warp: Warp, instruction: Instruction, mask: Any) -> None:
        self.f16 = instruction.kinds[-2] == "f16"
        super()._mma(warp, instruction, mask)
