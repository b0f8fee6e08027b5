"""The check of a release: what differs is named, and what was never seen is reported."""

import re
import shutil
from types import SimpleNamespace

import pytest

from pyvmem.engine import sources
from pyvmem.engine.settings import Refused
from pyvmem.sglang import check, settings


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the installed SGLang's files that vMem relies on."""
    own = check.NEEDS.installed()
    for file in {"_version.py", *(name for name, *_ in (*check.SIGNATURES, *check.NAMES.values(), *check.BODIES))}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(own / file, tmp_path / file)
    monkeypatch.setattr(sources.Needs, "installed", lambda self: tmp_path)
    return tmp_path


def test_the_installed_release_fits(copy):
    assert check.release("9.9") is None


@pytest.mark.parametrize(
    "file, old, new, says",
    [
        (check._SCHEDULER, "def flush_cache(self,", "def flush_cache(self, now,",
         "Scheduler.flush_cache takes .self, now, empty_cache=True., not"),
        (check._SWA, "def alloc(self, need_size", "def take(self, need_size", "alloc is not in"),
        (check._CHECKER, "max_total_num_tokens: int\n", "tokens: int\n",
         "SchedulerInvariantChecker .* has no max_total_num_tokens"),
    ],
)  # fmt: skip
def test_a_difference_is_refused_by_name(copy, file, old, new, says):
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    with pytest.raises(Refused, match=f"^VMEM_SGLANG=1: vMem does not know SGLang 9.9: .*{says}"):
        check.release("9.9")


@pytest.mark.parametrize("kind", check.NAMES)
def test_a_name_that_is_gone_is_refused(copy, kind):
    file, names = check.NAMES[kind]
    names = re.findall(r"(?:^| )(\w+)(?:>=[0-9.]+)?(?= |$)", names)  # not those of earlier releases alone
    (copy / file).write_text(re.sub(rf"\b({'|'.join(names)})\b", "renamed", (copy / file).read_text()))
    said = " ".join(check.NEEDS.differences(copy))
    assert [name for name in names if not re.search(rf"\b{name}\b", said)] == []


def test_a_release_that_is_too_old_is_refused_with_the_reason(copy):
    with pytest.raises(Refused, match="^VMEM_SGLANG=1: SGLang 0.5.20 is older than 0.5.21, .*PrefillBudget"):
        check.release("0.5.20")


def test_a_changed_body_is_reported(copy):
    text = (copy / check._TOKEN).read_text()
    (copy / check._TOKEN).write_text(text.replace("torch.cat((self.free_pages, free_index))", "free_index"))
    assert "TokenToKVPoolAllocator" in check.release("9.9")


NAMES = [name for name, *_ in settings.REFUSED]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused_is_an_argument_of_sglangs(name):
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs

    assert name in {field.name for field in record_fields(ServerArgs)}
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(Refused, match=rf"^VMEM_SGLANG=1: .*{option}( to \w+)? \(or unset VMEM_SGLANG\)$"):
        settings.check_arguments(SimpleNamespace(**{name: 2}))


def test_models_with_states_are_refused():
    with pytest.raises(Refused, match="^VMEM_SGLANG=1: models with states beside attention"):
        settings.check_scheduler(SimpleNamespace(is_hybrid_ssm=True))
    settings.check_scheduler(SimpleNamespace(is_hybrid_ssm=False))
