"""The layouts of a layer's K and V in virtual tensors, and vLLM's views of them.

A layer stores `row` bytes per token. The layouts differ in which rows are adjacent:

- ``block``: within a block, the rows of all tokens in one layer. There is one virtual tensor, so backing a prompt is
  one call to the driver. Kernels with a block table read it as fast as vLLM's own tensors.
- ``token``: the rows of one token in all layers. There is one virtual tensor. In each layer, tokens have a constant
  stride, as kernels without a block table require, but are far apart, which makes attention 2 to 7 % slower.
- ``layer``: one virtual tensor per layer, in which tokens are adjacent. Backing a prompt is one call per layer.

SPDX-License-Identifier: MIT
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

GRANULE = 64 << 10


@dataclass(frozen=True)
class Layout:
    """The layout of `layers` layers with rows of `row` bytes, in blocks of `tokens` tokens."""

    kind: str
    layers: int
    row: int
    tokens: int

    @property
    def tensors(self) -> int:
        return self.layers if self.kind == "layer" else 1

    @property
    def tensor_row(self) -> int:
        """Bytes of a token in one virtual tensor."""
        return self.row if self.kind == "layer" else self.row * self.layers

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all tensors."""
        return self.layers * self.row * self.tokens

    def page_size(self, sizes: Sequence[int]) -> int:
        """The largest of the page sizes that divides a tensor's part of a block."""
        part = self.tensor_row * self.tokens
        fit = [s for s in sizes if part % s == 0]
        if not fit:
            raise ValueError(f"a block of {self.tokens} tokens takes {part} bytes in a tensor, no multiple of the "
                             f"smallest page, {min(sizes)}")  # fmt: skip
        return max(fit)

    def slot_tokens(self, tokens: int) -> int:
        """The fewest rows of a slot for `tokens` tokens, so that slots are whole blocks and can begin at 2 MiB."""
        step = math.lcm(self.tokens, (2 << 20) // math.gcd(2 << 20, self.tensor_row))
        return -(-tokens // step) * step

    def strides(self, layer: int, kernel_tokens: int) -> tuple[int, int, int]:
        """(offset, stride of a kernel block, stride of a token) of a layer in its tensor, in bytes."""
        if self.kind == "layer":
            return 0, kernel_tokens * self.row, self.row
        if self.kind == "token":
            return layer * self.row, kernel_tokens * self.tensor_row, self.tensor_row
        if kernel_tokens != self.tokens:
            raise ValueError(f"VMEM_VLLM_LAYOUT=block: the attention kernel's blocks have {kernel_tokens} tokens, "
                             f"vLLM's {self.tokens}; choose token or layer")  # fmt: skip
        return layer * self.row * self.tokens, self.tokens * self.tensor_row, self.row


def block_tokens(kind: str, layers: int, row: int, base: int) -> int:
    """The smallest multiple of `base` tokens that fills whole pages of 64 KiB in each tensor."""
    bytes = base * (row if kind == "layer" else row * layers)
    return base * (GRANULE // math.gcd(GRANULE, bytes))


def view(
    flat: torch.Tensor, layout: Layout, layer: int, dtype: torch.dtype, shape: Sequence[int], order: Sequence[int]
) -> torch.Tensor:
    """A view of a layer's KV cache in the layout of its attention backend.

    Parameters
    ----------
    flat : torch.Tensor
        The bytes of the layer's virtual tensor, one-dimensional.
    dtype : torch.dtype
    shape : tuple
        The backend's logical shape, with all kernel blocks of the tensor.
    order : tuple
        The backend's stride order, which says how memory permutes the shape. Blocks must come first. In the layout
        ``token``, where rows of other layers lie between a layer's tokens, tokens must come second.

    Raises `ValueError` if the backend's order does not fit the layout.
    """
    memory = [shape[i] for i in order]
    if memory[0] != shape[0] or order[0] != 0:
        raise ValueError(f"the attention backend's KV layout {tuple(order)} does not begin with blocks")
    size = dtype.itemsize
    inner = math.prod(memory[2:]) * size  # bytes of a token, if tokens come second
    tokens = memory[1]
    if layout.kind == "token" and inner != layout.row:
        raise ValueError(f"VMEM_VLLM_LAYOUT=token: the attention backend's KV layout {tuple(memory)} does not have "
                         "tokens second; choose block or layer")  # fmt: skip
    kernel_tokens = tokens if layout.kind == "token" else math.prod(memory[1:]) * size // layout.row
    offset, block, token = layout.strides(layer, kernel_tokens)
    strides = [block // size]
    strides += [math.prod(memory[k + 1 :]) for k in range(1, len(memory))]
    if layout.kind == "token":
        strides[1] = token // size
    back = [order.index(i) for i in range(len(order))]
    flat = flat.view(dtype)
    return flat.as_strided(memory, strides, flat.storage_offset() + offset // size).permute(*back)
