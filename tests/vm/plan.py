# SPDX-License-Identifier: MIT
"""The steps of each tier in the guest, and the assertions that are no failure."""

import dataclasses

from guest import Allowed, Step

PROGRAMS = ("test_sim", "test_uvm", "test_calls", "test_neighbour", "test_release", "test_errors", "test_atomic",
            "test_random", "test_inputs", "test_process", "test_lifetime", "test_race", "test_live",
            "test_failnth", "test_fatal", "test_stock")  # fmt: skip

# UVM's asserts only log, so any is a failure, but for those that its own tests provoke, and one that is wrong.
ALLOWED = (
    Allowed("uvm_gpu_semaphore.c", "semaphore", "test_uvm|load", "the semaphore test sets a payload that goes back"),
    Allowed("uvm_channel.c", "channel", "test_uvm", "the channel test provokes a channel error"),
    Allowed("uvm_channel.c", "uvm_channel_check_errors", "test_fatal", "the test makes a channel fault"),
    Allowed("uvm_lock.c", "", "test_uvm", "the lock test breaks the lock order"),
    Allowed("uvm_lock_test.c", "", "test_uvm", "the lock test breaks the lock order"),
    Allowed("uvm_gpu_isr.c", "Locking violation", "test_uvm", "a test of stock 595 takes these below the VA space's"),
)


@dataclasses.dataclass(frozen=True)
class Size:
    """The length of a tier's scalable parts."""

    ops: int
    inputs: int
    kills: int
    race: int
    remaps: int
    # Managed memory. At each of its faults UVM's asserts allocate for every page of a 2 MiB block: a tenth of a second
    # or more in a checked kernel
    managed_kb: int = 128 << 10
    addresses: int = 2048  # of one page, in test_release
    takeover_mb: int = 4096  # in test_release
    slow: float = 1.0  # times every time limit
    only: tuple = ()  # the steps that the tier has, by parts of their names; (): all


SIZES = {
    "short": Size(ops=3000, inputs=2_000, kills=8, race=2, remaps=10_000),
    "long": Size(ops=100_000, inputs=100_000, kills=60, race=20, remaps=10_000, addresses=65_536),
    "debug": Size(
        ops=500,
        inputs=200,
        kills=3,
        race=2,
        remaps=200,
        takeover_mb=256,
        managed_kb=16384,  # more than UVM itself keeps, or nothing has to give way
        slow=6.0,
    ),
    # Tests of all that differs between architectures: entries, levels, invalidates, membars, methods
    "arch": Size(
        ops=2000,
        inputs=500,
        kills=3,
        race=1,
        remaps=2_000,
        only=(
            "test_sim",
            "test_calls",
            "test_neighbour",
            "test_errors",
            "test_atomic",
            "test_lifetime",
            "test_live",
            "test_random",
        ),
    ),
}


def _load(variant, arch, params="", gpu=""):
    gpu = f"arch={arch} {gpu}".strip()
    return Step(f"load {variant} {params} {gpu}".strip(),
                f"load_gpu {gpu} && load_uvm {variant} {params}", 60, quiet=True)  # fmt: skip


def _unload(variant):
    return Step(f"unload {variant}", "unload_all", 60, quiet=True)


BUILTIN = "uvm_enable_builtin_tests=1"


def _stock(arch):
    return [
        _load("stock", arch),
        Step("test_sim", "/tests/test_sim", 120),
        _unload("stock"),
    ]


def _patched(size, arch):
    return [
        _load("patched", arch, BUILTIN),
        Step("test_uvm", "/tests/test_uvm", 240),
        _unload("patched"),
        _load("patched", arch, gpu="gpus=2"),
        Step("test_calls", "/tests/test_calls", 180),
        Step("test_neighbour", "/tests/test_neighbour", 120),
        Step(
            "test_release",
            f"ADDRESSES={size.addresses} TAKEOVER_MB={size.takeover_mb} /tests/test_release",
            120 + size.addresses // 200,
        ),
        Step("test_errors", f"CALLS={min(size.inputs, 2_000)} /tests/test_errors", 120),
        Step("test_atomic", "/tests/test_atomic", 120),
        Step("test_lifetime", f"MANAGED_KB={size.managed_kb} /tests/test_lifetime", 180),
        Step("test_live", f"REMAPS={size.remaps} /tests/test_live", 240),
        _unload("patched"),
        _load("patched", arch),
        _failmem(),
        Step("test_process", f"KILLS={size.kills} /tests/test_process", 240),
        Step("test_race", f"SECONDS_EACH={size.race} /tests/test_race", 120 + 10 * size.race),
        Step("test_random", f"OPS={size.ops} /tests/test_random", 120 + size.ops // 40),
        Step("test_inputs", f"CALLS={size.inputs} /tests/test_inputs", 120 + size.inputs // 20),
        _unload("patched"),
    ]


def unload_with_state(arch):
    """The module refuses to go while a file holds pages, and goes without a leak once the holder was killed."""
    hold = "HOLD=1 /tests/test_lifetime hold_everything > /tmp/hold & pid=$!; "
    wait = ("for i in $(seq 600); do grep -q holding /tmp/hold && break; sleep 0.1; done; "
            "grep -q holding /tmp/hold || exit 1; ")  # fmt: skip
    refuse = "if rmmod nvidia_uvm; then echo 'not ok unload - rmmod succeeded while pages are held'; exit 1; fi; "
    kill = ("for p in $(pidof test_lifetime); do kill -9 $p; done; wait $pid; sleep 0.5; "
            "echo ok module_unload_with_state")  # fmt: skip
    return [_load("patched", arch), Step("unload with state", hold + wait + refuse + kill, 60), _unload("patched")]


def _failmem():
    return Step("insert failmem", "insmod /mod/failmem.ko", 20, quiet=True)  # unload_all removes it


def failing_stock_calls(variant, arch):
    """UVM's own calls, each of which fails: the same must come of it on both modules."""
    step = Step(f"test_stock {variant}", "/tests/test_stock", 240)
    return [_load(variant, arch, BUILTIN, gpu="gpus=2"), _failmem(), step, _unload(variant)]


def fail_nth(arch):
    return [
        _load("patched", arch),
        _failmem(),
        Step("test_failnth", "/tests/test_failnth", 600),
        Step("test_release without memory", "/tests/test_release without_memory", 60),
        _unload("patched"),
    ]


def fatal(arch):
    """A channel of the driver's faults in the middle of each call: fatal to UVM, so the module is loaded anew."""
    steps = []
    for case in ("map_with_overlay", "map_no_overlay", "unmap", "release", "create", "huge_split", "external_unmap"):
        test = Step(f"test_fatal {case}", f"/tests/test_fatal in_{case}_", 60)
        steps += [_load("patched", arch), test, _unload("patched")]
    return steps


DEFAULT_ARCH = "turing"


def _of_one(size, arch):
    """The steps on one architecture; their names end with its own unless it is the default."""
    out = [
        *_stock(arch),
        *failing_stock_calls("stock", arch),
        *_patched(size, arch),
        *failing_stock_calls("patched", arch),
        *unload_with_state(arch),
        *fail_nth(arch),
        *fatal(arch),
    ]
    if size.only:
        out = select(out, size.only)
    if arch != DEFAULT_ARCH:
        for step in out:
            step.name += f" {arch}"
    return out


def steps(tier, only=None, archs=(DEFAULT_ARCH,)):
    size = SIZES[tier]
    out = [step for arch in archs for step in _of_one(size, arch)]
    if tier == "debug":  # last, in every guest
        leaks = "/sys/kernel/debug/kmemleak"
        out += [Step("kmemleak", f"echo scan > {leaks}; sleep 6; echo scan > {leaks}; sleep 1; "
                     f"if grep -q . {leaks}; then head -60 {leaks}; echo 'not ok kmemleak - unreferenced objects'; "
                     "exit 1; fi; echo ok kmemleak", 240)]  # fmt: skip
    for step in out:
        step.timeout = int(step.timeout * 3 * size.slow)  # an end for a hang, not a measure of speed
        if not step.quiet:  # a case that hangs ends before its step, so that it is named
            step.command = f"export CASE_TIMEOUT={step.timeout * 9 // 10}; {step.command}"
    return select(out, only) if only else out


def _groups(all_steps):
    """The steps from a loading to the unloading after it, and what comes after the last."""
    groups, group = [], []
    for step in all_steps:
        group.append(step)
        if step.name.startswith("unload ") and step.quiet:
            groups.append(group)
            group = []
    return groups, group


def select(all_steps, only):
    """The steps whose names contain one of `only`, each with the loading before and the unloading after it."""
    groups, last = _groups(all_steps)
    out = []
    for group in groups:
        if any(o in s.name for o in only for s in group if not s.quiet):
            out += [s for s in group if s.quiet or any(o in s.name for o in only)]
    return out + [s for s in last if any(o in s.name for o in only)]
