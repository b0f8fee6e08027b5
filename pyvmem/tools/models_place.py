"""Which pool serves which model, what a pool has left, and which servers run with other settings than the file's.

SPDX-License-Identifier: MIT
"""

from __future__ import annotations

from pathlib import Path

from pyvmem.engine import control
from pyvmem.engine.metrics import parent_of
from pyvmem.tools.models_file import KEYS, File, Model, Pool, Replica


def propose(file: File) -> dict[str, Pool]:
    """A pool for each model that names none.

    Prism's rule (Algorithm 1 of arXiv:2505.04021) without its migration: the models by their rate, the highest first,
    each into the pool with the lowest rate for each byte that its weights leave free. Models sleep, so the weights of a
    pool may exceed it. Such a pool comes after those whose models are all awake at once. Raises ValueError if a model
    fits no pool.
    """
    rate = {pool.name: 0.0 for pool in file.pools}
    held = {pool.name: 0 for pool in file.pools}
    chosen: dict[str, Pool] = {}

    def put(m: Model, pool: Pool) -> None:
        rate[pool.name] += m.rate / max(len(m.pools), 1)
        held[pool.name] += m.weights

    for r in file.replicas:
        put(r.model, r.pool)
    for m in sorted(file.models, key=lambda m: (-m.rate, -m.weights)):
        if m.pools:
            continue

        def cost(pool: Pool, m: Model = m) -> tuple[bool, bool, float, int]:
            beside = held[pool.name] + m.weights
            asked = rate[pool.name] + m.rate
            free = pool.size - beside
            spare = max(len(pool.device), 1) > m.gpus  # GPUs that the model leaves alone
            return spare, free <= 0, asked / free if free > 0 else asked * beside / pool.size, beside

        fits = [p for p in file.pools if m.weights + m.min < p.size and not 0 < len(p.device) < m.gpus]
        if not fits:
            raise ValueError(f"models.{m.name}: no pool has room for its weights, {m.weights} bytes on each of "
                             f"{m.gpus} GPUs")  # fmt: skip
        chosen[m.name] = min(fits, key=cost)
        put(m, chosen[m.name])
    return chosen


def differences(file: File, replica: Replica, engine: control.Engine) -> list[str]:
    """The keys of the file that its server was started with otherwise: it must be started again."""
    pid = engine.pid
    try:
        while "--served-model-name" not in (line := _parts(pid, "cmdline")):
            pid = parent_of(pid)
        began = dict(part.split("=", 1) for part in _parts(pid, "environ") if "=" in part)
    except OSError:  # it ends, or something else has started it
        return []
    wanted = file.environment(replica)
    names = {*wanted, *(name for name in KEYS if name.startswith(f"VMEM_{replica.model.engine.upper()}_"))}
    found = {
        KEYS.get(name, "device" if name.startswith("CUDA_") else "env")
        for name in names
        if began.get(name) != wanted.get(name)
    }
    command = file.server(replica, line[line.index("--host") + 1] if "--host" in line[:-1] else "")[1:]
    return sorted(found | ({"args"} if line[-len(command) :] != command else set()))


def _parts(pid: int, what: str) -> list[str]:
    return Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace").removesuffix("\0").split("\0")
