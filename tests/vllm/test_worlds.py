"""Random loads in a pool where nothing keeps still: every row is right, no step maps, and every request ends.

A neighbour takes and gives memory, orders are answered late, and limits and minimums move, between any two steps.
"""

import contextlib
import random

import pytest
import steps
from neighbour import Neighbour
from test_steps import engine, in_pool, maps_in_steps  # noqa: F401

from pyvmem.engine import control
from pyvmem.vllm import demand, scheduler

KINDS = (("full",), ("full", "window"), ("full", "mamba"), ("full", "window", "window", "window"))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_others_do_requests_end_on_rows_that_are_right(engine, monkeypatch, seed):  # noqa: F811
    draw, asynchronous = random.Random(seed), seed % 2 == 0
    monkeypatch.setattr(scheduler, "AWAIT", 0.01)
    monkeypatch.setattr(demand, "CHUNK", draw.choice((32, 512)))
    monkeypatch.setattr(steps, "REQUESTS", draw.choice((2, 6, 24)))
    in_pool(monkeypatch, f"world{seed}", VMEM_VLLM_POOL_SIZE=f"{draw.choice((10, 16, 24))}M")
    e = engine(kinds=KINDS[seed], seed=seed, asynchronous=asynchronous, queue=1 + asynchronous,
               batch=draw.choice((64, 256)), page=draw.choice((64 << 10, 40 << 10)))  # fmt: skip
    neighbour, late, since, told = Neighbour(), draw.choice((0, 2, 6)), {}, e.page.answer

    def answer(order, rank):
        return told(order, rank) if e.steps >= since.setdefault(order, e.steps) + late else -1

    def every():
        for worker in e.workers:  # fences pass
            worker.finish()
        if draw.random() < 0.05:
            e.limit(draw.choice((40, 90, 1 << 30)))
        if draw.random() < 0.05:
            e.page[control.MIN] = draw.choice((0, 20)) * e.budget.block_bytes
        if draw.random() < 0.1:
            neighbour.give()
            size = draw.choice((0, 1, 3, 8)) << 20
            with contextlib.suppress(MemoryError):
                if not neighbour.blocks.ask(size):
                    neighbour.blocks.back(range(size // page))

    page = 64 << 10  # of the neighbour
    e.page.answer, e.every = answer, every
    e.run(40)
    e.page.answer = told
    neighbour.give()
    e.idle()
    with e.memory.lock:
        e.memory.publish()
    assert e.read > 20_000 and maps_in_steps(e) == 0
    assert e.budget.used == e.budget.ordered == 0
    assert e.page[control.WANTED] == e.page[control.HEAD] == e.page[control.USED] == 0
