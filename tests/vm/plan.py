# SPDX-License-Identifier: MIT
"""The steps of each tier in the guest, and the assertions that are no failure."""

import dataclasses

from guest import Allowed, Step

PROGRAMS = ("test_sim", "test_uvm", "test_calls", "test_neighbour", "test_release", "test_errors", "test_atomic",
            "test_random", "test_fuzz", "test_fetch", "test_process", "test_lifetime", "test_race", "test_live",
            "test_failnth", "test_fatal", "test_stock", "test_register")  # fmt: skip

# UVM's asserts only log, so any is a failure, but for those that its own tests provoke, and one that is wrong.
ALLOWED = (
    Allowed("uvm_gpu_semaphore.c", "semaphore", "test_uvm|load", "the semaphore test sets a payload that goes back"),
    Allowed("uvm_channel.c", "channel", "test_uvm", "the channel test provokes a channel error"),
    Allowed("uvm_channel.c", "uvm_channel_check_errors", "test_fatal", "the test makes a channel fault"),
    Allowed("uvm_lock.c", "", "test_uvm", "the lock test breaks the lock order"),
    Allowed("uvm_lock_test.c", "", "test_uvm", "the lock test breaks the lock order"),
    Allowed("uvm_mmu.c", "uvm_page_tree_init", "test_uvm", "the page-tree test's own fake GPU"),
    Allowed("uvm_gpu.c", "set_optimal_p2p_write_ces", "test_sim", "stock UVM counts a PCIe peer after this assert"),
    Allowed("Memory leak of", "", "after failed registrations", "UVM's own error paths; run.py compares both modules"),
    Allowed("uvm_gpu_isr.c", "Locking violation", "test_uvm", "a test of stock 595 takes these below the VA space's"),
)


@dataclasses.dataclass(frozen=True)
class Size:
    """The length of a tier's scalable parts."""

    ops: int
    fuzz: int
    kills: int
    race: int
    remaps: int
    stress: int
    # Managed memory; 0: the test's own choice. At each fault UVM's asserts allocate for every page of a 2 MiB block,
    # which takes a checked kernel a tenth of a second or more. A smaller block there means fewer faults
    managed_kb: int = 0  # in test_uvm
    pushed_kb: int = 0  # in test_lifetime
    addresses: int = 2048  # of one page, in test_release
    takeover_mb: int = 4096  # in test_release
    eviction: bool = True  # managed memory again, on a GPU that has too little of it
    registration: bool = True  # registrations that fail, which leak memory of UVM's: kmemleak would report it
    leave_out: str = ""  # of UVM's own tests, by parts of their names
    slow: float = 1.0  # times every time limit
    only: tuple = ()  # the steps that the tier has, by parts of their names; (): all


# Each takes minutes in a checked kernel, and none meets what vMem adds: range trees, page tables of fake GPUs, kernel
# threads, physical chunks by the thousand. The short tier runs them all.
LONG_UNDER_CHECKS = "range_tree_random page_tree range_allocator kthread_q uvm_mem_sanity pmm_sanity"

SIZES = {
    "short": Size(ops=3000, fuzz=20_000, kills=8, race=2, remaps=10_000, stress=120),
    "long": Size(ops=100_000, fuzz=1_000_000, kills=60, race=20, remaps=10_000, stress=1500, addresses=65_536),
    "debug": Size(
        ops=500,
        fuzz=2_000,
        kills=3,
        race=2,
        remaps=200,
        stress=40,
        managed_kb=256,
        takeover_mb=256,
        pushed_kb=16384,  # more than UVM itself keeps, or nothing has to give way
        eviction=False,
        registration=False,
        leave_out=LONG_UNDER_CHECKS,
        slow=6.0,
    ),
    # Tests of all that differs between architectures: entries, levels, invalidates, membars, methods
    "arch": Size(
        ops=2000,
        fuzz=5_000,
        kills=3,
        race=1,
        remaps=2_000,
        stress=40,
        only=(
            "test_sim",
            "test_calls",
            "test_neighbour",
            "test_errors",
            "test_atomic",
            "test_lifetime",
            "test_live patched",
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


def _eviction(variant, size, arch):
    """Managed memory again on a GPU that has too little of it."""
    if not size.eviction:
        return []
    return [_load(variant, arch, BUILTIN, gpu="fb_mb=64"),
            Step(f"test_uvm eviction {variant}", f"STRESS={size.stress} /tests/test_uvm managed_stress", 120),
            _unload(variant)]  # fmt: skip


def _test_uvm(variant, size):
    env = f"STRESS={size.stress} MANAGED_KB={size.managed_kb} LEAVE_OUT='{size.leave_out}'"
    return Step(f"test_uvm {variant}", f"{env} /tests/test_uvm", 240)


def _stock(size, arch):
    return [
        _load("stock", arch, gpu="gpus=2"),
        Step("test_sim", "/tests/test_sim", 120),
        _unload("stock"),
        _load("stock", arch, BUILTIN),
        _test_uvm("stock", size),
        Step("test_live stock", f"REMAPS={size.remaps} /tests/test_live stock_remap", 120),
        _unload("stock"),
        *_eviction("stock", size, arch),
    ]


def _patched(size, arch):
    return [
        _load("patched", arch, BUILTIN),
        _test_uvm("patched", size),
        _unload("patched"),
        *_eviction("patched", size, arch),
        _load("patched", arch, gpu="gpus=2"),
        Step("test_calls", "/tests/test_calls", 180),
        Step("test_neighbour", "/tests/test_neighbour", 120),
        Step(
            "test_release",
            f"ADDRESSES={size.addresses} TAKEOVER_MB={size.takeover_mb} /tests/test_release",
            120 + size.addresses // 200,
        ),
        Step("test_errors", f"CALLS={min(size.fuzz, 20_000)} /tests/test_errors", 120),
        Step("test_atomic", "/tests/test_atomic", 120),
        Step("test_lifetime", f"MANAGED_KB={size.pushed_kb} /tests/test_lifetime", 180),
        Step("test_live patched", f"REMAPS={size.remaps} /tests/test_live", 240),
        _unload("patched"),
        _load("patched", arch),
        Step("test_process", f"KILLS={size.kills} /tests/test_process", 240),
        Step("test_race", f"SECONDS_EACH={size.race} /tests/test_race", 120 + 10 * size.race),
        Step("test_random", f"OPS={size.ops} /tests/test_random", 120 + size.ops // 40),
        Step("test_fuzz", f"CALLS={size.fuzz} /tests/test_fuzz", 120 + size.fuzz // 500),
        Step("test_fetch", f"CALLS={size.fuzz // 10} /tests/test_fetch", 120 + size.fuzz // 200),
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


def failing_stock_calls(variant, size, arch):
    """UVM's own calls, each of which fails: the same must come of it on both modules."""
    step = Step(f"test_stock {variant}", f"SECONDS_EACH={size.race} /tests/test_stock", 240 + 10 * size.race)
    return [_load(variant, arch, BUILTIN, gpu="gpus=2"), _failmem(), step, _unload(variant)]


def failing_registrations(variant, size, arch):
    """A GPU's first registration fails: the same must leak on both modules."""
    if not size.registration:
        return []
    unload = Step(f"unload {variant} after failed registrations", "unload_all", 60, quiet=True)
    return [_load(variant, arch), _failmem(), Step(f"test_register {variant}", "/tests/test_register", 120), unload]


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
        *_stock(size, arch),
        *failing_stock_calls("stock", size, arch),
        *failing_registrations("stock", size, arch),
        *_patched(size, arch),
        *failing_stock_calls("patched", size, arch),
        *failing_registrations("patched", size, arch),
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


def shares(all_steps, n):
    """The steps for n guests side by side: whole groups, about as long for each, in the order they have here."""
    groups, last = _groups(all_steps)
    length = [sum(s.timeout for s in group if not s.quiet) for group in groups]
    mine = [[] for _ in range(max(min(n, len(groups)), 1))]
    for i in sorted(range(len(groups)), key=lambda i: -length[i]):
        min(mine, key=lambda share: sum(length[j] for j in share)).append(i)
    return [[s for i in sorted(share) for s in groups[i]] + last for share in mine]
