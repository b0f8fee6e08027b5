#!/bin/sh
# SPDX-License-Identifier: MIT OR GPL-2.0-only
# Step 3 of docs/kernel-module.md's hour: the develop build, whose asserts log, with UVM's leak checker, under CUDA alone.
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh"
export UVM_BUILD_TYPE=develop
make module > "$OUT/module"
module=$(tail -n 1 "$OUT/module")
begin develop
root make module-load MODULE="$module" MODULE_PARAMETERS=uvm_leak_checker=2
kernel-open/hour/2-cuda.sh develop
# A process in the kernel that does not end keeps rmmod: then only a reboot gets rid of the module.
root timeout 120 make module-unload || fail "the module does not unload: see who holds it (lsof /dev/nvidia-uvm), else reboot"
end develop
say "step 3 passed: no assert, no leak"
