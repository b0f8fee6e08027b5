"""The check of a release: what differs is named, and what was never seen is reported."""

import shutil

import pytest

from pyvmem.vllm import check
from pyvmem.engine.refuse import Refused


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the files that the check reads, to change."""
    files = {f for f, *_ in (*check.SIGNATURES, *check.FIELDS, *check.BODIES)}
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(check.installed() / file, tmp_path / file)
    monkeypatch.setattr(check, "installed", lambda: tmp_path)

    def change(file, old, new):
        text = (tmp_path / file).read_text()
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new))

    return change


def test_this_release_fits(copy):
    assert check.release("0.0", strict=True) is None


def test_the_pool_behaves(copy):
    check.behaviour()


@pytest.mark.parametrize(
    "file, old, new, says",
    [
        ("v1/worker/gpu_worker.py", "def sleep(self, level: int = 1)", "def sleep(self, level: int = 1, *, hard=False)",
         "Worker.sleep takes"),
        ("v1/worker/gpu_worker.py", "def execute_dummy_batch(self)", "def execute_idle_batch(self)",
         "Worker.execute_dummy_batch is not in"),
        ("v1/core/block_pool.py", "def get_new_blocks(self, num_blocks: int)",
         "def get_new_blocks(self, num_blocks: int, group: int)", "BlockPool.get_new_blocks takes"),
        ("v1/core/sched/output.py", "new_block_ids_to_zero:", "block_ids_to_zero:", "no field new_block_ids_to_zero"),
    ],
)  # fmt: skip
def test_a_difference_is_refused_by_name(copy, file, old, new, says):
    copy(file, old, new)
    with pytest.raises(Refused, match=says):
        check.release("9.9", strict=False)


def test_a_changed_body_is_reported_and_refused_if_strict(copy):
    copy("v1/core/block_pool.py", "ret: list[KVCacheBlock] = self.free_block_queue.popleft_n(num_blocks)",
         "ret = list(self.free_block_queue.popleft_n(num_blocks))")  # fmt: skip
    assert "BlockPool.get_new_blocks" in check.release("9.9", strict=False)
    with pytest.raises(Refused, match="STRICT"):
        check.release("9.9", strict=True)


def test_comments_and_docstrings_change_nothing(copy):
    copy("v1/core/block_pool.py", '"""Get new blocks from the free block pool.', '"""Something else.')
    copy("v1/core/block_pool.py", "    def get_new_blocks", "    # a comment\n    def get_new_blocks")
    assert check.release("9.9", strict=True) is None


class Lifo:
    """A pool that hands out the last block first."""

    def __init__(self, pool):
        self._pool = pool

    def __getattr__(self, name):
        return getattr(self._pool, name)

    def get_new_blocks(self, n):
        return self._pool.get_new_blocks(n)[::-1]


def test_another_order_of_blocks_is_seen():
    from vllm.v1.core.block_pool import BlockPool

    with pytest.raises(StopIteration):
        next(check._misbehaviour(BlockPool(8, True, 16)))
    assert "get_new_blocks" in next(check._misbehaviour(Lifo(BlockPool(8, True, 16))))
