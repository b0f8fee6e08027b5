"""The check of a release: what differs is named, and what was never seen is reported."""

import ast
import re
import shutil
from pathlib import Path

import pytest

import pyvmem.vllm
from pyvmem.engine import sources
from pyvmem.engine.settings import Refused
from pyvmem.vllm import check
from pyvmem.vllm.check import NAMES


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the files that the check reads, to change."""
    files = {"_version.py", *(f for f, *_ in (*check.SIGNATURES, *NAMES.values(), *check.BODIES))}
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(check.NEEDS.installed() / file, tmp_path / file)
    monkeypatch.setattr(sources.Needs, "installed", lambda self: tmp_path)

    def change(file, old, new):
        text = (tmp_path / file).read_text()
        assert old in text
        (tmp_path / file).write_text(text.replace(old, new))

    return change


def test_this_release_fits(copy):
    assert check.NEEDS.release("0.0") is None


def test_the_pool_behaves(copy):
    check.behaviour()


@pytest.mark.parametrize(
    "file, old, new, says",
    [
        ("v1/worker/gpu_worker.py", "def sleep(self, level: int = 1)", "def sleep(self, level: int = 1, *, hard=False)",
         "Worker.sleep takes"),
        ("v1/worker/gpu_worker.py", "def shutdown(self)", "def stop(self)",
         "Worker.shutdown is not in"),
        ("v1/core/block_pool.py", "def get_new_blocks(self, num_blocks: int)",
         "def get_new_blocks(self, num_blocks: int, group: int)", "BlockPool.get_new_blocks takes"),
        ("v1/core/sched/output.py", "new_block_ids_to_zero:", "block_ids_to_zero:", "has no new_block_ids_to_zero"),
    ],
)  # fmt: skip
def test_a_difference_is_refused_by_name(copy, file, old, new, says):
    copy(file, old, new)
    with pytest.raises(Refused, match=says):
        check.NEEDS.release("9.9")


def test_what_the_plugin_imports_of_vllm_is_listed():
    """A release without it would not start, and the check of releases would not say so."""
    files = Path(pyvmem.vllm.__file__).parent.glob("*.py")  # slots have a check of their own
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.module.startswith("vllm.")]
    taken = {alias.name for n in imports for alias in n.names} - {k.partition("module ")[2] for k in NAMES}
    known = {name for kind in NAMES for name in (kind, *(listed(kind) if kind.startswith("module ") else ()))}
    assert taken - known == {"current_platform"}  # vLLM makes it when it is first asked for


def listed(kind):
    return set(re.findall(r"[A-Za-z_]+", NAMES[kind][1]))


@pytest.mark.parametrize("kind", NAMES)
def test_a_name_that_is_gone_is_refused(copy, kind):
    """Every name of a class, also those that the plugin reads with a default."""
    file, names = NAMES[kind]
    folder = check.NEEDS.installed()
    defined = sources.names_of(sources.Source(folder).find(file, kind.partition(" ")[0]))
    of_others = listed(kind) - defined
    assert all(re.search(rf"{name}[><]", names) for name in of_others)  # they are of other releases
    here = sorted(listed(kind) & defined)
    (folder / file).write_text(re.sub(rf"\b({'|'.join(here)})\b", "renamed", (folder / file).read_text()))
    said = " ".join(check.NEEDS.differences(folder))
    assert [name for name in here if not re.search(rf"[ .]{name} ", said + " ")] == []


# Names of vLLM's objects in the plugin's sources. If two classes share a name, either may have the attribute.
CALLED = {
    "Scheduler": "scheduler self._scheduler",
    "KVTransferConfig": "given",
    "DeviceConfig": "getattr(vllm_config,'device_config',None)",
    "KVConnectorBase_V1": "connector scheduler.connector",
    "MultiConnector": "connector",
    "MultiKVConnectorMetadata": "metadata",
    "OffloadingConnector": "self._connector",
    "OffloadingConnectorScheduler": "self._connector.connector_scheduler",
    "OffloadingConnectorMetadata": "message",
    "OffloadingWorkerMetadata": "message",
    "TransferJob": "job",
    "BlockIDsLoadStoreSpec": "job.src_spec job.dst_spec",
    "ModelRunnerOutput": "answer",
    "KVConnectorOutput": "answer.kv_connector_output",
    "SchedulerInterface": "self._scheduler",
    "Request": "request r running[-1] wait[0]",
    "NewRequestData": "request",
    "CachedRequestData": "cached output.scheduled_cached_reqs",
    "KVCacheManager": "manager self.manager self._manager scheduler.kv_cache_manager self._scheduler.kv_cache_manager",
    "KVCacheCoordinator": "self._coordinator",
    "BlockPool": "pool self.pool self._pool self._scheduler.kv_cache_manager.block_pool",
    "BlockHashToBlockMap": "pool.cached_block_hash_to_block by_hash",
    "FreeKVCacheBlockQueue": "queue self._queue",
    "KVCacheMetricsCollector": "metrics",
    "KVCacheBlock": "b block cached ids[-1]",
    "KVCacheBlockCopy": "copy",
    "SchedulerOutput": "output",
    "KVCacheTensor": "tensor t config.kv_cache_tensors[0]",
    "KVCacheConfig": "config kv_cache_config self.kv_cache_config self.model_runner.kv_cache_config",
    "KVCacheGroupSpec": "g group config.kv_cache_groups[0]",
    "KVCacheSpec": "spec s g.kv_cache_spec config.kv_cache_groups[0].kv_cache_spec inner[layer]ifinnerelsespec",
    "UniformTypeKVCacheSpecs": "spec",
    "VllmConfig": "vllm_config c config self.vllm_config worker.vllm_config",
    "ParallelConfig": "parallel c.parallel_config",
    "KVEventsConfig": "c.kv_events_config",
    "CompilationConfig": "config.compilation_config",
    "SchedulerConfig": "batch chosen scheduler vllm_config.scheduler_config",
    "CacheConfig": "self.cache_config cache config c.cache_config",
    "ModelConfig": "model vllm_config.model_config c.model_config worker.model_config",
    "LoadConfig": "load c.load_config",
    "AsyncLLM": "state.engine_client",
    "AttentionConfig": "config.attention_config getattr(c,'attention_config',None)",
    "Worker": "worker super()",
    "WorkerBase": "super() self worker",
    "GPUModelRunner": "self.model_runner worker.model_runner runner",
    "GPUModelRunner of V1": "runner",
    "Platform": "current_platform",
}
# Objects of these names that are not vLLM's, and vMem's own attribute of an output.
NOT_VLLMS = {
    "beside.py": {"chosen.pool"},
    "mixins.py": {"chosen.maximum", "chosen.pool", "pool.budget"},
    "check.py": {"spec.submodule_search_locations"},
    "layout.py": {"r.bytes", "r.layer_stride", "r.layers", "r.offset", "r.stride"},
    "prefix_key.py": {"r.bytes", "r.layers"},
    "prefix_worker.py": {"r.bytes", "r.layer_stride", "r.layers", "r.offset", "r.stride", "tensor.device",
                         "tensor.is_cuda", "tensor.view"},
    "http.py": {"metrics.engines", "metrics.register"},
    "platform.py": {"asked.on", "chosen.__module__", "chosen.__qualname__"},
    "worker.py": {"pool.budget", "pool.path", "tensor.context", "tensor.nbytes", "tensor.page_size", "tensor.tensor"},
    "scheduler.py": {f"chosen.{name}" for name in
                     "limit maximum minimum pool pool_size prefixes priority sleep".split()},
}  # fmt: skip


def reads():
    """(file, object, attribute) of all that the plugin's sources read of any object."""
    for path in Path(pyvmem.vllm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                yield path.name, ast.unparse(node.value), node.attr
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
                names = ast.unparse(node.args[1]).replace("{kind}", "(decode|prefill)").strip("f'")
                known = [n for kind in NAMES for n in listed(kind) if re.fullmatch(names, n)]
                for name in known or [names]:
                    yield path.name, ast.unparse(node.args[0]), name


def test_the_list_of_names_is_what_the_sources_read():
    called = {}
    for kind, names in CALLED.items():
        for name in names.split():
            called.setdefault(name, []).append(kind)
    used = {kind: set() for kind in NAMES}
    unknown = []
    for file, what, name in reads():
        kinds = called.get(what.replace(" ", ""), [])
        kinds = [kind for kind in kinds if name in listed(kind)]
        for kind in kinds:
            used[kind].add(name)
        ours = (
            f"{what}.{name}" in NOT_VLLMS.get(file, ())
            or name.startswith(("vmem", "_vmem"))
            or what in ("self", "super()")
        )
        if what in called and not kinds and not ours:
            unknown.append(f"{file}: {what}.{name}")
    assert not unknown, "neither listed in check.NAMES nor said to be vMem's own"
    mixins = {n.name for n in ast.walk(ast.parse((Path(pyvmem.vllm.__file__).parent / "mixins.py").read_text()))
             if isinstance(n, ast.FunctionDef)}  # fmt: skip
    overridden = {"Worker": "WorkerMixin", "WorkerBase": "WorkerMixin", "Scheduler": "SchedulerMixin"}
    for mixin in ast.parse((Path(pyvmem.vllm.__file__).parent / "mixins.py").read_text()).body:
        theirs = set().union(*(listed(kind) for kind, name in overridden.items() if name == getattr(mixin, "name", "")))
        added = {node.name for node in getattr(mixin, "body", ()) if isinstance(node, ast.FunctionDef)}
        added = {name for name in added if not name.startswith(("_vmem", "vmem_")) and name != "__init__"}
        assert not theirs or added <= theirs, "a method of vLLM's that a mixin overrides is not in check.NAMES"
    unread = {kind: listed(kind) - used[kind] - mixins for kind in NAMES if not kind.startswith("module ")}
    assert {kind: names for kind, names in unread.items() if names} == {}


def test_a_changed_body_is_reported(copy):
    copy("v1/core/block_pool.py", "ret: list[KVCacheBlock] = self.free_block_queue.popleft_n(num_blocks)",
         "ret = list(self.free_block_queue.popleft_n(num_blocks))")  # fmt: skip
    assert "BlockPool.get_new_blocks" in check.NEEDS.release("9.9")


def test_comments_and_docstrings_change_nothing(copy):
    copy("v1/core/block_pool.py", '"""Get new blocks from the free block pool.', '"""Something else.')
    copy("v1/core/block_pool.py", "    def get_new_blocks", "    # a comment\n    def get_new_blocks")
    assert check.NEEDS.release("9.9") is None


class Lifo:
    """A pool that hands out the last block first."""

    def __init__(self, pool):
        self._pool = pool

    def __getattr__(self, name):
        return getattr(self._pool, name)

    def get_new_blocks(self, n):
        return self._pool.get_new_blocks(n)[::-1]


def test_another_order_of_blocks_is_seen(monkeypatch):
    from vllm.v1.core.block_pool import BlockPool

    monkeypatch.setattr("vllm.v1.core.block_pool.BlockPool", lambda *args: Lifo(BlockPool(*args)))
    with pytest.raises(Refused, match="get_new_blocks"):
        check.behaviour()
