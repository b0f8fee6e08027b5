#!/bin/sh
# SPDX-License-Identifier: MIT OR GPL-2.0-only
# Step 5 of docs/kernel-module.md's hour: vMem's own tests on the module, C and Python.
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh"
begin tests
make test-gpu GPU_BACKENDS=uvm
end tests
say "step 5 passed"
