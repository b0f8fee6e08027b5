"""examples/replay.py: traces of each format run over a KVCache; every row is right, and found prefixes are the ideal's.

SPDX-License-Identifier: MIT
"""

import inspect
import json
import random

import pytest

from benchmarks.traces import read_trace, synthetic_trace
from test_examples import example

torch = pytest.importorskip("torch")

SETTING = {"row_bytes": 1024, "block": None, "check_every": 16, "backend": "host", "name": None}  # 64 tokens a page


@pytest.fixture(scope="module")
def module():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # rows are few: more threads wait for one another
    yield example("replay")
    torch.set_num_threads(threads)


def azure(path, trace):
    rows = [f"x,{p},{o}" for p, o in zip(trace.prompt, trace.output)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return read_trace(path)


def conversation(folder):
    return azure(folder / "conversation.csv", synthetic_trace(90, mean_prompt=300, mean_output=60, longest=1500))


def code(folder):
    return azure(folder / "code.csv", synthetic_trace(90, mean_prompt=700, mean_output=8, longest=1500, seed=1))


def shared_prompts(folder):
    """Dialogues as Mooncake's trace has them: a turn begins with the blocks of the one before."""
    draw, rows, unused, dialogues = random.Random(2), [], 1, [[] for _ in range(12)]
    for _ in range(90):
        dialogue = draw.choice(dialogues)
        length = 512 * len(dialogue) + draw.randrange(100, 900)
        more = -(-length // 512) - len(dialogue)
        ids = dialogue + list(range(unused, unused + more))
        unused += more
        dialogue[:] = ids[: length // 512] if length < 2300 else []
        row = {"timestamp": 0, "input_length": length, "output_length": draw.randrange(1, 90), "hash_ids": ids}
        rows.append(json.dumps(row))
    (folder / "mooncake.jsonl").write_text("\n".join(rows))
    return read_trace(folder / "mooncake.jsonl")


def agree(real, ideal, memory, requests):
    assert int(memory.wrong) == 0 and memory.rows_read > memory.rows_written
    assert real.ended == ideal.ended == requests
    found, best = real.hits + real.hits_again, ideal.hits + ideal.hits_again
    assert abs(found - best) <= 0.001 * best, f"{found} tokens were found, {best} could be"
    stats = memory.kv.stats()
    assert stats.active_slots == stats.swapped_slots == stats.worker_errors == 0
    memory.kv.close()


@pytest.mark.parametrize("trace", [conversation, code, shared_prompts])
@pytest.mark.parametrize("budget", [8 << 20, 64 << 20], ids=["scarce", "plentiful"])
def test_rows_are_right_and_the_hits_are_the_ideals(module, tmp_path, trace, budget):
    trace = trace(tmp_path)
    real, ideal, memory, _ = module.replay(trace, 24, 512, budget=budget, check=True, **SETTING)
    agree(real, ideal, memory, len(trace))
    assert (real.preemptions > 0) == (budget == 8 << 20), "the budget makes no difference"
    assert (real.hits > 0) == (trace.hash_ids is not None)
    # Decisions are the same too, request by request.
    assert (real.iterations, real.preemptions) == (ideal.iterations, ideal.preemptions)


def test_kernels_that_lag_behind(module, tmp_path, monkeypatch):
    """With fences: what an iteration may touch stays until its event has come, and nothing else is lost by it."""
    late, calls = [], []

    class Event:
        def record(self):
            late.append(self)
            calls.append("event")

        def synchronize(self):
            while self in late:
                late.pop(0)

    def noted(owner, name):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: (calls.append(name), call(*args, **options))[1])

    noted(module.Memory, "read")
    noted(module.KVCache, "free")
    trace = shared_prompts(tmp_path)
    real, ideal, memory, _ = module.replay(trace, 24, 512, budget=8 << 20, check=True, event=Event, **SETTING)
    assert not late and real.preemptions > 0
    agree(real, ideal, memory, len(trace))
    assert (real.iterations, real.preemptions) == (ideal.iterations, ideal.preemptions)
    # The fence of a request that ends is an event behind the last kernel that reads its rows.
    last = [next(c for c in reversed(calls[:i]) if c != "free") for i, c in enumerate(calls) if c == "free"]
    assert last and set(last) == {"event"}


def test_a_limit_of_time_shortens_the_trace(module, tmp_path, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))  # a second for each iteration
    trace = shared_prompts(tmp_path)
    real, ideal, memory, _ = module.replay(trace, 8, 512, budget=8 << 20, limit=60, **SETTING)
    assert 8 < real.ended < len(trace) and real.preemptions > 0
    agree(real, ideal, memory, real.ended)
    assert (real.iterations, real.preemptions) == (ideal.iterations, ideal.preemptions)


def test_the_ideal_is_a_plain_lru(module, tmp_path):
    """One request at a time, of prompts alone: a list of blocks, the least recently used first, does the same."""
    trace = shared_prompts(tmp_path)
    pages, block, hits, recent = 120, 64, 0, []
    requests = module.requests_of(trace, block)
    ideal = module.Scheduler(module.Ideal(pages, block, block), requests, 1, 10_000)
    list(ideal.run())
    for request in module.requests_of(trace, block):
        whole, found = request.keys[: request.end // block], 0
        while found < (request.known - 1) // block and whole[found] in recent:
            found += 1
        hits += found * block
        used = [key for key in whole if key in whole[:found] or key not in recent]
        recent = [key for key in recent if key not in whole[:found]]
        recent = recent[max(len(recent) + -(-request.end // block) - pages, 0) :]
        recent += [key for key in reversed(used) if key not in recent]
    assert ideal.hits == hits > 0


def test_a_wrong_row_is_seen(module, tmp_path):
    trace = shared_prompts(tmp_path)
    memory = module.Memory(8, int((trace.prompt + trace.output).max()), 64 << 20, **SETTING)
    scheduler = module.Scheduler(memory, module.requests_of(trace, memory.block), 8, 512)
    run = scheduler.run()
    for _ in range(20):
        next(run)
    assert int(memory.wrong) == 0
    memory.kv.tensors[1][memory.slot[scheduler.running[0]], 7, -1] += 1
    list(run)
    assert int(memory.wrong) > 0
    memory.kv.close()


def test_the_command_says_what_it_found(module, tmp_path, capsys, monkeypatch):
    shared_prompts(tmp_path)
    words = ["--budget", "8M", "--row-bytes", "1024", "--batch", "24", "--tokens", "512", "--requests", "60"]
    monkeypatch.setattr("sys.argv", ["replay.py", "--trace", str(tmp_path / "mooncake.jsonl"), *words])
    module.main()
    text = capsys.readouterr().out
    assert "60 requests" in text and " 0 wrong" in text and "ideal of this capacity" in text
    monkeypatch.setattr("sys.argv", ["replay.py", "--budget", "256K", "--requests", "20"])
    with pytest.raises(SystemExit, match="request [0-9]+ alone needs more than the budget"):
        module.main()


def test_the_scheduler_has_fifty_lines(module):
    lines = inspect.getsource(module.Scheduler).splitlines()
    assert len([line for line in lines if line.strip() and not line.strip().startswith('"""')]) <= 50
