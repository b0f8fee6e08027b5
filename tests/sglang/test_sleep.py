"""Models that sleep, on SGLang's scheduler step by step: what neighbours take comes back, and SGLang's own tokens.

Each test runs in forks of one process that has imported SGLang.
"""

import random
import uuid

import pytest
import steps
from models import model
from neighbour import Neighbour
from steps import MIB, Engine, forked, workload

JOBS = [(f"r{i}", prompt, n) for i, (prompt, n) in enumerate(workload(30))]
POOL = 64 * MIB  # 14 MiB of them for weights


@pytest.fixture(scope="module", autouse=True)
def imported():
    steps.imports()


def on_vmem(do, *args, ranks=1, **more):
    """As `forked`, with the weights in a pool of its own."""
    more = dict(VMEM_SGLANG_POOL=uuid.uuid4().hex[:12], VMEM_SGLANG_POOL_SIZE=str(POOL), VMEM_SGLANG_WEIGHTS="1",
                **more)  # fmt: skip
    return forked(do, *args, ranks=ranks, **more)


def plain(**options):
    return steps.plain("gqa", JOBS, **options)


def sleep(engine):
    engine.order("ReleaseMemoryOccupation", tags=["vmem"])
    assert engine.memory.asleep and engine.memory.sleep._page.asleep


def wake(engine):
    engine.order("ResumeMemoryOccupation", tags=["vmem"])
    assert engine.memory.asleep == engine.memory.sleep._page.asleep or engine.ranks > 1
    return not engine.memory.asleep


def used(engine):
    return sum(k.used * k.block_bytes for k in engine.memory.budgets)


def serves(engine):
    """The engine's page says that its server has requests, as in a server."""
    from pyvmem.engine import control

    engine.memory.page[control.RUNNING] = 1


CASES = {
    "pages of 16": {},
    "pages of 1": dict(page_size=1),
    "without overlap": dict(overlap=False, disable_overlap_schedule=True),
    "without a radix cache": dict(disable_radix_cache=True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_sleeps_with_its_requests_and_a_neighbour_takes_its_weights(name):
    """It falls asleep at any step: in prompts that are cut in chunks, and with a step whose tokens have not come."""

    def run():
        engine = Engine(model("gqa"), **{"page_size": 16, **CASES[name]})
        neighbour, rng, seen = Neighbour(), random.Random(4), []
        weights = engine.memory.sleep._sleeper.weights
        serves(engine)

        def each(engine):
            if engine.steps % 17 != 5:
                return
            rows = used(engine)
            sleep(engine)
            engine.step()
            kept = used(engine)
            size = POOL - engine.held() - rng.choice((2, 6, 20)) * MIB  # nothing of rows, which may share pages
            neighbour.take(engine, size)
            seen.append((rows, kept, weights.held, size))
            neighbour.give()
            assert wake(engine) and weights.held == weights.bytes

        engine.run(JOBS, each=each)
        return engine.tokens(), seen, weights.bytes

    tokens, seen, whole = on_vmem(run)
    assert tokens == plain(**{"page_size": 16, **CASES[name]})
    assert len(seen) > 5 and any(rows for rows, *_ in seen) and all(rows == kept for rows, kept, *_ in seen)
    assert min(held for _, _, held, _ in seen) < whole // 2 < whole > 8 * MIB


def test_what_nobody_takes_stays():
    """Weights and prefixes are there after a sleep, and nothing is computed again."""

    def run():
        engine = Engine(model("gqa"), page_size=16)
        engine.run(JOBS)
        cached, weights = engine.memory.budgets[0].cached, engine.memory.sleep._sleeper.weights
        sleep(engine)
        engine.rest()
        held, still = weights.held, engine.memory.budgets[0].cached
        assert wake(engine)
        return cached, still, held, weights.bytes

    cached, still, held, whole = on_vmem(run)
    assert cached == still > 0 and held == whole


def test_a_wake_without_memory_leaves_the_model_asleep_and_says_what_it_lacks():
    def run():
        from pyvmem.engine import control

        engine, neighbour = Engine(model("gqa"), page_size=16), Neighbour()
        engine.run(JOBS[:10])
        page = engine.memory.page
        sleep(engine)
        neighbour.take(engine, POOL - 4 * MIB)
        page[control.PATIENCE] = 50
        failed = [wake(engine) for _ in range(2)]
        told = page.short, page[control.WOKE] % 2, engine.memory.sleep._sleeper.weights.held
        engine.submit(*JOBS[10])  # it waits
        engine.rest(5)
        assert not engine.requests[10].output_ids
        neighbour.give()
        assert wake(engine)
        engine.run(JOBS[11:])
        return engine.tokens(), failed, told, page.short, engine.memory.sleep._sleeper.weights.bytes

    tokens, failed, (short, odd, held), after, whole = on_vmem(run)
    assert tokens == plain(page_size=16)
    assert failed == [False, False] and odd and 0 < short <= whole and held < whole and not after


def test_sglangs_own_orders_mean_what_they_mean_in_sglang():
    """Also among those of vMem: an engine that sleeps goes on only when it wakes."""

    def run():
        engine, neighbour = Engine(model("gqa"), page_size=16), Neighbour()
        engine.run(JOBS[:10])
        budget, done = engine.memory.budgets[0], []
        engine.order("ReleaseMemoryOccupation", tags=["weights"])
        done.append((engine.memory.asleep, budget.cached > 0))
        engine.order("ReleaseMemoryOccupation", tags=["kv_cache"])
        done.append((engine.memory.asleep, budget.cached > 0))
        neighbour.take(engine, POOL - 4 * MIB)
        neighbour.give()
        engine.order("ResumeMemoryOccupation", tags=["weights"])
        engine.order("ResumeMemoryOccupation", tags=["kv_cache"])
        assert not engine.memory.asleep
        engine.run(JOBS[10:20])
        engine.order("ReleaseMemoryOccupation")
        engine.order("ResumeMemoryOccupation")
        assert not engine.memory.asleep
        serves(engine)
        engine.submit(*JOBS[20])
        for _ in range(4):
            engine.step()
        sleep(engine)
        sleep(engine)
        engine.order("PauseGeneration", mode="in_place")
        engine.order("ContinueGeneration", torch_empty_cache=False)
        made = len(engine.requests[20].output_ids)
        neighbour.take(engine, POOL - used(engine) - 4 * MIB)  # a step would read what is not there
        neighbour.give()
        engine.rest(3)
        assert len(engine.requests[20].output_ids) == made
        engine.order("PauseGeneration", mode="in_place")
        assert wake(engine) and wake(engine)
        engine.rest(3)  # SGLang's own pause goes on
        assert len(engine.requests[20].output_ids) == made
        engine.order("ContinueGeneration", torch_empty_cache=False)
        engine.run(JOBS[21:])
        return engine.tokens(), done

    tokens, done = on_vmem(run)
    assert tokens == plain(page_size=16)
    assert done == [(True, True), (True, False)]


def answers(engine):
    """The answers to orders from now on: "" if one was carried out."""
    told = []
    engine.scheduler.send_control_output = lambda output, order: told.append(output.rid or "")
    return told


def test_an_order_to_release_while_requests_run_is_refused_and_harms_nothing():
    """Awake, and asleep with requests. SGLang asserts that none runs, and ends."""

    def run():
        engine = Engine(model("gqa"), page_size=16)
        told = answers(engine)
        serves(engine)
        for job in JOBS[:8]:
            engine.submit(*job)
        while not engine.scheduler.running_batch.reqs:
            engine.step()
        for tags in (None, ["weights"], ["kv_cache"]):
            engine.order("ReleaseMemoryOccupation", tags=tags)
        assert not engine.memory.asleep and not engine.scheduler.flush_cache()
        sleep(engine)
        told.pop()
        for tags in (None, ["weights"], ["kv_cache"]):
            engine.order("ReleaseMemoryOccupation", tags=tags)
        assert engine.memory.asleep and not engine.scheduler.flush_cache()
        assert wake(engine) and told.pop() == ""
        engine.run(JOBS[8:])
        return engine.tokens(), told

    tokens, told = on_vmem(run)
    assert tokens == plain(page_size=16)
    assert told == ["release_memory_occupation: requests run or wait"] * 6


def test_what_was_not_released_is_not_resumed():
    """SGLang ends if it is told to resume what it has not released."""

    def run():
        engine = Engine(model("gqa"), page_size=16)
        told = answers(engine)
        engine.run(JOBS[:5])
        engine.order("ResumeMemoryOccupation")
        engine.order("ReleaseMemoryOccupation", tags=["kv_cache"])
        engine.order("ResumeMemoryOccupation", tags=["kv_cache", "weights"])
        engine.order("ResumeMemoryOccupation", tags=["kv_cache"])
        engine.order("ResumeMemoryOccupation", tags=["kv_cache"])
        engine.run(JOBS[5:])
        return engine.tokens(), told

    tokens, told = on_vmem(run)
    assert tokens == plain(page_size=16)
    begins = "resume_memory_occupation: these were not released: "
    assert told == [f"{begins}cuda_graph, kv_cache, weights", "", f"{begins}weights", "", f"{begins}kv_cache"]


def test_a_model_that_sleeps_already_releases_weights_that_others_have():
    """SGLang would read buffers of the weights, whose memory is a neighbour's."""

    def run():
        engine, neighbour = Engine(model("gqa"), page_size=16), Neighbour()
        told = answers(engine)
        engine.run(JOBS[:10])
        sleep(engine)
        neighbour.take(engine, POOL - 4 * MIB)
        for tags in (["weights"], None):
            engine.order("ReleaseMemoryOccupation", tags=tags)
        neighbour.give()
        assert wake(engine)  # for a request, as in a server
        engine.run(JOBS[10:20])
        engine.order("ResumeMemoryOccupation")
        engine.run(JOBS[20:])
        return engine.tokens(), told

    tokens, told = on_vmem(run)
    assert tokens == plain(page_size=16) and not any(told)


@pytest.mark.parametrize("name", ["release", "resume"])
def test_an_order_raises_what_an_engine_answers(name):
    import asyncio
    import types

    from pyvmem.errors import OutOfMemory
    from pyvmem.sglang import hooks

    async def give(order):
        return [types.SimpleNamespace(rid=rid) for rid in order]

    manager = types.SimpleNamespace(**{f"{name}_memory_occupation_communicator": give},
                                    auto_create_handle_loop=lambda: None)  # fmt: skip
    order = getattr(hooks, f"{name}d")
    asyncio.run(order(None, manager, [None, None]))
    with pytest.raises(RuntimeError, match="^requests run"):
        asyncio.run(order(None, manager, [None, "requests run"]))
    with pytest.raises(OutOfMemory, match="lacks 3 MiB of its pool to wake"):
        asyncio.run(order(None, manager, ["the model lacks 3 MiB of its pool to wake", None]))


@pytest.mark.parametrize("why", ["gone", "starved"])
def test_a_model_that_sleeps_gives_up_rows_that_nobody_waits_for(why):
    """Those of requests whose clients have gone, and all of an engine that slept because it lacked memory for rows."""

    def run():
        from pyvmem.engine import control

        engine, neighbour = Engine(model("gqa"), page_size=16), Neighbour()
        page = engine.memory.page
        serves(engine)
        for job in JOBS[:8]:
            engine.submit(*job)
        while not engine.scheduler.running_batch.reqs:
            engine.step()
        engine.step()
        if why == "starved":
            page[control.STARVED] = 1
            engine.memory.news()
        sleep(engine)
        if why == "gone":
            for name, *_ in JOBS[:8]:
                engine.abort(name)
            assert used(engine)
            page[control.RUNNING] = 0
        engine.rest(3)
        left = used(engine)
        neighbour.take(engine, POOL - 4 * MIB)
        neighbour.give()
        assert wake(engine)
        serves(engine)
        engine.run(JOBS[8:])
        return engine.tokens(), left, len(engine.aborted)

    tokens, left, aborted = on_vmem(run)
    own = plain(page_size=16)
    names = [name for name, *_ in JOBS[8 if why == "gone" else 0 :]]
    assert not left and aborted == (8 if why == "gone" else 0)
    assert {name: tokens[name] for name in names} == {name: own[name] for name in names}


@pytest.mark.parametrize("seed", range(2))
def test_orders_in_any_order_leave_the_tokens_as_they_are(seed):
    """Sleep, SGLang's own orders, aborts, limits and a neighbour that takes what it gets, at any step."""

    def run():
        from pyvmem.engine import control

        engine, neighbour, rng = Engine(model("gqa"), page_size=16), Neighbour(), random.Random(seed)
        told, page, has = answers(engine), engine.memory.page, False
        tags = (None, ["weights"], ["kv_cache"], ["kv_cache", "weights"], ["vmem"], ["cuda_graph"])
        page[control.PATIENCE] = 20

        def each(engine):
            nonlocal has
            for _ in range(rng.choice((0,) * 12 + (1, 2, 3))):
                kind = rng.randrange(9)
                page[control.RUNNING] = engine.unfinished * rng.randrange(2)
                if kind < 2:
                    order = rng.choice(("ReleaseMemoryOccupation", "ResumeMemoryOccupation"))
                    engine.order(order, tags=rng.choice(tags))
                elif kind == 2:
                    engine.order("ReleaseMemoryOccupation", tags=["vmem"])
                elif kind == 3:
                    engine.order("PauseGeneration", mode=rng.choice(("in_place", "retract")))
                elif kind == 4:
                    engine.order("ContinueGeneration", torch_empty_cache=False)
                elif kind == 5:
                    engine.scheduler.flush_cache()
                elif kind == 6:
                    page[control.LIMIT] = rng.choice((0, 1, 3 * MIB, 12 * MIB, control.NO_LIMIT))
                    page[control.STARVED] = rng.randrange(2)
                elif has:
                    neighbour.give()
                    has = False
                elif engine.memory.asleep:
                    has = neighbour.try_to_take(POOL - engine.held() - rng.choice((2, 6, 20)) * MIB)
            if rng.random() < 0.2:  # as in a server, which wakes it sooner or later
                if has:
                    neighbour.give()
                    has = False
                engine.order("ContinueGeneration", torch_empty_cache=False)
                wake(engine)
            if engine.unfinished and rng.random() < 0.01:
                name = rng.choice([r.rid for r in engine.requests if not r.finished() and r.rid not in engine.aborted])
                engine.abort(name)

        engine.run(JOBS[:20], each=each)
        return engine.tokens(), engine.aborted, told

    tokens, aborted, told = on_vmem(run)
    own = plain(page_size=16)
    assert {n: t for n, t in tokens.items() if n not in aborted} == {n: own[n] for n in tokens if n not in aborted}
    assert len(aborted) < 10 and any(told) and not all(told)


def test_weights_that_change_in_place_sleep_as_they_are():
    def run():
        import torch

        engine, neighbour = Engine(model("gqa"), page_size=16), Neighbour()
        engine.run(JOBS[:5])
        with torch.no_grad():
            for p in engine.scheduler.tp_worker.model_runner.model.parameters():
                p.mul_(1.05)
        engine.scheduler.flush_cache()
        engine.run([(f"a{name}", *job) for name, *job in JOBS])
        sleep(engine)
        neighbour.take(engine, POOL - 4 * MIB)
        neighbour.give()
        assert wake(engine)
        engine.scheduler.flush_cache()
        engine.run([(f"b{name}", *job) for name, *job in JOBS])
        return engine.tokens()

    tokens = on_vmem(run)
    before = [tokens[f"a{name}"] for name, *_ in JOBS]
    assert before == [tokens[f"b{name}"] for name, *_ in JOBS]
    assert before != list(plain(page_size=16).values())


def louder(tmp_path):
    """The folder of a model with other weights, and these."""
    import shutil

    from safetensors.torch import load_file, save_file

    path = tmp_path / "louder"
    shutil.copytree(model("gqa"), path)
    weights = {name: 1.3 * w for name, w in load_file(path / "model.safetensors").items()}
    save_file(weights, path / "model.safetensors", metadata=dict(format="pt"))
    return str(path), weights


@pytest.mark.parametrize("way", ["disk", "tensors"])
def test_new_weights_reach_a_model_whose_old_ones_are_gone(way, tmp_path):
    """The order wakes it, or fails and harms nothing if there is no memory."""
    path, weights = louder(tmp_path)

    def own():
        engine = Engine(path, page_size=16)
        engine.run(JOBS)
        return engine.tokens()

    def update(engine):
        from sglang.srt.utils import MultiprocessingSerializer

        told, send = [], engine.scheduler.send_control_output
        engine.scheduler.send_control_output = lambda output, order: told.append((output.success, output.message))
        if way == "disk":
            engine.order("UpdateWeightFromDisk", model_path=path, load_format="auto")
        else:
            engine.order("BeginWeightUpdate")
        if way == "tensors" and told[0][0]:
            made = MultiprocessingSerializer.serialize(list(weights.items()))
            engine.order("UpdateWeightsFromTensor", serialized_named_tensors=[made])
            engine.order("EndWeightUpdate")
        engine.scheduler.send_control_output = send
        return told

    def run():
        from pyvmem.engine import control

        engine, neighbour = Engine(model("gqa"), page_size=16), Neighbour()
        engine.run([(f"a{name}", *job) for name, *job in JOBS[:5]])
        engine.memory.page[control.PATIENCE] = 50
        sleep(engine)
        neighbour.take(engine, POOL - 4 * MIB)
        refused = update(engine)
        neighbour.give()
        engine.memory.page[control.PATIENCE] = 0
        told = update(engine)
        assert not engine.memory.asleep
        sleep(engine)
        neighbour.take(engine, POOL - 4 * MIB)
        neighbour.give()
        assert wake(engine)
        engine.scheduler.flush_cache()
        engine.run(JOBS)
        return {name: tokens for name, tokens in engine.tokens().items() if name[0] == "r"}, refused, told

    tokens, refused, told = on_vmem(run)
    assert len(refused) == 1 and not refused[0][0] and "of its pool to wake" in refused[0][1]
    assert all(done for done, _ in told) and len(told) == (1 if way == "disk" else 3), told
    assert tokens == forked(own, vmem=False) != plain(page_size=16)


def test_weights_that_do_not_come_back_are_seen():
    """A seeded fault: a model wakes without the copies of what a neighbour took."""

    def run():
        engine, neighbour = Engine(model("gqa"), page_size=16), Neighbour()
        engine.run(JOBS[:5])
        sleep(engine)
        neighbour.take(engine, POOL - 4 * MIB)
        neighbour.give()
        engine.memory.sleep._sleeper.weights._sums.clear()
        assert wake(engine)
        engine.run(JOBS[5:])
        return engine.tokens()

    try:
        tokens = on_vmem(run)
    except ChildProcessError:
        return
    assert tokens != plain(page_size=16)


@pytest.mark.parametrize("short", [0, 1])
def test_ranks_of_tensor_parallelism_wake_together_or_not_at_all(short):
    """One rank lacks memory: the other one gives its own up again, and both sleep on."""

    def run():
        from pyvmem.errors import OutOfMemory

        engine, told = Engine(model("gqa"), page_size=16), []
        neighbour = None if engine.rank else Neighbour()
        sleeper = engine.memory.sleep._sleeper
        wakes = sleeper.wake
        serves(engine)

        def lacks(*args):
            raise OutOfMemory(12, "no memory")

        def each(engine):
            if engine.steps % 40 != 5:
                return
            sleep(engine)
            rows, taken = used(engine), False
            size = POOL - 2 * engine.held() - 12 * MIB  # 8 MiB of weights for each rank
            for _ in range(100):  # both ranks make as many steps
                taken = taken or (neighbour is not None and neighbour.try_to_take(size))
                engine.step()
            if neighbour is not None:
                assert taken
                neighbour.give()
            engine.step()
            if engine.rank == short:
                sleeper.wake = lacks
            told.append((wake(engine), sleeper.weights.parked, used(engine) == rows))
            sleeper.wake = wakes
            engine.step()
            assert wake(engine) and sleeper.weights.held == sleeper.weights.bytes

        engine.run(JOBS, each=each)
        return engine.tokens(), told

    def own():
        engine = Engine(model("gqa"), page_size=16)
        engine.run(JOBS)
        return engine.tokens()

    bind = dict(SGLANG_CPU_OMP_THREADS_BIND="0|0")  # without it, SGLang wants a NUMA node for each rank
    first, second = on_vmem(run, ranks=2, **bind)
    assert first == second and first[0] == forked(own, vmem=False, ranks=2, **bind)[0]
    assert len(first[1]) > 2 and set(first[1]) == {(False, True, True)}


def test_the_memory_saver_has_cuda_graphs_and_vmem_the_weights():
    """RL frameworks set --enable-memory-saver. A stub of the saver, which needs a GPU, notes what it is told."""

    def run():
        import contextlib
        import types

        from sglang.srt.utils import torch_memory_saver_adapter as adapter

        told = []

        def note(name):
            return lambda tag=None, **more: told.append((name, tag)) or contextlib.nullcontext()

        adapter.import_error = None
        calls = {name: note(name) for name in ("region", "pause", "resume", "cuda_graph")}
        adapter._memory_saver = types.SimpleNamespace(**calls, enabled=True)
        engine, neighbour = Engine(model("gqa"), page_size=16, enable_memory_saver=True), Neighbour()
        started, weights = list(told), engine.memory.sleep._sleeper.weights
        engine.run(JOBS[:10])
        held = []
        for first in (["weights"], ["weights", "kv_cache"], None):
            engine.order("ReleaseMemoryOccupation", tags=first)
            neighbour.take(engine, POOL - 4 * MIB)
            held.append(weights.held)
            neighbour.give()
            for tags in (["weights"], ["kv_cache"], ["cuda_graph"]):
                if set(tags) <= set(first or ["weights", "kv_cache", "cuda_graph"]):
                    engine.order("ResumeMemoryOccupation", tags=tags)
        engine.run(JOBS[10:])
        return engine.tokens(), started, told[len(started) :], held, weights.bytes

    tokens, started, told, held, whole = on_vmem(run)
    assert tokens == plain(page_size=16) and max(held) < whole
    assert "weights" not in [tag for _, tag in started + told]
    assert told.count(("pause", "cuda_graph")) == told.count(("resume", "cuda_graph")) == 1


@pytest.mark.parametrize("names", ["tokenizer_worker_num", "dp_size", "attn_dp_size"])
def test_arguments_with_which_no_model_can_sleep_are_refused(names, monkeypatch):
    import types

    from pyvmem.engine.settings import Refused
    from pyvmem.sglang import settings

    asked = types.SimpleNamespace(**{names: 2})
    for name in ("", "_POOL"):
        monkeypatch.setenv(f"VMEM_SGLANG{name}", "1")
    settings.check_arguments(asked)
    monkeypatch.setenv("VMEM_SGLANG_WEIGHTS", "1")
    with pytest.raises(Refused, match=f"VMEM_SGLANG_WEIGHTS=1 has the weights.*--{names.replace('_', '-')}"):
        settings.check_arguments(asked)
