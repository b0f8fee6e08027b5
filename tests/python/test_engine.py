"""The common parts of the plugins of engines, with an engine of the test's own."""

import subprocess
import sys

import pytest

from pyvmem.engine import control
from pyvmem.engine.budget import BlockBudget, check_sizes
from pyvmem.engine.settings import Refused, read
from pyvmem.sglang import plugin as sglang_plugin
from pyvmem.vllm import plugin as vllm_plugin

MIB = 1 << 20


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_it_imports_no_engine_and_names_none():
    code = "import sys, pkgutil, pyvmem.engine, pyvmem.sleep, importlib\n" + (
        "for p in (pyvmem.engine, pyvmem.sleep):\n"
        "    [importlib.import_module(m.name) for m in pkgutil.iter_modules(p.__path__, p.__name__ + '.')\n"
        "     if not m.name.endswith('_kernel')]  # these need Triton\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('vllm', 'sglang') or 'pyvmem.vllm' in m])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


class Budget(BlockBudget):
    """An engine with a list of free blocks, of which the first `unused` hold no prefix."""

    def __init__(self, page, **more):
        super().__init__(page, 100, MIB, **{"least": 10, "low": 4, "ranks": 1, **more})
        self.free, self.unused = [], 0
        self._grow(self.total)

    def num_free(self):
        return len(self.free)

    def free_ids(self):
        return self.free

    coming = 0

    @property
    def spare(self):
        return min(self.unused, len(self.free))

    def _grow(self, n):
        ids = self._take_unbacked(n)
        self.free += ids
        self.unused += len(ids)
        return ids


@pytest.fixture
def budget():
    return Budget(control.open_page("abc", 0))


def test_a_limit_counts_as_at_least_one_request(budget):
    page = budget.page
    assert budget.allowed() == 100 and budget.num_backed == 100
    for limit, most, allowed in ((50, 0, 50), (3, 0, 10), (50, 20, 20), (5, 3, 10), (1000, 0, 100)):
        page[control.LIMIT], page[control.MAX] = limit * MIB, most * MIB
        assert budget.allowed() == allowed
    budget.lent = True
    assert budget.allowed() == 0


def test_what_others_ask_for_leaves_what_is_not_offered(budget):
    page = budget.page
    page[control.POOL], page[control.ATTACHED], page[control.OWN_BLOCK] = 5, 1, MIB
    budget.free = budget.free[:30]  # 70 in use
    budget.publish(keeps=5)
    assert page[control.OFFERED] == 25 and page[control.USED] == 70
    page.boards(1)[0, control.SHRINK_TO] = 40 * MIB
    assert budget.allowed() == 75 and budget.asked()
    budget.publish(yields=True)
    assert page[control.OFFERED] == 100 and budget.allowed() == 40
    page[control.MIN] = 60 * MIB
    budget.publish(yields=True)
    assert page[control.OFFERED] == 40 and budget.allowed() == 60


def test_an_engine_that_is_behind_takes_no_more(budget):
    budget.packing.put(budget.free[:40])
    budget.free = budget.free[40:]
    assert budget.num_backed == 60
    budget.is_behind = True
    assert budget.allowed() == 60 and budget._take_unbacked(5) == [1, 2, 3, 4, 5]


def test_shared_pages_are_counted_whole(budget):
    page = budget.page
    page[control.OWN_BLOCK], page[control.PAGE_BYTES] = MIB, 4 * MIB
    budget._learn_pages()
    assert budget.packing.shared and budget.packing.together == 4
    page[control.LIMIT] = 18 * MIB  # four pages and a half
    assert budget.allowed() == 16
    budget.packing.put(budget.free)
    budget.free = []
    ids = budget._take_unbacked(budget.allowed())
    assert len(ids) == 16 and len({i // 4 for i in ids} - {0}) <= 4


def test_in_a_pool_blocks_grow_as_far_as_nobody_must_give_any_up(budget):
    page = budget.page
    budget.packing.put(budget.free[:40])
    budget.free = budget.free[40:]
    assert budget.growable() == 40
    page[control.POOL], page[control.ATTACHED], page[control.OWN_BLOCK] = 5, 1, MIB
    page.boards(1)[0, control.HELD], page.boards(1)[0, control.BUDGET] = 60 * MIB, 75 * MIB
    assert budget.growable() == 15
    page[control.LIMIT] = 50 * MIB
    assert budget.growable() == -10


def test_memory_that_was_refused_is_not_asked_for_at_once(budget, monkeypatch):
    monkeypatch.setattr("pyvmem.engine.budget.RETRY", 3600)
    assert not budget.waits()
    budget.refused(budget.free[:5])
    budget.free = budget.free[5:]
    assert budget.waits() and budget.packing.num_out == 5 and budget.page[control.REFUSED] == 1
    monkeypatch.setattr("pyvmem.engine.budget.RETRY", 0)
    budget.refused([])
    assert not budget.waits()


def test_sizes_that_one_request_exceeds_are_told(caplog):
    chosen = read("VMEM_ONE", ("plain",), dict(VMEM_ONE="1", VMEM_ONE_LIMIT="1M", VMEM_ONE_MAX="8M", VMEM_ONE_POOL="p"))
    check_sizes(chosen, 4 * MIB, MIB, 5 * MIB, "--length")
    assert [r.getMessage() for r in caplog.records] == [
        "VMEM_ONE_LIMIT=1048576 counts as 4194304 bytes, which a request of the greatest length needs"
    ]
    with pytest.raises(Refused, match="^VMEM_ONE_POOL=p: .* needs 5242880 .* has 5242879; lower --length, or"):
        check_sizes(chosen, 4 * MIB, MIB, 5 * MIB - 1, "--length")


@pytest.mark.parametrize("switch", ["VMEM_ONE", "VMEM_OTHER"])
def test_settings_have_the_engines_own_names(switch):
    layouts = ("plain", "other")
    assert read(switch, layouts, {}) == read(switch, layouts, {switch: "0", f"{switch}_LIMIT": "much"})
    made = read(switch, layouts, {switch: "1", f"{switch}_MAX": "1G", f"{switch}_LAYOUT": "other"})
    assert made.on and made.maximum == 1 << 30 and made.layout == "other" and made.switch == switch
    for name, text in (("LAYOUT", "third"), ("LIMIT", "2G"), ("HTTP", "1"), ("MIN", "1M")):
        with pytest.raises(ValueError, match=f"^{switch}_{name}"):
            read(switch, layouts, {switch: "1", f"{switch}_MAX": "1G", f"{switch}_{name}": text})
    assert read(switch, layouts, {switch: "1", f"{switch}_HTTP": "1"}, ("http",)).http


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
@pytest.mark.parametrize("name", ["_POOL", "_LAYOUT", "LIMIT"])
def test_settings_without_the_switch_are_worth_a_line(monkeypatch, caplog, engine, name):
    switch = f"VMEM_{engine.upper()}"
    monkeypatch.delenv(switch, raising=False)
    monkeypatch.setenv(f"{switch}{name}", "1")
    {"vLLM": vllm_plugin.platform, "SGLang": sglang_plugin.activate}[engine]()
    said = [r.getMessage() for r in caplog.records]
    assert said == [f"{switch}{name} has no effect, because {switch} is not 1: {engine} runs without vMem"]


def test_parts_of_one_worker_add_up():
    page = control.open_page("parts", 0)
    page[control.RANKS_USED], page[control.BLOCK_BYTES] = 2, MIB
    page.words[control.RESIDENT : control.RESIDENT + 2] = 3, 4
    page.boards(2)[:, control.HELD] = 5, 6
    assert (control.Engine.of("", 0, page).resident, control.Engine.of("", 0, page).backed) == (4, 6)
    page[control.PARTS] = 2
    assert (control.Engine.of("", 0, page).resident, control.Engine.of("", 0, page).backed) == (7, 11)
