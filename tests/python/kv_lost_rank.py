"""What every rank of the lost ranks runs: python kv_lost_rank.py RANK WORLD FOLDER dies|sleeps steps|hashes

The last rank ends, or stops to answer, between two steps; the others must say so, and not wait for ever.

SPDX-License-Identifier: MIT
"""

import datetime
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pyvmem.parallel.cache import init_cache
from pyvmem.parallel.hashes import TensorParallelBlockHashes
from pyvmem.parallel.pledge import AHEAD


def main(rank, world, folder, how, asks):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    # Ranks that start one after another meet in the first group. The second begins when all are there.
    group = dist.new_group(timeout=datetime.timedelta(seconds=10 if how == "sleeps" else 600))
    options = {"backend": "host", "dtype": torch.float16, "name": None, "group": group}
    tp = init_cache(1, world, 64, 4, 1000, 1 << 24, **options)
    blocks, hashes = TensorParallelBlockHashes(tp, 4), [b"1", b"2"]
    slot = tp.alloc(10)
    assert tp.step([10 if s == slot else 0 for s in range(4)])
    done = folder / "done"
    if rank == world - 1:
        if how == "dies":
            os._exit(0)
        while len(list(folder.glob("done*"))) < world - 1:  # it does not answer until the others have given up
            time.sleep(0.05)
        return
    blocks.add(slot, hashes)
    try:
        if asks == "hashes":
            blocks.alloc(12, hashes)
        for tokens in range(11, 12 + 2 * AHEAD):
            tp.step([tokens if s == slot else 0 for s in range(4)])
    except RuntimeError as error:
        assert "a rank has ended, or did not answer" in str(error), error
        assert error.__cause__ is not None
    else:
        raise AssertionError("nobody missed the rank")
    tp.cache.wait()
    before = tp.cache.stats()
    calls = (
        tp.room, lambda: tp.step([0] * 4), lambda: tp.free(slot), lambda: blocks.peek(hashes), blocks.evicted,
        lambda: blocks.alloc(12, hashes), lambda: blocks.add(slot, hashes), lambda: blocks.drop(hashes),
    )  # fmt: skip
    for call in calls:  # at once, of every call
        try:
            call()
        except RuntimeError as error:
            assert "a rank has ended, or did not answer" in str(error), error
        else:
            raise AssertionError("nobody remembers the lost rank")
    assert tp.cache.stats() == before
    tp.close()
    Path(f"{done}{rank}").touch()
    print("lost", flush=True)
    os._exit(0)  # without the group: its rank is gone


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
