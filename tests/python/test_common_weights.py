"""Weights that several engines read in common: what they take, what outlives whom, and what is refused.

SPDX-License-Identifier: MIT
"""

import os
import random
import signal

import common_engines as engines
import pytest
import torch
from common_engines import Model, Process, expected

from conftest import until

SIZE = 8 << 20  # of the model's one part


@pytest.fixture
def path(tmp_path):
    """A pool that its engines leave behind as they found it."""
    from pyvmem.kv.pool import KVPool

    torch.set_num_threads(1)  # a child that is forked beside OpenMP's threads would wait for them
    path = str(tmp_path / "gpu.pool")
    with KVPool(engines.POOL, path=path):
        yield path
        for process in Process.all:
            process.kill()
        Process.all.clear()
        for told in engines.state(path)[:1]:
            assert told["awake"] == told["engines"] == 0
            os.kill(engines.owner(path), signal.SIGKILL)


def test_the_second_engine_takes_what_the_first_has_loaded(path):
    a, b = Process(path), Process(path)
    assert a("start", "k", 1) == "loaded"
    assert b("start", "k", 99) == "took"
    assert a("tokens") == b("tokens") == expected(1)
    told = b("look")
    assert told["common"] and told["alone"] == 0 and told["bytes"] == SIZE
    assert told["held"] == a("look")["held"] == SIZE // 2  # each counts its share
    assert sum(held for name, _, held in until(lambda: [m for m in b("members") if m[2]])) == SIZE  # once


def test_weights_outlive_their_engine(path):
    a = Process(path)
    assert a("start", "k", 1) == "loaded"
    a.kill()
    until(lambda: not engines.state(path)[0]["engines"])
    b = Process(path)
    assert b("start", "k", 99) == "took"
    assert b("tokens") == expected(1)


def test_another_key_has_other_weights(path):
    a, b = Process(path), Process(path)
    assert a("start", "k", 1) == b("start", "other", 2) == "loaded"
    assert a("tokens") == expected(1) and b("tokens") == expected(2)
    assert len(engines.state(path)) == 2


@pytest.mark.parametrize("shape, part", [(dict(width=256), "shapes"), (dict(layers=2), "shapes"),
                                         (dict(scale=2.0), "configuration")])  # fmt: skip
def test_a_model_that_differs_is_loaded(path, shape, part):
    a, b = Process(path), Process(path)
    assert a("start", "k", 1) == "loaded"
    assert part in b("start", "k", 2, **shape)
    assert b("tokens") == expected(2, **shape) and a("tokens") == expected(1)
    assert not b("look")["common"]
    b("sleep")
    b("wake")
    assert b("tokens") == expected(2, **shape)


class Derived(Model):
    """Keeps a tensor that it computes from its weights, which is no parameter."""

    def loaded(self):
        self.half = self.gain.detach() / 2

    def tokens(self):
        return super().tokens() + int(self.half.sum() * 1e6)


class Scaled(Model):
    """Computes a number from its weights."""

    def loaded(self):
        self.scale = float(self.gain.detach().abs().max())

    def tokens(self):
        return super().tokens() + int(self.scale * 1e6)


class Aliased(Model):
    """Holds its weights under another name, which nobody tells torch."""

    def __init__(self, **shape):
        super().__init__(**shape)
        self.hidden = [self.head.data]

    def tokens(self):
        return super().tokens() + int(self.hidden[0].sum() * 1e6)


for name in (Derived, Scaled, Aliased):
    setattr(engines, name.__name__, name)


@pytest.mark.parametrize("model, part", [(Derived, "no parameters"), (Scaled, "no tensor"), (Aliased, "no parameters")])
def test_what_was_computed_from_weights_before_they_were_there_is_noticed(path, model, part):
    a, b = Process(path), Process(path)
    assert a("start", "k", 1, model.__name__) == "loaded"
    assert part in b("start", "k", 1, model.__name__)
    assert a("tokens") == b("tokens") == expected(1, model)


def test_common_weights_leave_when_all_sleep_and_the_first_to_wake_brings_them_back(path):
    a, b, other = Process(path), Process(path), Process(path)
    a("start", "k", 1)
    b("start", "k", 1)
    a("sleep")
    assert b("tokens") == expected(1) and b("look")["gives"] == SIZE and a("look")["gives"] == a("look")["held"] == 0
    b("sleep")
    assert a("look")["gives"] == b("look")["gives"] == a("look")["held"] == SIZE // 2
    assert a("wake") == 0 and a("tokens") == expected(1)  # nobody wanted them
    a("sleep")
    other("start", "large", 3, layers=56)  # needs all of the pool
    until(lambda: not a("look")["held"])
    assert other("tokens") == expected(3, layers=56)
    a.begin("wake")
    b.begin("wake")
    other("sleep")
    assert sorted([a.answer(), b.answer()]) == [0, SIZE]  # one has copied them
    assert a("tokens") == b("tokens") == expected(1)
    b("sleep")
    a("sleep")
    assert other("wake") > 0 and other("tokens") == expected(3, layers=56)


def test_no_memory_to_wake_changes_nothing(path):
    a, other = Process(path), Process(path)
    a("start", "k", 1)
    a("sleep")
    other("start", "large", 3, layers=56)
    with pytest.raises(RuntimeError, match="OutOfMemory"):
        a("wake", 0.3)
    assert other("tokens") == expected(3, layers=56)
    other("sleep")
    assert a("wake") == SIZE and a("tokens") == expected(1)


def test_a_device_that_has_less_than_the_pool_says_is_asked_again(path):
    a, other = Process(path), Process(path)
    a("short", 3)
    assert a("start", "k", 1) == "loaded" and a("tokens") == expected(1)
    a("sleep")
    other("start", "large", 3, layers=56)
    other("sleep")
    a("short", 1 << 30)
    with pytest.raises(RuntimeError, match="OutOfMemory"):
        a("wake", 0.2)
    assert a("look")["held"] == 0
    a("short", -(1 << 30))
    b = Process(path)
    assert b("start", "k", 99) == "took" and b("tokens") == expected(1)
    assert a("wake") == 0 and a("tokens") == expected(1)


def test_who_writes_has_a_copy_of_its_own_first(path):
    a, b = Process(path), Process(path)
    a("start", "k", 1)
    b("start", "k", 1)
    b("write", 1.0)
    changed = b("tokens")
    assert changed != expected(1) == a("tokens")
    told = b("look")
    assert not told["common"] and told["alone"] > 0
    b("sleep")
    a("sleep")
    b("wake")
    assert b("tokens") == changed
    c = Process(path)
    assert c("start", "k", 99) == "took" and c("tokens") == expected(1)


def test_a_stray_write_ends_its_own_process_alone(path):
    a, b = Process(path), Process(path)
    a("start", "k", 1)
    b("start", "k", 1)
    b.begin("stray")
    assert os.WTERMSIG(b.ended()) == signal.SIGSEGV
    assert a("tokens") == expected(1)
    a.begin("stray")  # who has loaded them may not either
    assert os.WTERMSIG(a.ended()) == signal.SIGSEGV


@pytest.mark.parametrize("asleep", [(), ("a",), ("a", "b")])
def test_the_death_of_the_owner_harms_nobody(path, asleep):
    both = dict(a=Process(path), b=Process(path))
    both["a"]("start", "k", 1)
    both["b"]("start", "k", 1)
    for name in asleep:
        both[name]("sleep")
    first = engines.owner(path)
    os.kill(first, signal.SIGKILL)
    for name, engine in both.items():
        if name in asleep:
            engine("wake")
        assert engine("tokens") == expected(1)
        assert engine("look")["owner"] != first
    told = engines.state(path)
    assert len(told) == 1 and told[0]["engines"] == told[0]["awake"] == 2 and told[0]["held"] == SIZE
    c = Process(path)
    assert c("start", "k", 99) == "took" and c("tokens") == expected(1)


def test_saved_blocks_outlive_their_engine_and_owner_and_have_one_engine_at_a_time(path):
    a, b = Process(path), Process(path)
    a("start", "k", 1)
    a("save", "p", 7)
    b("start", "k", 1)
    first = engines.owner(path)
    os.kill(first, signal.SIGKILL)
    for engine in (a, b):
        until(lambda engine=engine: engine("look")["owner"] != first)
    assert b("saved", "p") is None  # its engine lives
    a.kill()
    assert b("saved", "other") is None
    assert until(lambda: b("saved", "p")) == [7]
    c = Process(path)
    c("start", "k", 1)
    assert c("saved", "p") is None
    b.kill()
    assert until(lambda: c("saved", "p")) == [7]


def test_an_engine_that_dies_while_it_loads_leaves_nothing(path):
    a, b = Process(path), Process(path)
    a.begin("start", "k", 1, layers=30)
    until(lambda: engines.state(path))
    a.kill()
    assert b("start", "k", 2) == "loaded" and b("tokens") == expected(2)
    assert len(engines.state(path)) == 1


def test_weights_that_nobody_has_go_after_a_while(path):
    from pyvmem.sleep.owner import main, socket_of

    pid = os.fork()
    if not pid:
        main([path, "0.5"])
        os._exit(0)
    until(lambda: os.path.exists(socket_of(path)))
    a = Process(path)
    assert a("start", "k", 1) == "loaded"
    a.kill()
    until(lambda: not engines.state(path))
    assert os.waitpid(pid, 0)[1] == 0 and not os.path.exists(socket_of(path))


def test_an_answer_that_comes_too_late_is_not_taken_for_another_one(path):
    from pyvmem.sleep.link import Link

    Process(path)("start", "k", 1)
    link = Link(path, "", 30)
    link._open()
    os.kill(link.owner, signal.SIGSTOP)
    link._sock.settimeout(0.01)
    with pytest.raises(ConnectionError):
        link.ask("state")
    os.kill(link.owner, signal.SIGCONT)
    with pytest.raises(ConnectionError):
        link.ask("leave", key="k")
    assert link.gone


def test_the_socket_is_the_users_alone(path):
    from pyvmem.sleep.owner import socket_of

    Process(path)("start", "k", 1)
    assert os.stat(socket_of(path)).st_mode & 0o777 == 0o600


def test_whoever_speaks_another_language_is_left_alone(path):
    import socket

    from pyvmem.sleep.owner import socket_of

    a = Process(path)
    a("start", "k", 1)
    draw = random.Random(3)
    for n in range(60):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(socket_of(path))
            word = draw.choice(["find", "promise", "offer", "parts", "wake", "take", "done", "leave", "hello", "no",
                                "save", "saved"])  # fmt: skip
            keys = [dict(do=word), dict(do=word, key="k"), dict(do=word, key=7, parts=[9], bytes=-5), [word], 3]
            noise = bytes(draw.randrange(256) for _ in range(n))
            socket.send_fds(sock, [draw.choice([noise, engines.json.dumps(draw.choice(keys)).encode()])], [0] * (n % 3))
    assert a("tokens") == expected(1) and engines.owner(path) == a("look")["owner"]
    a("sleep")
    a("wake")
    assert a("tokens") == expected(1)


def test_engines_and_owners_are_killed_at_any_time(path):
    """VMEM_TEST_ITERATIONS kills: every token is the right one, and no engine waits for a dead one."""
    draw = random.Random(int(os.environ.get("VMEM_TEST_SEED", "1")))
    tokens = {key: expected(key) for key in (1, 2)}
    alive = {}  # engine: its key
    for kill in range(int(os.environ.get("VMEM_TEST_ITERATIONS", "4"))):
        while len(alive) < 3:
            engine, key = Process(path), draw.choice((1, 2))
            engine.begin("start", f"k{key}", key)
            alive[engine] = key
        for engine in list(alive):
            assert engine.answer() in ("took", "loaded", None, 0, *(n * SIZE for n in range(1, 4)))
        for engine, key in alive.items():
            if draw.random() < 0.7:
                engine("wake")
                assert engine("tokens") == tokens[key]
        victims = draw.sample(["owner", *alive], draw.choice((1, 1, 1, 2, 3)))
        for engine in alive:  # they are killed in the middle of something
            engine.begin(draw.choice(("sleep", "wake", "wake")))
        for victim in victims:
            if victim == "owner":
                if pid := engines.owner(path):
                    os.kill(pid, signal.SIGKILL)
            else:
                victim.kill()
                del alive[victim]
    for engine in alive:
        engine.answer()
        engine("wake")
        assert engine("tokens") == tokens[alive[engine]]
