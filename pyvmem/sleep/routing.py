"""The cost of sending a request here: how long it would wait for its model. Routers compare it among replicas.

Begin with `expected_wait`, which is pure. The leader publishes it in the control page.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

from collections.abc import Sequence

from pyvmem.engine import control
from pyvmem.engine.control import Engine, Page, State
from pyvmem.sleep.turns import Model

CLOSED = 1e6  # seconds: what a drained model says
RATE = 16.0 * (1 << 30)  # bytes a second at which weights come back, until a model has woken


def expected_wait(
    state: State, others: Sequence[Model], missing: int, lacks: int, slice: float, rate: float = RATE
) -> float:
    """Seconds that a request which comes now waits until its model is awake.

    Parameters
    ----------
    state : State
        The model's.
    others : sequence of Model
        Those that share memory with it.
    missing : int
        Bytes of its weights that are not on the device.
    lacks : int
        Bytes of memory that it would lack to wake if idle models slept for it; 0 or less: none.
    slice : float
        Seconds that a busy model serves before it sleeps with its requests.
    rate : float
        Bytes a second at which weights come back.
    """
    if state == State.AWAKE:
        return 0.0
    turns = 1 + sum(other.is_asking for other in others) if lacks > 0 else 0
    return min(missing / rate + turns * slice, CLOSED)


def memory(page: Page, others: Sequence[Page]) -> tuple[int, int, int]:
    """Bytes of a model's weights that are not on the device, that it needs to wake, and that it could have at once.

    page : its own. others : those of the other models of its pool.
    """
    own = Engine.of("", 0, page)
    found = (own.weights - own.weights_held, own.weights + own.least,
             page[control.POOL_BYTES] - sum(map(_pinned, others)))  # fmt: skip
    missing, needs, room = (min(max(size, 0), control.NO_LIMIT) for size in found)  # pages may hold anything
    return missing, needs, room


def _pinned(page: Page) -> int:
    """Bytes that a model of the pool gives to nobody at once."""
    engine = Engine.of("", 0, page)
    if page.state in (State.ASLEEP, State.WAKING):
        return engine.weights_held - min(page.gives, engine.weights_held) + engine.used
    return engine.weights_held + max(engine.min, engine.used) if engine.running else 0
