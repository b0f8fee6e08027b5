"""FlashAttention-3, from vLLM's build where that is loaded, else from the package ``fa3-fwd``.

The kernel picks slots by `kv_batch_idx` and loads K and V by TMA in whole tiles, past the length too, so the cache must
back whole tiles (`KVCache(tile_rows=...)`). Tile sizes are those of the builds' sources (hopper/tile_size.h).

SPDX-License-Identifier: MIT
"""

import functools
import importlib
import importlib.util

import torch

from pyvmem.attention.kernel import BF16, FP8, FP16, Kernel, multiprocessors

# What the op takes and its schema gives no default for.
_DEFAULTS = {
    "is_rotary_interleaved": True, "attention_chunk": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0,
}  # fmt: skip


class _Build:
    """One build of the op: what was left out of it, and its arguments in the order of its schema."""

    def __init__(self, name, op, disabled):
        self.name = name
        self.disabled = disabled
        self._op = op.default
        arguments = self._op._schema.arguments
        self._names = [a.name for a in arguments]
        self._values = [
            a.default_value if a.has_default_value() else _DEFAULTS.get(a.name) for a in arguments
        ]  # fmt: skip

    def __call__(self, **given):
        values = [given.pop(name, value) for name, value in zip(self._names, self._values)]
        if given:
            raise ValueError(f"{self.name} of FlashAttention-3 takes no {', '.join(given)}")
        return self._op(*values)[0]


@functools.cache
def _fa3_fwd():
    """The build in the package fa3-fwd, or the exception that its import raised."""
    try:
        importlib.import_module("fa3_fwd._C")
        flags = importlib.import_module("fa3_fwd_config").CONFIG["build_flags"]
        disabled = {name.removeprefix("FLASHATTENTION_DISABLE_") for name, off in flags.items() if off}
        return _Build("fa3-fwd", torch.ops.fa3_fwd.fwd, disabled)
    except (ImportError, OSError, AttributeError, KeyError) as error:  # a package for another torch or Python
        return error


@functools.cache
def _vllm():
    return _Build("vLLM's build", torch.ops._vllm_fa3_C.fwd, set())


def build():
    """The build to use; None where neither is there."""
    if hasattr(torch.ops._vllm_fa3_C, "fwd"):
        return _vllm()
    if importlib.util.find_spec("fa3_fwd") is None:
        return None
    found = _fa3_fwd()
    return found if isinstance(found, _Build) else None


def _tiles(vllm, head_dim, fp8, window, softcap):
    """Rows of K in a tile: the least common multiple over the kernels that decode and prefill may launch."""
    if fp8 and vllm:
        sizes = ((64, 128), (96, 128), (128, 192), (192, 96), (256, 64 if window else 128))
    elif fp8:
        both = window and softcap
        sizes = ((64, 160), (96, 128), (128, 192 if both else 224), (192, 128 if both else 160),
                 (256, 64 if window else 128))  # fmt: skip
    elif vllm:
        sizes = ((64, 160 if window else 384), (96, 128 if window else 144), (128, 128), (192, 96),
                 (256, 64 if window else 80))  # fmt: skip
    else:
        sizes = ((64, 128), (96, 128 if window else 144), (128, 128), (192, 96 if window else 112),
                 (256, 64 if window else 80))  # fmt: skip
    return next((rows for most, rows in sizes if head_dim <= most), 128)


class FlashAttention3(Kernel):
    """FlashAttention-3 on Hopper."""

    name = "fa3"
    capability = (9, 0)
    dtypes = (BF16, FP16, FP8)

    def pairs(self):
        disabled = getattr(build(), "disabled", ())
        off = {"FP16": FP16, "FP8": FP8}
        dtypes = [d for d in self.dtypes if d not in [off[flag] for flag in off if flag in disabled]]
        return tuple((d, d) for d in dtypes)

    def tile_rows(self, shape):
        """Whole tiles. 128 rows for head_dim 128 in bfloat16."""
        vllm = hasattr(torch.ops._vllm_fa3_C, "fwd")
        return _tiles(vllm, shape.head_dim, shape.kv_dtype.itemsize == 1, shape.window, shape.softcap)

    def refusal(self, shape):
        reason = super().refusal(shape)
        have = build()
        if reason is None and have is not None:
            if shape.window and "LOCAL" in have.disabled:
                reason = f"window {shape.window} (the package fa3-fwd is built without)"
            elif shape.softcap and "SOFTCAP" in have.disabled:
                reason = f"softcap {shape.softcap} (the package fa3-fwd is built without)"
            elif shape.head_dim % 16 and shape.kv_dtype == FP8:
                reason = f"head_dim {shape.head_dim} (multiples of 16 for float8_e4m3fn)"
        if reason is None and shape.device == "cuda" and shape.capability[0] != 9:
            reason = f"a GPU of compute capability {shape.capability[0]}.{shape.capability[1]} (only 9.0)"
        return reason

    def unavailable(self, shape):
        if build() is not None:
            return None
        if importlib.util.find_spec("fa3_fwd") is not None:
            return f"the package fa3-fwd is installed but does not load: {str(_fa3_fwd()).splitlines()[0]}"
        return "FlashAttention-3 is not installed (pip install fa3-fwd, or import vllm.vllm_flash_attn)"

    def run(self, call):
        batch, window = call.batch, call.shape.window
        shared = {
            "softmax_scale": call.softmax_scale, "is_causal": True, "window_size_left": window - 1 if window else -1,
            "window_size_right": 0 if window else -1, "softcap": call.shape.softcap, "out": call.out,
        }  # fmt: skip
        if call.shape.phase == "prefill" and len(batch) == 1 and not batch.fixed:
            # One request: K and V as tensors of exactly its rows, and no scheduling for lengths that differ.
            slot, length = int(batch.slots[0]), int(batch.lengths[0])
            k, v = (x[slot : slot + 1, :length] for x in (call.k, call.v))
            if call.out is not None:
                shared["out"] = call.out[None]
            return build()(q=call.q[None], k=k, v=v, num_splits=call.num_splits, **shared)[0]
        # Its extent of K is what the kernel's own choice of splits goes by.
        k, v = (x[:, : batch.max_length] for x in (call.k, call.v))
        # With a longest query of 1 it would drop the mask and take tiles of 176 rows where those of the masked kernel,
        # with 128, are the same for decode and prefill.
        return build()(
            q=call.q, k=k, v=v, cu_seqlens_q=batch.cu_seqlens_q, max_seqlen_q=max(batch.max_query, 2),
            seqused_k=batch.lengths_t, kv_batch_idx=batch.slots_t, num_splits=self._splits(call), **shared,
        )  # fmt: skip

    def _splits(self, call):
        """1 where requests and heads fill the GPU: the kernel's own choice costs up to 4 % there."""
        if call.num_splits or call.shape.phase == "prefill":
            return call.num_splits
        filled = len(call.batch) * call.shape.kv_heads >= 1.5 * multiprocessors(call.q.device.index)
        return 1 if filled else 0
