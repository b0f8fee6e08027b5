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
        rc=$?
        if [ $rc = 124 ]; then # a program was once seen to hang on a busy machine; say so, and once more
            echo "hung $name: $(tail -n 3 "$program.log")"
            timeout -k 5 ${LIMIT:-240} "$program" "$backend" >"$program.log" 2>&1
            rc=$?
        fi
        case $rc in
        0) passed=$((passed + 1)) ;;
        77) skipped=$((skipped + 1)); echo "skip $name: $(tail -n 1 "$program.log")" ;;
        *) failed=$((failed + 1)); echo "FAIL $name"; tail -n 30 "$program.log" ;;
        esac
    done
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
