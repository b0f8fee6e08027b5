"""What a model says a request would wait for it, by which routers choose.

SPDX-License-Identifier: MIT
"""

import pytest

from pyvmem.engine import control
from pyvmem.engine.control import State
from pyvmem.sleep import routing
from pyvmem.sleep.turns import Model

GIB = 1 << 30


def wait(state=State.ASLEEP, others=(), missing=0, lacks=0):
    return routing.expected_wait(state, others, missing, lacks, slice=2.0, rate=10.0 * GIB)


def test_an_awake_model_costs_nothing_and_one_that_must_wait_for_others_most():
    asks = Model("b", State.ASLEEP, queued=1)
    kept, copied = wait(), wait(missing=15 * GIB)
    turn, behind = (wait(missing=15 * GIB, lacks=1, others=others) for others in ((), (asks, asks)))
    assert wait(State.AWAKE, missing=15 * GIB, lacks=1) == kept == 0
    assert (copied, turn, behind) == (1.5, 3.5, 7.5)
    assert behind < routing.CLOSED


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """Two models of a pool of 20 GiB; the first sleeps, and half of its weights are gone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = [control.open_page(name, 0) for name in ("one", "two")]
    for page in made:
        control.claim(page, page.path.name)
        page[control.BLOCK_BYTES], page[control.RANKS_USED], page[control.LEAST] = 1 << 20, 1, 1024
        page[control.POOL_BYTES], page[control.WEIGHTS] = 20 * GIB, 12 * GIB
        page[control.STATE], page[control.WEIGHTS_HELD] = State.AWAKE, 12 * GIB
    made[0][control.STATE], made[0][control.WEIGHTS_HELD] = State.ASLEEP, 6 * GIB
    return made


def test_memory_that_others_give_at_once_is_no_wait(pages):
    me, other = pages
    assert routing.memory(me, [other]) == (6 * GIB, 13 * GIB, 20 * GIB)  # it is idle
    other[control.RUNNING], other[control.USED] = 1, 2048
    assert routing.memory(me, [other]) == (6 * GIB, 13 * GIB, 6 * GIB)
    other[control.MIN] = 3 * GIB
    assert routing.memory(me, [other])[2] == 5 * GIB
    other[control.STATE] = State.ASLEEP  # with its requests, and half of its weights have no copy
    other[control.GIVES] = 6 * GIB
    assert routing.memory(me, [other])[2] == 12 * GIB
