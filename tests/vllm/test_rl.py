"""What RL frameworks do with vLLM: engines that start beside a trainer, and a trainer in the engine's own process."""

import contextlib
import types
import uuid

import engines
import models
import pytest

GIB = 1 << 30
POOL = dict(VMEM_VLLM="1", VMEM_VLLM_POOL="rl", VMEM_VLLM_POOL_SIZE="40G")


@pytest.fixture(scope="module", autouse=True)
def imported():
    """vLLM is imported once, with the plugin on, and its engines run in forks."""
    import os

    os.environ["VMEM_VLLM"] = "1"
    import vllm.v1.engine.core  # noqa: F401
    import vllm.v1.engine.llm_engine  # noqa: F401
    from vllm import LLM, SamplingParams  # noqa: F401


def worker(monkeypatch, environ, free, **cache):
    """A worker with vLLM's own checks of the device's memory, and what is left of vLLM's configuration afterwards."""
    from vllm.v1.worker import utils

    from pyvmem.vllm.mixins import WorkerMixin

    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    class Base:
        def init_device(self):
            snapshot = types.SimpleNamespace(total_memory=80 * GIB, free_memory=free, device_="cuda:0")
            self.requested_memory = utils.request_memory(snapshot, self.cache_config)

        def determine_available_memory(self):
            return self.cache_config.kv_cache_memory_bytes or self.requested_memory

        def sleep(self, level=1):
            self.told.append(("sleep", level))

        def wake_up(self, tags=None):
            self.told.append(("wake", tags))

    made = type("Made", (WorkerMixin, Base), {})()
    made.cache_config = types.SimpleNamespace(gpu_memory_utilization=0.9, kv_cache_memory_bytes=None)
    vars(made.cache_config).update(cache)
    made.device, made.told = None, []
    pool = types.SimpleNamespace(budget=40 * GIB)
    made._vmem = types.SimpleNamespace(pool=lambda device: pool, weights=None, falls_asleep=lambda: None,
                                       sleep=lambda level: None, wake=lambda *tags: True)  # fmt: skip
    return made


def test_in_a_pool_an_engine_starts_beside_a_trainer(monkeypatch):
    """vLLM wants 0.9 of the device to be free, and takes the rest of it for its KV cache."""
    made = worker(monkeypatch, POOL, free=10 * GIB)
    made.init_device()
    assert made.determine_available_memory() == 40 * GIB
    assert vars(made.cache_config) == dict(gpu_memory_utilization=0.9, kv_cache_memory_bytes=None)


def test_in_a_pool_the_users_own_bytes_and_maximum_count(monkeypatch):
    made = worker(monkeypatch, dict(POOL, VMEM_VLLM_MAX="8G"), free=10 * GIB)
    made.init_device()
    assert made.determine_available_memory() == 8 * GIB
    made = worker(monkeypatch, POOL, free=10 * GIB, kv_cache_memory_bytes=5 * GIB)
    made.init_device()
    assert made.determine_available_memory() == 5 * GIB and made.cache_config.kv_cache_memory_bytes == 5 * GIB


def test_without_a_pool_vllms_own_rule_stands(monkeypatch):
    made = worker(monkeypatch, dict(VMEM_VLLM="1"), free=10 * GIB)
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        made.init_device()
    assert made.cache_config.gpu_memory_utilization == 0.9
    made = worker(monkeypatch, dict(VMEM_VLLM="1"), free=79 * GIB)
    made.init_device()
    assert made.determine_available_memory() == 72 * GIB


class Lease:
    """The lease of a trainer that notes when its process is in it."""

    closed = False

    def __init__(self, told):
        self.told = told

    def __enter__(self):
        self.told.append("in")

    def __exit__(self, *error):
        self.told.append("out")

    def reset(self):
        self.told.append("reset")


@contextlib.contextmanager
def beside_a_trainer(told):
    from pyvmem.engine import trainer

    trainer.here = trainer.Trainer(Lease(told))
    try:
        yield trainer.here
    finally:
        trainer.here = None


def test_a_model_sleeps_and_wakes_out_of_the_trainers_lease(monkeypatch):
    made = worker(monkeypatch, POOL, free=10 * GIB)
    with beside_a_trainer(made.told) as it:
        made.sleep(2)
        it.enter()
        made.wake_up(["weights"])
        made.sleep(1)
    assert made.told == [("sleep", 2), "in", "out", ("wake", ["weights"]), "in", "out", ("sleep", 1), "in"]


def generate(folder, port):
    """Generate twice in a process that trains, as TRL does, and once with a request that is aborted."""
    import os

    from vllm import SamplingParams

    from pyvmem.vllm import beside

    told, prompts = [], engines.prompts_of(4)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with beside_a_trainer(told) as it:
        beside.start = lambda config: config.parallel_config.distributed_executor_backend == "external_launcher"
        llm = engines.make(folder, distributed_executor_backend="external_launcher")
        it.enter()
        tokens = []
        for _ in range(2):
            told.append("call")
            tokens.append([list(a.outputs[0].token_ids) for a in llm.generate(prompts, params, use_tqdm=False)])
            told.append("train")
        engine = llm.llm_engine
        engine.add_request("gone", prompts[0], params)
        engine.step()
        told.append("abort")
        engine.abort_request(["gone"])
        told.append("train")
        llm.reset_prefix_cache()
    return told, tokens


def test_a_trainer_is_in_its_lease_between_the_calls_of_its_engine(tmp_path):
    import socket

    engines.in_child(lambda: str(models.write("llama", tmp_path)), vmem=False)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pool = dict(VMEM_VLLM_POOL=uuid.uuid4().hex[:12], VMEM_VLLM_POOL_SIZE="512M")
    told, tokens = engines.in_child(generate, tmp_path, port, vmem=True, environ=pool)
    call = ["call", "out", "in", "train"]
    assert told == ["in", *call, *call, "out", "abort", "in", "train"]
    assert tokens[0] == tokens[1]
