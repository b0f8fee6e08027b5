#!/bin/sh
# run.sh "BACKEND ..." PROGRAM ...: runs every program on every backend and sums up.
# SPDX-License-Identifier: MIT
backends=$1
shift
passed=0 failed=0 skipped=0
for backend in $backends; do
    for program; do
        name="$(basename "$program") $backend"
        timeout -k 5 ${LIMIT:-240} "$program" "$backend" >"$program.log" 2>&1
        case $? in
        0) passed=$((passed + 1)) ;;
        77) skipped=$((skipped + 1)); echo "skip $name: $(tail -n 1 "$program.log")" ;;
        124) failed=$((failed + 1)); echo "FAIL $name: hung"; tail -n 30 "$program.log" ;;
        *) failed=$((failed + 1)); echo "FAIL $name"; tail -n 30 "$program.log" ;;
        esac
    done
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
