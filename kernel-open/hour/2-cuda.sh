#!/bin/sh
# SPDX-License-Identifier: MIT OR GPL-2.0-only
# Steps 2 and 3 of docs/kernel-module.md's hour: CUDA's own programs on the module that is loaded. The first run, on the
# stock module, is the measure of the second.
#   2-cuda.sh NAME       NAME: stock, or what is loaded now
#   CUDA_SAMPLES         folder of built samples, NCCL_TESTS: of nccl-tests; what is absent is named
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh"
name=${1:?NAME of the module that is loaded: stock, develop, release}
verdicts=$OUT/cuda.$name
: > "$verdicts"

run() {
    what=$1
    shift
    if ! command -v "$1" > /dev/null; then
        echo "absent $what" >> "$verdicts"
    elif timeout -k 10 300 "$@" > "$OUT/$what.$name.log" 2>&1; then
        echo "ok $what" >> "$verdicts"
    else
        echo "FAILED $what" >> "$verdicts"
    fi
}
sample() { run "$1" "$(find "${CUDA_SAMPLES:-/nonexistent}" -type f -perm -u+x -name "$1" 2> /dev/null | head -n 1 | grep . || echo absent)"; }

begin "cuda.$name"
run failing_map python3 kernel-open/hour/failing_map.py
for each in vectorAdd UnifiedMemoryStreams conjugateGradientUM systemWideAtomics vectorAddMMAP memMapIPCDrv simpleIPC \
    streamOrderedAllocation p2pBandwidthLatencyTest; do
    sample "$each"
done
run all_reduce "${NCCL_TESTS:-/nonexistent}/all_reduce_perf" -b 8 -e 128M -f 2 -g 1
cat "$verdicts"
end "cuda.$name"
[ "$name" = stock ] || diff "$OUT/cuda.stock" "$verdicts" || fail "$name differs from stock"
say "cuda on $name: $(grep -c ^ok "$verdicts") passed, $(grep -c ^absent "$verdicts" || true) absent"
