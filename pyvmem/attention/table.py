"""The table of kernels, and the one place that chooses among them.

SPDX-License-Identifier: MIT
"""

from dataclasses import dataclass

from pyvmem.attention.fa3 import FlashAttention3
from pyvmem.attention.kernel import Kernel, Shape
from pyvmem.attention.sdpa import SDPA
from pyvmem.attention.triton import Triton

KERNELS: dict[str, Kernel] = {k.name: k for k in (FlashAttention3(), Triton(), SDPA())}

# Usually fastest first, as measured on an H200 (docs/results/attention.md).
ORDER = {
    "decode": ("triton", "fa3", "sdpa"),
    "decode of many long requests": ("fa3", "triton", "sdpa"),
    "prefill": ("fa3", "triton", "sdpa"),
}
MANY, LONG = 264, 4096  # requests times KV heads, rows: more than two for each multiprocessor of an H200


@dataclass(frozen=True)
class Choice:
    """The kernel that `best` chose.

    Attributes
    ----------
    kernel : str
        The kernel's name.
    why : str
        The reason, in one line.
    refused : dict
        Each kernel that would have been preferred, with what prevents it.
    """

    kernel: str
    why: str
    refused: dict[str, str]


def refusal_of(name: str, shape: Shape) -> str | None:
    """Why the kernel cannot take the shape on this machine, in one line; None if it can."""
    kernel = KERNELS[name]
    return kernel.refusal(shape) or kernel.unavailable(shape)


def choose(shape: Shape) -> Choice:
    """The `Choice` for a shape. Raises ValueError if no kernel takes it."""
    refused: dict[str, str] = {}
    second: list[str] = []
    for name in _order(shape):
        reason = refusal_of(name, shape)
        if reason is None:
            reason = KERNELS[name].reluctance(shape)
            if reason is None:
                return _choice(name, shape, refused)
            second.append(name)
        refused[name] = reason
    if second:
        return _choice(second[0], shape, {n: r for n, r in refused.items() if n not in second})
    raise ValueError("no kernel supports this call: " + "; ".join(f"{n}: {r}" for n, r in refused.items()))


def _order(shape: Shape) -> tuple[str, ...]:
    if shape.phase != "decode":
        return ORDER[shape.phase]
    many = shape.requests * shape.kv_heads > MANY and shape.rows >= LONG
    # Triton's kernel converts FP8 to 16 bits, and was measured only at head_dim 128.
    other = shape.head_dim > 128 or shape.kv_dtype.itemsize == 1
    return ORDER["decode of many long requests" if many or other else "decode"]


def _choice(name: str, shape: Shape, refused: dict[str, str]) -> Choice:
    first = "the fastest of those that take it" if refused else "the fastest measured"
    where = "a CPU" if shape.device == "cpu" else f"a GPU of compute capability {'.'.join(map(str, shape.capability))}"
    why = "".join(f"; not {n}: {r}" for n, r in refused.items())
    return Choice(name, f"{name}: {first} for {shape.phase} on {where}{why}", refused)


def require(name: str, shape: Shape) -> Kernel:
    """The kernel of that name. The ValueError is one line that says what prevents it and what would work."""
    if name not in KERNELS:
        raise ValueError(f"kernel {name!r} must be one of best, {', '.join(KERNELS)}")
    kernel = KERNELS[name]
    reason = kernel.refusal(shape)
    if reason is not None:
        reason = f"kernel {name} does not take {reason}"
    else:
        reason = kernel.unavailable(shape)
        if reason is None:
            return kernel
        reason = f"kernel {name} does not run here: {reason}"
    others = [other for other in ORDER[shape.phase] if other != name and refusal_of(other, shape) is None]
    raise ValueError(f"{reason}; {'kernel ' + ' or '.join(others) + ' does' if others else 'no other kernel does'}")
