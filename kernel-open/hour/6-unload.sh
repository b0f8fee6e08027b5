#!/bin/sh
# SPDX-License-Identifier: MIT OR GPL-2.0-only
# Step 6 of docs/kernel-module.md's hour: the module goes, and the machine is as it was.
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh"
if root test -e /proc/driver/nvidia-uvm/vmem; then
    [ "$(root grep -c ^process /proc/driver/nvidia-uvm/vmem || true)" = 0 ] || fail "/proc/driver/nvidia-uvm/vmem still lists a process"
fi
begin unload
root timeout 120 make module-unload || fail "the module does not unload: see who holds it (lsof /dev/nvidia-uvm), else reboot"
kernel-open/hour/2-cuda.sh stock-again
end unload
gpu_state > "$OUT/gpu.end"
diff "$OUT/gpu.baseline" "$OUT/gpu.end" || fail "memory or ECC counts differ from the baseline"
say "step 6 passed: as before"
