# SPDX-License-Identifier: MIT OR GPL-2.0-only
# shellcheck shell=sh
# Functions of the steps of docs/kernel-module.md's hour. Each step leaves its findings in $OUT, and ends at the first
# failure.
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

# Kernel messages that must not be there. The driver's own loading lines are no complaints.
complaints() {
    root dmesg | grep -E 'BUG:|WARNING:|Oops|general protection|Assert failed|[Mm]emory leak of|Xid|hung task|blocked for more' || true
}
# begin NAME ... end NAME: the complaints of a step, without those from before it
begin() { complaints > "$OUT/$1.before"; }
end() {
    complaints > "$OUT/$1.after"
    if grep -vxFf "$OUT/$1.before" "$OUT/$1.after" >&2; then
        fail "the kernel complained during $1 (above)"
    fi
}

# The counters that must not grow, and the memory that must not go
gpu_state() {
    nvidia-smi --query-gpu=index,uuid,memory.used,ecc.errors.uncorrected.volatile.total,retired_pages.pending \
        --format=csv,noheader
}
