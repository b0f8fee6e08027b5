#!/bin/sh
# SPDX-License-Identifier: MIT OR GPL-2.0-only
# Step 4 of docs/kernel-module.md's hour: the release build, and the self-test on both backends.
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh"
make module > "$OUT/module"
module=$(tail -n 1 "$OUT/module")
root make module-load MODULE="$module"
begin selftest
root .venv/bin/pyvmem doctor --selftest --backend uvm
end selftest
say "step 4 passed"
