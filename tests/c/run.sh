#!/bin/sh
# run.sh "BACKEND ..." PROGRAM ...: runs every program on every backend, $JOBS at once (1), and sums up. Beside each
# program stay its output and its result: PROGRAM.BACKEND.log, and .rc with the exit status and the seconds. A program
# that runs for $LIMIT seconds (1200) hangs. The slowest takes half a minute, and a busy machine ten times as long. $RUN
# stands before each program, such as an emulator.
# SPDX-License-Identifier: MIT
if [ "$1" = --one ]; then
    out=$3.$2
    start=$(date +%s)
    # shellcheck disable=SC2086 # $RUN: a command before the program, such as an emulator's
    timeout -k 5 "${LIMIT:-1200}" $RUN "$3" "$2" >"$out.log" 2>&1
    rc=$?
    echo "$rc $(($(date +%s) - start))" >"$out.rc"
    name="$(basename "$3") $2"
    case $rc in
    0) ;;
    77) echo "skip $name: $(tail -n 1 "$out.log")" ;;
    124 | 137) printf '%s\n' "FAIL $name: hung
$(tail -n 30 "$out.log")" ;;
    *) printf '%s\n' "FAIL $name: exit status $rc
$(tail -n 30 "$out.log")" ;;
    esac
    exit 0
fi
backends=$1
shift
for backend in $backends; do
    for program; do
        rm -f "$program.$backend.rc"
        echo "$backend $program"
    done
done | xargs -r -P "${JOBS:-1}" -L 1 "$0" --one
passed=0 failed=0 skipped=0
for backend in $backends; do
    for program; do
        rc=none
        [ -f "$program.$backend.rc" ] && read -r rc _ <"$program.$backend.rc"
        case $rc in
        0) passed=$((passed + 1)) ;;
        77) skipped=$((skipped + 1)) ;;
        *) failed=$((failed + 1)) ;;
        esac
    done
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
