"""The loop of docs/engine.md, as it stands there, at budgets from one request up.

SPDX-License-Identifier: MIT
"""

import random
import re
from pathlib import Path

import pytest
import torch

from pyvmem import KVCache

PAGE = (Path(__file__).parent.parent.parent / "docs/engine.md").read_text()
LOOP = re.search(r"^```python\n(.*?)^```$", PAGE[PAGE.index("## The loop") :], re.M | re.S)[1]
WAITING = re.compile(r"^waiting = (\[.*?\])", re.M)
SLOTS = 4


class Stuck(Exception):
    pass


def run(monkeypatch, budget, waiting=None, slots=SLOTS):
    """Run the loop with another budget in bytes. Returns its variables, and those of each step: (preempted, rows)."""
    text = LOOP.replace("budget=1 << 20", f"budget={budget}").replace("slots=4", f"slots={slots}")
    if waiting:
        text = WAITING.sub(f"waiting = {waiting!r}", text).replace("finished == 6", f"finished == {len(waiting)}")
    assert f"budget={budget}" in text and f"slots={slots}" in text
    wanted = eval(WAITING.search(text)[1])
    most = 10 * sum(output + 1 for _, output in wanted)
    step, steps, variables = KVCache.step, [], {}

    def counted(cache, lengths, **options):
        if options.get("dry"):
            return step(cache, lengths, **options)
        if len(steps) > most:
            raise Stuck(f"{len(steps)} steps, {variables['finished']} of {len(wanted)} requests finished")
        steps.append(variables["preempted"])
        return step(cache, lengths, **options)

    monkeypatch.setattr(KVCache, "step", counted)
    try:
        exec(compile(text, "docs/engine.md", "exec"), variables)
    finally:
        if "cache" in variables:
            variables["cache"].close()
    short = sum(before != after for before, after in zip(steps, steps[1:]))
    return variables, len(steps), short


@pytest.mark.parametrize("pages", [12, 13, 16, 20, 24, 40, 64, 1024])  # 12: what the longest request needs
def test_the_documented_loop_ends_at_any_budget(monkeypatch, pages):
    variables, steps, short = run(monkeypatch, pages << 16)
    assert variables["finished"] == 6
    assert variables["preempted"] <= 1.2 * short


@pytest.mark.parametrize("seed", range(6))
def test_it_preempts_one_request_for_each_short_step(monkeypatch, seed):
    chance = random.Random(seed)
    waiting = [(chance.randint(1, 300), chance.randint(1, 200)) for _ in range(30)]
    variables, steps, short = run(monkeypatch, (16 << 16) + (chance.randint(0, 60) << 16), waiting, slots=16)
    assert variables["finished"] == 30 and short
    assert variables["preempted"] <= 1.2 * short
    assert steps < sum(output for _, output in waiting) + 30 + variables["preempted"]


def test_a_budget_below_one_request_ends_it_with_the_reason(monkeypatch):
    with pytest.raises(MemoryError, match="the budget is too small for one request: .*missing"):
        run(monkeypatch, 11 << 16)


class LateDevice:
    """Kernels that run only when the loop waits for them; they write rows, and read all rows of their requests."""

    def __init__(self):
        self.queued, self.known, self.ran = [], {}, 0

    def launch(self, cache, running):
        work = []
        for slot, request in running.items():
            known, have = self.known.get(slot, (None, 0))
            work.append((slot, request, have if known is request else 0, request[0]))
            self.known[slot] = request, request[0]
        self.queued.append((cache.last_step, [*cache.keys, *cache.values], work))

    def wait(self, step):
        while self.queued and self.queued[0][0] <= step:
            _, tensors, work = self.queued.pop(0)
            for slot, request, have, length in work:
                want = torch.arange(length, dtype=torch.float32) + id(request) % 1000 * 1000
                for tensor in tensors:
                    tensor[slot, have:length] = want[have:, None, None]
                    assert torch.equal(tensor[slot, :length, 1, 3], want)
            self.ran += 1


@pytest.mark.parametrize("pages", [12, 16, 24, 1024])
def test_the_documented_loop_waits_for_what_it_closes(monkeypatch, pages):
    """The text as it stands, over a device that runs a kernel when somebody waits for it, and not before."""
    late, close = LateDevice(), KVCache.close
    text = LOOP.replace('recorded after them."""', 'recorded after them."""\n    late.wait(step)')
    text = text.replace("    # Launch the model here", "    late.launch(cache, running)\n    # Launch the model here")
    assert text.count("late.") == 2

    def checked(cache):
        assert not late.queued, f"the cache is closed while kernels of {len(late.queued)} steps run"
        close(cache)

    monkeypatch.setattr(KVCache, "close", checked)
    variables = {"late": late}
    exec(compile(text.replace("budget=1 << 20", f"budget={pages << 16}"), "docs/engine.md", "exec"), variables)
    assert variables["finished"] == 6 and late.ran
