#!/bin/sh
# SPDX-License-Identifier: MIT OR GPL-2.0-only
# Step 4 of docs/kernel-module.md's hour: the release build, and the self-test on both backends.
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh"
make module
make module-load
begin selftest
root .venv/bin/pyvmem doctor --selftest --backend uvm
end selftest
say "step 4 passed"
