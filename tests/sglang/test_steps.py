"""SGLang's scheduler on vMem, step by step: SGLang's own tokens while limits move, and every row read back.

SGLang's leak check runs after each step. Each test runs in forks of one process that has imported SGLang.
"""

import os
import random
import signal
import time

import pytest
import steps
from ends import fork_ends_with_parent
from models import adapter, model
from neighbour import Neighbour
from steps import MIB, Engine, forked, moving, workload

from pyvmem import Context

JOBS = [(f"r{i}", prompt, n) for i, (prompt, n) in enumerate(workload(40))]


@pytest.fixture(scope="module", autouse=True)
def imported():
    steps.imports()


def plain(kind, jobs=JOBS, **options):
    return steps.plain(kind, jobs, **options)


CASES = {
    "gqa": ("gqa", {}),
    "gqa in pages of 1": ("gqa", dict(page_size=1)),
    "mha in pages of 16": ("mha", dict(page_size=16)),
    "qwen2": ("qwen2", {}),
    "windows": ("windows", {}),
    "windows in pages of 1": ("windows", dict(page_size=1)),
    "windows in a pool of their own": ("windows", dict(two_pools=True)),
    "windows in a pool of their own, in pages of 1": ("windows", dict(two_pools=True, page_size=1)),
    "gqa without overlap": ("gqa", dict(overlap=False, disable_overlap_schedule=True)),
    "gqa without chunks": ("gqa", dict(chunk=-1)),
    "gqa without a radix cache": ("gqa", dict(disable_radix_cache=True)),
    "gqa with mixed chunks": ("gqa", dict(enable_mixed_chunk=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_limits_that_move_leave_the_tokens_as_they_are(name):
    kind, options = CASES[name]

    def run():
        from pyvmem.engine import control

        engine = Engine(model(kind), **options)
        held = []
        move = moving((3 * MIB, 6 * MIB, 12 * MIB, 25 * MIB))

        def each(engine):
            move(engine)
            held.append(engine.held())

        engine.run(JOBS, each=each)
        engine.memory.page[control.LIMIT] = control.NO_LIMIT
        return engine.tokens(), max(held), sum(k.memory.nbytes for k in engine.memory.budgets)

    tokens, most, whole = forked(run)
    assert tokens == plain(kind, **options)
    assert most < whole


def beams(name, prompt, n):
    """One request of three searches with four beams, and is longer."""
    return (name, prompt, *((n, {}) if int(name[1:]) % 3 else (n + 40, dict(beams=4))))


def of_groups(engine):
    """The answers, those of groups by all their beams."""
    groups = {r.rid: r.beam_group for r in engine.requests if getattr(r, "beam_group", None) is not None}
    found = {name: [list(beam.tokens) for beam in group.final_results] for name, group in groups.items()}
    return {**engine.tokens(), **found}


def test_a_limit_that_falls_ends_no_group_of_beams():
    """SGLang cannot retract a group, and aborts it if memory is lacking."""
    jobs = [beams(*job) for job in JOBS[:18]]

    def own():
        engine = Engine(model("gqa"), page_size=1)
        engine.run(jobs)
        return of_groups(engine)

    def run():
        from pyvmem.engine import control

        engine, had = Engine(model("gqa"), page_size=1), 0

        def each(engine):
            nonlocal had
            groups = [r for r in engine.scheduler.running_batch.reqs if r.beam_group is not None]
            had = max(had, len(groups))
            engine.memory.page[control.LIMIT] = 1 if groups and engine.steps % 40 < 30 else control.NO_LIMIT

        engine.run(jobs, each=each)
        return of_groups(engine), had, engine.retractions()

    tokens, had, retracted = forked(run)
    assert had > 2 and retracted and tokens == forked(own, vmem=False)
    assert all(tokens[name] for name, *_ in jobs)


def test_what_steps_of_two_pools_of_layers_map_themselves_is_added_up():
    def run():
        from pyvmem.engine import control

        engine = Engine(model("windows"), two_pools=True)
        move, before = moving((3 * MIB, 6 * MIB, 12 * MIB, 25 * MIB)), control.Engine.of("", 0, engine.memory.page)
        sizes = []
        for budget in engine.memory.budgets:
            back = budget.memory.back

            def backed(ids, over=False, back=back, size=budget.block_bytes):
                back(ids, over)
                sizes.append(len(ids) * size)

            budget.memory.back = backed
        engine.run(JOBS, each=move)
        engine.memory.publish()
        told, pages = control.Engine.of("", 0, engine.memory.page), [k.page for k in engine.memory.budgets]
        waited = sum(page[control.WAITED] for page in pages)
        return (told.step_maps - before.step_maps) * told.block_bytes, sum(sizes), told.waited, waited / 1e6

    maps, backed, told, waited = forked(run)
    assert maps == backed > 0 and told == waited


def test_an_idle_engine_of_a_pool_looks_around_although_sglang_would_sleep():
    """``--sleep-on-idle`` waits for requests for a second at a time, and so would everybody who waits for memory."""

    def run():
        import threading

        import zmq

        asked, poll = [], zmq.Poller.poll

        def polls(poller, milliseconds=None):
            if threading.current_thread() is not threading.main_thread():
                return poll(poller, milliseconds)
            asked.append(milliseconds)
            return []

        zmq.Poller.poll = polls
        engine = Engine(model("gqa"), page_size=16, sleep_on_idle=True)
        asked.clear()
        engine.step()
        return asked

    asked = forked(run, VMEM_SGLANG_POOL="idle", VMEM_SGLANG_POOL_SIZE=str(64 * MIB))
    assert asked and max(asked) <= 10


@pytest.mark.parametrize("core", ["rust", "python"])
def test_either_core_of_the_radix_cache(core):
    def run():
        engine = Engine(model("gqa"), page_size=16)
        engine.run(JOBS, each=moving((3 * MIB, 12 * MIB)))
        return engine.tokens(), type(engine.scheduler.tree_cache.tree_core).__name__

    tokens, name = forked(run, SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=core)
    assert tokens == plain("gqa", page_size=16) and ("rust" in name.lower()) == (core == "rust")


def test_adapters_of_a_model_give_sglangs_tokens():
    """LoRA: every second request has an adapter, whose rows the radix cache keeps apart."""

    def run(limits):
        with steps.Unpinned():
            engine = Engine(model("gqa"), enable_lora=True, lora_paths=[f"one={adapter('gqa')}"],
                            max_loras_per_batch=2, lora_backend="torch_native", max_lora_rank=8)  # fmt: skip
            (one,) = engine.adapters()
            jobs = [(*job, dict(lora_id=one if i % 2 else None)) for i, job in enumerate(JOBS)]
            engine.run(jobs, each=moving((3 * MIB, 12 * MIB)) if limits else None)
        return engine.tokens()

    tokens = forked(run, True)
    assert tokens == forked(run, False, vmem=False) != plain("gqa")


def test_sessions_go_on_where_they_were():
    """Each turn of a session is a request whose prompt is what was said before and what is new."""

    def run(limits):
        from sglang.srt.managers.io_struct import SessionParams

        engine, move, rng = Engine(model("gqa")), moving((3 * MIB, 12 * MIB)), random.Random(9)
        for i in range(6):
            engine.open_session(f"s{i}")
        for turn in range(4):
            said = [(f"s{i}-{turn}", [rng.randrange(3, 500) for _ in range(rng.randrange(5, 200))], 16,
                     dict(session_params=SessionParams(id=f"s{i}", rid=f"s{i}-{turn - 1}" if turn else None)))
                    for i in range(6)]  # fmt: skip
            engine.run([*said, *[(f"{name} {turn}", *rest) for name, *rest in JOBS[:6]]], each=move if limits else None)
        return engine.tokens(), {r.rid: len(r.origin_input_ids) for r in engine.requests}

    (tokens, lengths), (own, _) = forked(run, True), forked(run, False, vmem=False)
    assert tokens == own
    assert lengths["s0-3"] > lengths["s0-2"] + 16 > lengths["s0-1"] + 32


def test_a_seeded_fault_is_seen():
    """A page that loses its memory while its rows are in use: the rows are not as they were, or the process dies."""

    def run():
        engine = Engine(model("gqa"))

        def each(engine):
            if engine.steps == 40:
                request = engine.scheduler.running_batch.reqs[0]
                index = getattr(request, "req_pool_idx", None)
                index = request.kv.req_pool_idx if index is None else index
                row = int(engine.scheduler.req_to_token_pool.req_to_token[index, 0])
                memory = engine.memory.budgets[0].memory
                memory.blocks.unback([row // 64])
                memory.blocks.flush()

        engine.run(JOBS, each=each)

    with pytest.raises(ChildProcessError, match="has other rows|ended with status"):
        forked(run)


def test_a_page_that_is_lost_is_seen_by_sglangs_own_check():
    def run():
        engine = Engine(model("gqa"))

        def each(engine):
            if engine.steps == 40:
                allocator = engine.scheduler.token_to_kv_pool_allocator
                allocator.free_pages = allocator.free_pages[1:]
                engine.memory.budgets[0].__class__.spare = property(lambda k: 99)
            if engine.steps > 40:
                engine.scheduler.invariant_checker.self_check_during_busy()

        engine.run(JOBS, each=each)

    with pytest.raises(ChildProcessError, match="[Ll]eak"):
        forked(run)


@pytest.mark.parametrize("kind, options", [("gqa", {}), ("windows", dict(two_pools=True))])
def test_a_flush_and_idleness_give_memory_back(kind, options):
    def run():
        engine = Engine(model(kind), **options)
        engine.run(JOBS)
        busy = engine.held()
        engine.rest()
        budgets = engine.memory.budgets
        idle, cached = engine.held(), sum(budget.cached * budget.block_bytes for budget in budgets)
        assert engine.scheduler.flush_cache()
        flushed = engine.held()
        engine.rest(3)
        engine.run([(f"again {name}", prompt, n) for name, prompt, n in JOBS])
        return engine.tokens(), busy, idle, cached, flushed, sum(budget.block_bytes for budget in budgets)

    tokens, busy, idle, cached, flushed, block = forked(run)
    own = plain(kind, **options)
    assert {name: tokens[name] for name in own} == own == {name: tokens[f"again {name}"] for name in own}
    assert 0 < cached < idle < busy and flushed == block  # page 0 alone
    assert idle <= cached + 10 * block


def test_release_memory_occupation_gives_all_memory_back():
    """It has gone when the call returns: whoever releases it uses it next."""

    def run():
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

        from pyvmem.engine import control

        engine = Engine(model("gqa"))
        engine.run(JOBS[:10])
        updater = engine.scheduler.weight_updater
        updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
        held = control.Engine.of("", 0, engine.memory.page).backed
        updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["kv_cache"]))
        engine.run(JOBS[10:])
        return engine.tokens(), held, engine.memory.budgets[0].block_bytes

    tokens, held, block = forked(run)
    assert tokens == plain("gqa") and held == block


def test_a_limit_below_what_runs_retracts_and_the_tokens_stay():
    """Long answers under a limit for two of them: SGLang retracts, and computes the rows again."""
    jobs = [(f"r{i}", prompt, 300) for i, (prompt, _) in enumerate(workload(8, longest=50))]

    def run():
        from pyvmem.engine import control

        engine = Engine(model("gqa"), page_size=16)

        def each(engine):
            if engine.steps == 60:
                engine.memory.page[control.LIMIT] = 1
            if engine.steps == 400:
                engine.memory.page[control.LIMIT] = control.NO_LIMIT

        engine.run(jobs, at_once=8, each=each)
        return engine.tokens(), engine.retractions(), engine.memory.page[control.PREEMPTED]

    tokens, retracted, published = forked(run)
    assert tokens == plain("gqa", jobs, page_size=16)
    assert retracted == published


def test_a_limit_reaches_an_engine_that_has_all_its_memory():
    def run():
        from pyvmem.engine import control

        engine = Engine(model("gqa"), tokens=4096)
        (budget,), whole = engine.memory.budgets, []
        budget.ensure(4096)

        def each(engine):
            whole.append(budget.is_whole())
            if engine.steps == 5:
                engine.memory.page[control.LIMIT] = 40 * budget.block_bytes

        engine.run(JOBS[:10], at_once=4, each=each)
        return engine.tokens(), whole, budget.num_backed, budget.total

    tokens, whole, backed, total = forked(run)
    assert tokens == plain("gqa", JOBS[:10], tokens=4096)
    assert all(whole[:5]) and not any(whole[6:]) and backed <= 40 < total


def test_a_prompt_in_chunks_goes_on_under_a_limit_that_falls():
    """SGLang does not look again at a prompt that it began in chunks: it would end with 'Prefill out of memory'."""
    rng = random.Random(5)
    jobs = [(f"r{i}", [rng.randrange(3, 500) for _ in range(1200)], 20) for i in range(6)]

    def run():
        from pyvmem.engine import control

        engine = Engine(model("gqa"), chunk=256, tokens=8192)

        def each(engine):
            chunked = engine.scheduler.chunked_req is not None
            engine.memory.page[control.LIMIT] = 1 if chunked else control.NO_LIMIT

        engine.run(jobs, at_once=4, each=each)
        return engine.tokens()

    assert forked(run) == plain("gqa", jobs, chunk=256, tokens=8192)


def test_answers_that_need_more_than_is_backed_begin():
    """SGLang reserves the tokens of an answer when a request begins: they need not be backed then."""
    jobs = [("r0", list(range(3, 40)), 1500)]

    def run():
        engine = Engine(model("gqa"), tokens=4096)
        most = []
        engine.run(jobs, each=lambda e: most.append(e.memory.budgets[0].num_backed * 64))
        return engine.tokens(), most[3]

    tokens, early = forked(run)
    assert len(tokens["r0"]) == 1500 and early < 1500


def test_memory_of_the_next_prompts_comes_while_a_step_runs():
    """From nothing, a step backs what it takes itself, and orders what the step after it takes."""
    jobs = [(f"r{i}", list(range(3 + i, 483 + i)), 2) for i in range(16)]

    def run():
        from pyvmem.engine import control

        engine = Engine(model("gqa"))
        engine.run(jobs)
        return engine.tokens(), engine.memory.page[control.STEP_MAPS], engine.memory.budgets[0].num_backed

    tokens, by_steps, pages = forked(run)
    assert tokens == plain("gqa", jobs)
    assert pages >= 16 * 480 // 64 and by_steps <= pages // 4


def burst(n, seed):
    """Requests of 480 tokens that begin differently."""
    rng = random.Random(seed)
    return [(f"b{seed}-{i}", [rng.randrange(3, 500) for _ in range(480)], 8) for i in range(n)]


def test_a_burst_that_must_evict_anyway_maps_nothing_in_steps_and_waits_for_nothing():
    """Memory comes, but less than the requests take. Until it is there, cached pages serve, as in SGLang."""
    had, comes = 300, 100

    def serve(engine):
        """The tokens that each step computes for a burst."""
        steps = []
        run = engine.scheduler.run_batch

        def ran(batch):
            steps.append(batch.extend_num_tokens if batch.forward_mode.is_extend() else batch.batch_size())
            return run(batch)

        engine.scheduler.run_batch = ran
        for request in burst(12, 2):
            engine.submit(*request)
        engine.run([])
        return steps

    def own():
        engine = Engine(model("gqa"), page_size=16, tokens=16 * (had + comes))
        engine.run(burst(12, 1))
        return serve(engine), engine.tokens()

    def run():
        from pyvmem.engine import control

        engine = Engine(model("gqa"), page_size=16)
        (budget,), page, waits = engine.memory.budgets, engine.memory.page, []
        page[control.LIMIT] = had * budget.block_bytes
        engine.run(burst(12, 1))
        assert budget.num_backed == had
        await_orders, mapped = budget._await_orders, page[control.STEP_MAPS]
        budget._await_orders = lambda: waits.append(1) or await_orders()
        page[control.LIMIT] = (had + comes) * budget.block_bytes
        steps = serve(engine)
        return (steps, engine.tokens()), page[control.STEP_MAPS] - mapped, len(waits), budget.num_backed - had

    want, (got, mapped, waits, came) = forked(own, vmem=False), forked(run)
    assert got == want and mapped == waits == 0 < came <= comes


def test_a_burst_asks_the_pool_at_once_for_all_that_its_requests_lack():
    def run():
        from pyvmem.engine import control

        engine, asked = Engine(model("gqa"), page_size=16), []
        neighbour = Neighbour()
        neighbour.take(engine, 24 * MIB)
        (budget,), page = engine.memory.budgets, engine.memory.page
        ask = budget.memory.blocks.ask
        budget.memory.blocks.ask = lambda size: asked.append(size) or ask(size)
        for request in burst(30, 3):
            engine.submit(*request)
        engine.memory._tended = 0.0  # so that it looks at the pool in this step
        engine.step()
        there = budget.num_backed + budget.coming
        return page[control.WANTED], there, [size // budget.block_bytes for size in asked]

    wanted, there, asked = forked(run, VMEM_SGLANG_POOL="ask", VMEM_SGLANG_POOL_SIZE=str(160 * MIB))
    assert asked[-1] == wanted >= 30 * 480 // 16 - there > 0


@pytest.mark.parametrize("found", [True, False], ids=["in the cache", "of the first of them"])
def test_a_burst_of_prompts_that_begin_alike_evicts_nothing(found):
    """They take few pages beside those that they share, for which there is memory."""
    had, comes = 130, 110

    def run():
        from pyvmem.engine import control

        engine = Engine(model("gqa"), page_size=16)
        (budget,), page, tree = engine.memory.budgets, engine.memory.page, engine.scheduler.tree_cache
        page[control.LIMIT] = had * budget.block_bytes
        (alike, shared, n), *others = burst(4, 1)
        engine.run([*others, ("more", [7] * 640, 2)])  # until few pages are spare
        if found:
            engine.run([(alike, shared, n)])
        page[control.LIMIT] = (had + comes) * budget.block_bytes
        evicted, evict, before = [], tree._evict, budget.num_backed
        tree._evict = lambda *args, **more: evicted.append(args) or evict(*args, **more)
        for i in range(20):
            engine.submit(f"s{i}", shared + [3 + i] * 40, 2)
        engine.run([])
        return len(evicted), before, budget.num_backed - before

    evicted, before, came = forked(run)
    assert before == had
    assert evicted == 0 < came <= comes


def test_lending_waits_for_what_runs_and_then_gives_all():
    def run():
        from pyvmem.engine import control

        engine = Engine(model("gqa"))
        seen = {}

        def each(engine):
            page = engine.memory.page
            if engine.steps == 30:
                control.change(page, lend=True)
            if page[control.LENT] and "held" not in seen:
                seen["held"], seen["waits"] = engine.held(), len(engine.scheduler.waiting_queue)
            if "held" in seen and engine.steps % 50 == 0:
                control.change(page, lend=False)

        engine.run(JOBS, each=each)
        return engine.tokens(), seen, engine.memory.budgets[0].block_bytes

    tokens, seen, block = forked(run)
    assert tokens == plain("gqa")
    assert seen["held"] == block and seen["waits"]


def test_random_load_with_limits_flushes_aborts_and_retractions():
    """As many steps as VMEM_STEPS says (default 1,500), each with all rows read back and SGLang's leak check."""
    many = int(os.environ.get("VMEM_STEPS", 1500))

    def run():
        engine = Engine(model("gqa"), page_size=16, tokens=6144)
        flushed = steps.random_load(engine, many, moving((MIB, 2 * MIB, 5 * MIB, 9 * MIB), every=13))
        wanted = {r.rid: (list(r.origin_input_ids), r.sampling_params.max_new_tokens) for r in engine.requests}
        counts = engine.steps, engine.compared
        return engine.tokens(), wanted, engine.aborted, flushed, engine.retractions(), counts

    tokens, wanted, aborted, flushed, retracted, (count, compared) = forked(run)
    jobs = [(name, *wanted[name]) for name in wanted if name not in aborted]
    own = plain("gqa", jobs, page_size=16)
    ties = {n: steps.tie(model("gqa"), wanted[n][0], own[n], tokens[n]) for n in own if tokens[n] != own[n]}
    print(f"{count} steps, {len(wanted)} requests, {len(aborted)} aborted, {flushed} flushes, {retracted} retractions, "
          f"{compared} rows read back, ties {ties}")  # fmt: skip
    assert all(len(tokens[n]) == len(own[n]) for n in own)
    assert max(ties.values(), default=0) < 1e-4 and len(ties) <= len(own) / 200
    assert aborted and flushed


def test_whatever_others_in_the_pool_do_requests_end_on_rows_that_are_right():
    """A neighbour takes and gives memory, orders are answered late or refused, and limits and minimums move."""

    def run():
        from pyvmem.engine import control

        engine, draw, neighbour, since = Engine(model("gqa"), page_size=16), random.Random(1), Neighbour(), {}
        engine.scheduler.max_running_requests = 8
        (budget,), page = engine.memory.budgets, engine.memory.page
        told, awaits = budget.memory.answer, budget._await_orders
        late = [3]  # steps

        def answer(order):
            step, refused = since.setdefault(order, (engine.steps, draw.random() < 0.1))
            got = told(order)
            return 2 if engine.steps < step + late[0] else (refused if got == 0 else got)

        def await_orders():
            late[0] = 0
            awaits()
            late[0] = 3

        budget.memory.answer, budget._await_orders = answer, await_orders

        def move(engine):
            if draw.random() < 0.05:
                page[control.LIMIT] = draw.choice((control.NO_LIMIT, 4 * MIB, 9 * MIB))
            if draw.random() < 0.05:
                page[control.MIN] = draw.choice((0, 2 * MIB, 6 * MIB))
            if draw.random() < 0.1:
                neighbour.give()
                neighbour.try_to_take(draw.choice((0, 2, 6, 14)) * MIB)

        steps.random_load(engine, 300, move)
        neighbour.give()
        page[control.LIMIT], page[control.MIN] = control.NO_LIMIT, 0
        engine.rest(20)
        left = budget.used, budget.coming, page[control.WANTED], page[control.HEAD]
        return left, page[control.REFUSED], engine.compared

    left, refused, compared = forked(run, VMEM_SGLANG_POOL="world", VMEM_SGLANG_POOL_SIZE=str(24 * MIB))
    assert left == (0, 0, 0, 0) and refused > 0 and compared > 100_000


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(enable_lmcache=True), "LMCache copies rows"),
        (dict(disaggregation_mode="prefill"), "disaggregated prefill registers KV memory"),
        (dict(enable_streaming_session=True), "streaming sessions hold rows"),
        (dict(pp_size=2), "the stages of a pipeline schedule .*; set --pp-size to 1"),
        (dict(speculative_algorithm="NGRAM", page_size=1), "drafts take more rows.*; unset --speculative-algorithm"),
    ],
)
def test_what_cannot_work_is_refused_with_one_line(options, says):
    def run():
        Engine(model("gqa"), **options)

    with pytest.raises(ChildProcessError, match=f"SystemExit: pyvmem: VMEM_SGLANG=1: .*{says}.*unset VMEM_SGLANG.\n"):
        forked(run)


def test_a_wrong_setting_is_refused_with_one_line():
    with pytest.raises(ChildProcessError, match="SystemExit: pyvmem: VMEM_SGLANG_LIMIT=much must be a size in bytes"):
        forked(lambda: Engine(model("gqa")), VMEM_SGLANG_LIMIT="much")


def test_a_setting_of_sleep_without_sleep_is_refused():
    from pyvmem.sglang import settings

    for name in ("IDLE", "QUEUE", "SLICE"):
        given = {"VMEM_SGLANG": "1", f"VMEM_SGLANG_{name}": "5"}
        with pytest.raises(ValueError, match=f"^VMEM_SGLANG_{name} has no effect without VMEM_SGLANG_WEIGHTS=1"):
            settings.read(given)
        settings.read({**given, "VMEM_SGLANG": "0"})
        settings.read({**given, "VMEM_SGLANG_POOL": "a", "VMEM_SGLANG_WEIGHTS": "1"})


def test_a_hook_that_does_not_take_is_refused():
    def run():
        from pyvmem.sglang import hooks, plugin

        real, gone = plugin._hooks, ("sglang.srt.managers.scheduler.Scheduler.gone", "BEFORE", hooks.before_step)
        plugin._hooks = lambda http: [*real(http), gone]
        Engine(model("gqa"))

    with pytest.raises(ChildProcessError, match="SGLang did not apply the hook of .*Scheduler.gone"):
        forked(run)


def test_an_engine_that_is_killed_leaves_its_memory_to_the_other():
    """Two engines of SGLang's in a pool with room for little more than one: SIGKILL ends the one that has it."""

    def run():
        told, tell = os.pipe()
        other = os.fork()
        if other == 0:
            fork_ends_with_parent()
            try:
                engine = Engine(model("gqa"), tokens=4096)
                engine.run(JOBS[:20])
                os.write(tell, engine.held().to_bytes(8, "little"))
                while True:  # its cache stays
                    engine.step()
            finally:
                os._exit(1)
        os.close(tell)
        held = int.from_bytes(os.read(told, 8), "little")
        engine = Engine(model("gqa"), tokens=4096)
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        most = []
        engine.run(JOBS, each=lambda engine: most.append(engine.held()))
        return engine.tokens(), held, max(most)

    tokens, held, most = forked(run, VMEM_SGLANG_POOL="one", VMEM_SGLANG_POOL_SIZE="24M")
    assert tokens == plain("gqa", tokens=4096)
    assert held > 12 * MIB < most


def test_a_long_answer_begins_although_a_model_that_sleeps_has_what_is_free():
    """SGLang begins a request only if its answer fits, too, so a prompt that fits is not enough to ask for."""

    def run():
        import torch

        from pyvmem.sglang import open_pool
        from pyvmem.sleep.weights import Weights

        engine = Engine(model("gqa"), tokens=4096)
        with Context("host") as context, open_pool(context) as pool:
            engine.run(JOBS[:1])
            engine.rest()  # it gives back what it does not need
            size = pool.free // (2 * MIB) * 2 * MIB
            module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size, dtype=torch.uint8), False)])
            weights = Weights(pool, context)
            weights.adopt([module])
            weights.copy_behind()
            weights.park()
            while weights.gives < size:  # until they have been copied
                time.sleep(0.01)
            engine.run([("long", [7] * 40, 1800)])
            held = weights.held
            weights.close()
        return len(engine.tokens()["long"]), held < size

    assert forked(run, VMEM_SGLANG_POOL="one", VMEM_SGLANG_POOL_SIZE="32M") == (1800, True)


def test_an_engine_and_another_member_lend_each_other_memory():
    """A pool with room for one: the cache of the idle engine goes to a neighbour that asks, and comes back."""

    def run():
        from pyvmem import KVCache
        from pyvmem.sglang import open_pool

        engine = Engine(model("gqa"), tokens=4096)
        engine.run(JOBS[:20])
        before = engine.held()
        with Context("host") as context, open_pool(context) as pool:
            tokens = (pool.budget - before // 2) // 1024
            with KVCache.for_model(2, 2, 64, 1, tokens, pool.budget, pool=pool, context=context, name=None) as cache:
                cache.alloc(tokens)
                end = time.monotonic() + 60
                while not cache.step([tokens]):
                    engine.step()
                    assert time.monotonic() < end, cache.shortage
                lent = engine.held()
                assert sum(member.has for member in pool.members()) <= pool.budget
            engine.run(JOBS[20:])
        return engine.tokens(), before, lent

    tokens, before, lent = forked(run, VMEM_SGLANG_POOL="one", VMEM_SGLANG_POOL_SIZE="32M")
    assert tokens == plain("gqa", tokens=4096) and lent < before
