#!/bin/sh
# SPDX-License-Identifier: MIT OR GPL-2.0-only
# An hour on a real server (docs/kernel-module.md): hour.sh [STEP...], by default all steps in order. Each leaves its
# findings in $OUT (build/hour) and ends at the first failure.
#   CUDA_SAMPLES    folder of NVIDIA's built samples, NCCL_TESTS: of nccl-tests; what is absent is named
#   NO_CAPTURE=1    something outside this machine records a crash
set -eu
cd "$(dirname "$0")/../.."
OUT=${OUT:-build/hour}
mkdir -p "$OUT"

say() { echo "== $*"; }
fail() {
    echo "FAILED: $*" >&2
    exit 1
}
root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

# Kernel messages that must not come during a step. The driver's own loading lines are no complaints.
COMPLAINTS='\bBUG\b|WARNING:|Oops|general protection|invalid opcode|KASAN|UBSAN|unable to handle|Kernel panic|[Ss]oft lockup'
COMPLAINTS="$COMPLAINTS"'|Assert failed|[Mm]emory leak of|list_(add|del) corruption|refcount_t:|scheduling while atomic'
COMPLAINTS="$COMPLAINTS"'|sleeping function|possible (circular|recursive)|hung task|blocked for more|stalls on|Xid'
complaints() {
    root dmesg | grep -E "$COMPLAINTS" || true
}

# The counters that must not grow, and the memory that must not go
gpu_state() {
    nvidia-smi --query-gpu=index,uuid,memory.used,ecc.errors.uncorrected.volatile.total,retired_pages.pending \
        --format=csv,noheader
}

load() { # make's variables
    make module "$@" > "$OUT/module"
    root make module-load MODULE="$(tail -n 1 "$OUT/module")" MODULE_PARAMETERS="${parameters:-}"
}

# A process in the kernel that does not end keeps rmmod: then only a reboot gets rid of the module.
unload() {
    root timeout 120 make module-unload || fail "the module does not unload: see who holds it (lsof /dev/nvidia-uvm), else reboot"
}

# What this machine is, what must stop, and what catches a crash.
baseline() {
    release=$(cat /sys/module/nvidia/version) || fail "nvidia.ko is not loaded"
    [ "${release%%.*}" -ge 535 ] || fail "driver $release: vMem's module needs 535 or later"
    modinfo nvidia | grep -q '^license: *Dual MIT/GPL' || fail "the loaded nvidia.ko is the proprietary one: install the open kernel modules"
    grep "^$release " kernel-open/verified.list || say "driver $release is not in kernel-open/verified.list: nobody has tried it"
    python3 kernel-open/build.py diff > "$OUT/hooks.diff" || fail "the hooks do not fit this release"
    if root fuser -v /dev/nvidia-uvm; then
        fail "processes hold /dev/nvidia-uvm (above): stop them, or their services and containers"
    fi
    if [ "$(cat /sys/kernel/kexec_crash_loaded 2> /dev/null)" != 1 ] && ! lsmod | grep -q '^netconsole'; then
        [ "${NO_CAPTURE:-}" = 1 ] || fail "nothing records a crash: arm kdump, load netconsole, or keep \
'ssh this-machine sudo dmesg --follow' running elsewhere and set NO_CAPTURE=1"
    fi
    gpu_state | tee "$OUT/gpu.baseline"
}

# CUDA's own programs on the module that is loaded: each must end as on the stock module, with which the hour begins.
cuda() {
    verdicts=$OUT/cuda.$1
    : > "$verdicts"
    for each in failing_map all_reduce_perf vectorAdd UnifiedMemoryStreams conjugateGradientUM systemWideAtomics \
        vectorAddMMAP memMapIPCDrv simpleIPC streamOrderedAllocation p2pBandwidthLatencyTest; do
        case $each in
        failing_map) set -- "$1" python3 tests/hour/failing_map.py ;;
        all_reduce_perf) set -- "$1" "${NCCL_TESTS:-/nonexistent}/$each" -b 8 -e 128M -f 2 -g 1 ;;
        *) set -- "$1" "$(find "${CUDA_SAMPLES:-/nonexistent}" -type f -perm -u+x -name "$each" 2> /dev/null | head -n 1)" ;;
        esac
        verdict=FAILED
        if ! command -v "${2:-absent}" > /dev/null; then
            verdict=absent
        elif (shift && timeout -k 10 300 "$@") > "$OUT/$each.$1.log" 2>&1; then
            verdict=ok
        fi
        echo "$verdict $each" >> "$verdicts"
    done
    cat "$verdicts"
    diff "$OUT/cuda.stock" "$verdicts" || fail "$1 differs from stock"
}

stock() { cuda stock; }
develop() { # asserts that log, and UVM's leak checker
    trap 'unload || true' EXIT # whatever fails, nobody shall serve on it
    trap 'exit 130' INT TERM
    parameters=uvm_leak_checker=2 load UVM_BUILD_TYPE=develop
    cuda develop
    trap - EXIT INT TERM
    unload
}
selftest() {
    load
    root .venv/bin/pyvmem doctor --selftest --backend uvm
}
tests() { make test-gpu GPU_BACKENDS=uvm; }
end() { # as it was before
    unload
    cuda stock-again
    gpu_state > "$OUT/gpu.end"
    diff "$OUT/gpu.baseline" "$OUT/gpu.end" || fail "memory or ECC counts differ from the baseline"
}

[ $# -gt 0 ] || set -- baseline stock develop selftest tests end
for step; do
    say "$step"
    complaints > "$OUT/$step.before"
    "$step"
    complaints > "$OUT/$step.after"
    ! grep -vxFf "$OUT/$step.before" "$OUT/$step.after" >&2 || fail "the kernel complained during $step (above)"
    say "$step passed"
done
