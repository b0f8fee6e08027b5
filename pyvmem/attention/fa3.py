"""FlashAttention-3, from vLLM's build if it is loaded, otherwise from the package ``fa3-fwd``.

The kernel selects slots by `kv_batch_idx`. It loads K and V by TMA in whole tiles, also past the length, so the cache
must back whole tiles (`KVCache(tile_rows=...)`). The tile sizes come from the builds' sources (hopper/tile_size.h).

SPDX-License-Identifier: MIT
"""

import functools
import importlib
import importlib.util
from dataclasses import replace
from typing import Any

import torch

from pyvmem.attention.kernel import BF16, FP8, FP16, Call, Kernel, Shape, multiprocessors

# Arguments of the op without a default in its schema.
_DEFAULTS = {
    "is_rotary_interleaved": True, "attention_chunk": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0,
}  # fmt: skip


class _Build:
    """One build of the op: the features that it lacks, and its arguments in the order of its schema."""

    def __init__(self, name: str, op: Any, disabled: set[str]) -> None:
        self.name = name
        self.disabled = disabled
        self.varlen_only = name == "vLLM's build"  # built without the other variants, to save space
        self._op = op.default
        arguments = self._op._schema.arguments
        self._names = [a.name for a in arguments]
        self._values = [
            a.default_value if a.has_default_value() else _DEFAULTS.get(a.name) for a in arguments
        ]  # fmt: skip

    def __call__(self, **given: Any) -> torch.Tensor:
        values = [given.pop(name, value) for name, value in zip(self._names, self._values)]
        if given:
            raise ValueError(f"{self.name} of FlashAttention-3 does not take {', '.join(given)}")
        out: torch.Tensor = self._op(*values)[0]
        return out


@functools.cache
def _fa3_fwd() -> _Build | Exception:
    """The build in the package fa3-fwd, or the exception that its import raised."""
    try:
        importlib.import_module("fa3_fwd._C")
        flags = importlib.import_module("fa3_fwd_config").CONFIG["build_flags"]
        disabled = {name.removeprefix("FLASHATTENTION_DISABLE_") for name, off in flags.items() if off}
        return _Build("fa3-fwd", torch.ops.fa3_fwd.fwd, disabled)
    except (ImportError, OSError, AttributeError, KeyError) as error:  # a package for another torch or Python
        return error


@functools.cache
def _vllm() -> _Build:
    return _Build("vLLM's build", torch.ops._vllm_fa3_C.fwd, set())


def build() -> _Build | None:
    """The build to use, or None if neither is installed."""
    if hasattr(torch.ops._vllm_fa3_C, "fwd"):
        return _vllm()
    if importlib.util.find_spec("fa3_fwd") is None:
        return None
    found = _fa3_fwd()
    return found if isinstance(found, _Build) else None


def _present() -> _Build:
    """The build of a call, after `unavailable` has found one."""
    found = build()
    assert found is not None
    return found


def _tiles(vllm: bool, head_dim: int, fp8: bool, window: int, softcap: float) -> int:
    """Rows of K in a tile: the least common multiple over the masked kernels of decode and prefill."""
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


def _options(call: Call) -> dict[str, Any]:
    window = call.shape.window
    return {
        "softmax_scale": call.softmax_scale, "is_causal": True, "window_size_left": window - 1 if window else -1,
        "window_size_right": 0 if window else -1, "softcap": call.shape.softcap,
    }  # fmt: skip


class FlashAttention3(Kernel):
    """FlashAttention-3 on Hopper."""

    name = "fa3"
    capability = (9, 0)
    dtypes = (BF16, FP16, FP8)

    def pairs(self) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
        disabled = getattr(build(), "disabled", ())
        off = {"FP16": FP16, "FP8": FP8}
        dtypes = [d for d in self.dtypes if d not in [off[flag] for flag in off if flag in disabled]]
        return tuple((d, d) for d in dtypes)

    def tile_rows(self, shape: Shape) -> int:
        """Whole tiles, 128 rows at head_dim 128 in bfloat16; 1 for prefill, which can be limited to each length."""
        return 1 if shape.phase == "prefill" and not shape.window else self._tiles(shape)

    def _tiles(self, shape: Shape) -> int:
        vllm = hasattr(torch.ops._vllm_fa3_C, "fwd")
        return _tiles(vllm, shape.head_dim, shape.kv_dtype.itemsize == 1, shape.window, shape.softcap)

    def _wide(self, shape: Shape) -> bool:
        """True if decode may use the kernel without a mask. Its tiles have 176 rows, which the cache must back."""
        return shape.phase == "decode" and 96 < shape.head_dim <= 128 and shape.kv_dtype.itemsize == 2 \
            and shape.tile_rows % 176 == 0  # fmt: skip

    def refusal(self, shape: Shape) -> str | None:
        reason = super().refusal(replace(shape, tile_rows=0) if self._wide(shape) else shape)
        have = build()
        if reason is None and shape.window and shape.phase == "decode":
            reason = f"window {shape.window} in decode (its tiles begin at the window there, and end past those backed)"
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

    def reluctance(self, shape: Shape) -> str | None:
        if shape.phase == "prefill" and shape.requests > 8 and not self._joint(shape):
            return f"{shape.requests} launches, one per request (a single one if tile_rows is {self._tiles(shape)})"
        return None

    def unavailable(self, shape: Shape) -> str | None:
        if build() is not None:
            return None
        if importlib.util.find_spec("fa3_fwd") is not None:
            return f"the package fa3-fwd is installed but does not load: {str(_fa3_fwd()).splitlines()[0]}"
        return "FlashAttention-3 is not installed (pip install fa3-fwd, or import vllm.vllm_flash_attn)"

    def plan(self, call: Call) -> None:
        shape = call.shape
        if call.batch.fixed and not self._joint(shape) and shape.phase == "prefill":
            raise ValueError(
                f"kernel fa3 does not take a prefill batch with max_length on a cache of tile_rows {shape.tile_rows}"
                f" (a multiple of {self._tiles(shape)})"
            )

    def _joint(self, shape: Shape) -> bool:
        """True if one launch may serve requests of several lengths: the tile past each length is backed."""
        return shape.tile_rows % self._tiles(shape) == 0 and not shape.window

    def run(self, call: Call) -> torch.Tensor:
        batch, shape = call.batch, call.shape
        if shape.phase == "prefill" and not batch.fixed and (len(batch) == 1 or not self._joint(shape)):
            return self._one_by_one(call)
        # The kernel chooses its splits by the extent of K.
        k, v = (x[:, : batch.max_length] for x in (call.k, call.v))
        # With a longest query of 1, the kernel uses no mask, and tiles of 176 rows instead of 128.
        most = 1 if self._wide(shape) else max(batch.max_query, 2)
        return _present()(
            q=call.q, k=k, v=v, out=call.out, cu_seqlens_q=batch.cu_seqlens_q, max_seqlen_q=most,
            seqused_k=batch.lengths_t, kv_batch_idx=batch.slots_t, num_splits=self._splits(call), **_options(call),
        )  # fmt: skip

    def _one_by_one(self, call: Call) -> torch.Tensor:
        """Prefill with K and V as tensors of exactly each request's rows, so that TMA reads nothing past them."""
        batch, out = call.batch, call.out
        if out is None:
            out = torch.empty(call.q.shape, dtype=BF16 if call.q.dtype == FP8 else call.q.dtype, device=call.q.device)
        run, options = _present(), {**_options(call), "num_splits": call.num_splits}
        for i, (slot, length, rows) in enumerate(batch.requests()):
            q, o = call.q[rows], out[rows]
            k, v = (x[slot : slot + 1, :length] for x in (call.k, call.v))
            if run.varlen_only:
                ends = batch.cu_seqlens_q[i : i + 2] - rows.start if i else batch.cu_seqlens_q[:2]
                run(q=q, k=k, v=v, out=o, cu_seqlens_q=ends, max_seqlen_q=len(q), **options)
            else:
                run(q=q[None], k=k, v=v, out=o[None], **options)
        return out

    def _splits(self, call: Call) -> int:
        """1 if requests and heads fill the GPU: the kernel's own choice would be up to 4 % slower."""
        if call.num_splits or call.shape.phase == "prefill":
            return call.num_splits
        filled = len(call.batch) * call.shape.kv_heads >= 0.9 * multiprocessors(call.q.device.index)
        return 1 if filled else 0
