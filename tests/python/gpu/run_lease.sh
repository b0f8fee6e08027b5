#!/bin/sh
# The lease on a GPU: [PYTHON=python3] tests/python/gpu/run_lease.sh [FOLDER]. Builds with `make`, runs the tests and the
# benchmark in the order of their worth, each with a time limit, and prints a line for each test and each figure. Results
# are in FOLDER (build/lease). It goes on after a failure, and its exit status is the number of parts that failed.
# SPDX-License-Identifier: MIT
cd "$(dirname "$0")/../../.." || exit 99
out=${1:-build/lease}
mkdir -p "$out"
failed=0

part() { # part SECONDS NAME COMMAND...
    limit=$1 name=$2
    shift 2
    start=$(date +%s)
    timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1
    rc=$?
    echo "== $name: exit status $rc after $(($(date +%s) - start)) s of at most $limit"
    [ $rc = 0 ] || failed=$((failed + 1))
    return $rc
}

tests() { # tests SECONDS BACKEND EXPRESSION
    part "$1" "tests-$2-$3" env VMEM_TEST_BACKENDS="$2" .venv/bin/python -m pytest -v -s --tb=short -p no:cacheprovider \
        -p no:xdist tests/python/gpu/test_lease_gpu.py -k "$4"
    grep -E 'PASSED|FAILED|ERROR|SKIPPED|^peak|^E  ' "$out/tests-$2-$3.log" | cut -c1-180
}

part 400 make make PYTHON="${PYTHON:-python3}" || { tail -5 "$out/make.log"; exit 1; }
tests 60 stock first "names or what_lives or 100_cycles"
tests 120 stock training "bit_equal"
tests 120 stock rest "not names and not what_lives and not 100_cycles and not bit_equal"
part 150 bench-stock .venv/bin/python -m benchmarks lease --backend stock --json "$out/stock.json" || tail -3 "$out/bench-stock.log"
.venv/bin/python tests/python/gpu/lease_figures.py "$out/stock.json"
part 60 rollout .venv/bin/python examples/rollout.py --device cuda --sequences 16 --prompt 2048 --new 32
tail -5 "$out/rollout.log" | cut -c1-180
tests 120 cuda all "not bit_equal"
part 60 bench-cuda .venv/bin/python -m benchmarks lease --backend cuda --quick --json "$out/cuda.json" || tail -3 "$out/bench-cuda.log"
.venv/bin/python tests/python/gpu/lease_figures.py "$out/cuda.json"
exit $failed
