"""The check of a release: what differs is named, and what was never seen is reported."""

import shutil

import pytest

from pyvmem.engine.refuse import Refused
from pyvmem.sglang import check


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the installed SGLang's files that vMem relies on."""
    own = check.installed()
    for file in {name for name, *_ in (*check.SIGNATURES, *check.FIELDS, *check.BODIES)}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(own / file, tmp_path / file)
    monkeypatch.setattr(check, "installed", lambda: tmp_path)
    return tmp_path


def test_the_installed_release_fits(copy):
    assert check.release("0.0", strict=True) is None


@pytest.mark.parametrize(
    "file, old, new, says",
    [
        (check._SCHEDULER, "def on_idle(self)", "def on_idle(self, now)", "Scheduler.on_idle takes .self, now., not"),
        (check._SWA, "def alloc(self, need_size", "def take(self, need_size", "alloc is not in"),
        (check._CHECKER, "max_total_num_tokens: int\n", "tokens: int\n", "has no field max_total_num_tokens"),
    ],
)
def test_a_difference_is_refused_by_name(copy, file, old, new, says):
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    with pytest.raises(Refused, match=f"^VMEM_SGLANG=1: vMem does not know SGLang 9.9: .*{says}"):
        check.release("9.9", strict=False)


def test_a_changed_body_is_reported_and_refused_if_strict(copy):
    text = (copy / check._TOKEN).read_text()
    (copy / check._TOKEN).write_text(text.replace("torch.cat((self.free_pages, free_index))", "free_index"))
    assert "TokenToKVPoolAllocator" in check.release("9.9", strict=False)
    with pytest.raises(Refused, match="^VMEM_SGLANG_STRICT=1"):
        check.release("9.9", strict=True)
