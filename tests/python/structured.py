"""Structured data: contents of memory, and what becomes of them that a comparison by sums may not tell apart.

Random words hide what sums miss. Weights are seldom random: maps of experts are permutations of small integers, masks
are one bit, scales are constant, signs flip, and rows, experts and tiles change places.

SPDX-License-Identifier: MIT
"""

import itertools

import torch

ROW = 64


def contents(n, seed=1):
    """{name: tensor of n numbers}, of several types."""
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.arange(n)
    return {
        "zeros": torch.zeros(n, dtype=torch.int64),
        "constant": torch.full((n,), 0.02, dtype=torch.bfloat16),
        "sorted words": numbers.clone(),
        "sorted halves": numbers.to(torch.int32),
        "experts": numbers % ROW,
        "one, three, two": torch.tensor([1, 3, 2]).repeat(n // 3 + 1)[:n],
        "permutation": torch.randperm(n, generator=draw),
        "small integers": torch.randint(0, 8, (n,), generator=draw),
        "bytes": torch.randint(0, 4, (n,), generator=draw, dtype=torch.uint8),
        "one bit": 1 << (numbers % 63),
        "mask": torch.randint(0, 2, (n,), generator=draw, dtype=torch.bool),
        "bf16": torch.randn(n, generator=draw).to(torch.bfloat16),
        "fp32": torch.randn(n, generator=draw),
        "fp64": torch.linspace(-1, 1, n, dtype=torch.float64),
    }


def swapped(x, *pairs, width=1):
    """A copy in which the runs of `width` numbers at each pair of places have changed places."""
    made = x.clone()
    for a, b in pairs:
        made[a : a + width], made[b : b + width] = x[b : b + width], x[a : a + width]
    return made


def changes(x):
    """Yield (name, what x becomes): one number changes, runs change places, what one gains another loses."""
    n = len(x)
    middle, rows = n // 2, n // ROW * ROW
    for i in (0, 1, middle, n - 1):
        yield f"one number, {i}", x.index_put((torch.tensor(i),), ~x[i] if x.dtype is torch.bool else x[i] + 1)
    for a, b in ((0, 1), (0, n - 1), (middle, middle + 1), (3, 5), (1, 1 + ROW)):
        yield f"a pair, {a} and {b}", swapped(x, (a, b))
        yield f"two pairs, {a} and {b}", swapped(x, (a, b), (a + 2 * ROW, b + 2 * ROW) if b + 2 * ROW < n else (7, 9))
    for row in (0, ROW, 2 * ROW):
        yield f"experts of the layer at {row}", swapped(x, (row + 3, row + 5))
    yield "three in a row", torch.cat([x[2:3], x[0:1], x[1:2], x[3:]])
    for width in (ROW, 2 * ROW, 16 * ROW):
        if 3 * width <= n:
            yield f"neighbours of {width}", swapped(x, (0, width), width=width)
            yield f"ends of {width}", swapped(x, (0, n - width), width=width)
    table = x[:rows].view(-1, ROW)
    for name, made in (
        ("reversed", x.flip(0)), ("moved by one", x.roll(1)), ("moved by a row", x.roll(ROW)),
        ("rows reversed", torch.cat([table.flip(0).reshape(-1), x[rows:]])),
        ("columns reversed", torch.cat([table.flip(1).reshape(-1), x[rows:]])),
        ("columns moved", torch.cat([table.roll(1, 1).reshape(-1), x[rows:]])),
        ("sorted", x.sort().values),
    ):  # fmt: skip
        yield name, made
    bits = x.view(torch.uint8)
    size = x.element_size()
    for a, b in ((0, 1), (0, 4), (3, middle), (ROW, 2 * ROW)):
        for bit in (1, 128):  # the lowest and the sign of two numbers: what one sum gains, it loses
            made = bits.clone()
            made[a * size + size - 1] ^= bit
            made[b * size + size - 1] ^= bit
            yield f"bit {bit} of the numbers {a} and {b}", made.view(x.dtype) if x.dtype is not torch.bool else made
    for a, b, by in itertools.product((0, middle), (1, 9), (1, 2)):  # one gains what another loses
        if not x.dtype.is_floating_point and x.dtype is not torch.bool:
            made = x.clone()
            made[a] += by
            made[a + b] -= by
            yield f"{by} from {a + b} to {a}", made


def families(n, seed=1):
    """Yield (name, {name of a change: uint8 tensor}): what contents of n numbers become, and as they are."""
    for kind, x in contents(n, seed).items():
        family = {"as it is": x, **dict(changes(x))}
        yield kind, {name: made.contiguous().view(torch.uint8) for name, made in family.items()}


def confused(sums, n, seed=1):
    """Pairs of different contents that a function of uint8 tensors takes for the same."""
    found = []
    for kind, family in families(n, seed):
        seen = {}
        for name, memory in family.items():
            other = seen.setdefault(sums(memory), name)
            if not torch.equal(memory, family[other]):
                found.append(f"{kind}: {other}; {name}")
    return found
