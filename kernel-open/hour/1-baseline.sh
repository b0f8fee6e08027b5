#!/bin/sh
# SPDX-License-Identifier: MIT OR GPL-2.0-only
# Step 1 of docs/kernel-module.md's hour: what this machine is, what must stop, and what catches a crash.
# shellcheck source=common.sh
. "$(dirname "$0")/common.sh"

release=$(cat /sys/module/nvidia/version) || fail "nvidia.ko is not loaded"
[ "${release%%.*}" -ge 535 ] || fail "driver $release: vMem's module needs 535 or later"
grep -q '^license: *Dual MIT/GPL' <<EOF || fail "the loaded nvidia.ko is the proprietary one: install the open kernel modules"
$(modinfo nvidia)
EOF
grep "^$release " kernel-open/verified.list || say "driver $release is not in kernel-open/verified.list: nobody has tried it"
python3 kernel-open/build.py diff > "$OUT/hooks.diff" || fail "the hooks do not fit this release"

for service in nvidia-persistenced nvidia-dcgm dcgm nvidia-fabricmanager docker containerd kubelet; do
    if systemctl is-active --quiet "$service" 2> /dev/null; then
        say "$service runs: stop it before step 3 if it holds /dev/nvidia-uvm"
    fi
done
if root fuser -v /dev/nvidia-uvm; then
    fail "processes hold /dev/nvidia-uvm (above): stop them"
fi

if [ "$(cat /sys/kernel/kexec_crash_loaded 2> /dev/null)" = 1 ]; then
    say "kdump is armed: a crash leaves /var/crash"
elif lsmod | grep -q '^netconsole'; then
    say "netconsole is loaded"
else
    [ "${NO_CAPTURE:-}" = 1 ] || fail "nothing records a crash: arm kdump, load netconsole, or keep \
'ssh this-machine sudo dmesg --follow' running elsewhere and set NO_CAPTURE=1"
fi

gpu_state > "$OUT/gpu.baseline"
nvidia-smi -q > "$OUT/nvidia-smi.baseline"
root dmesg > "$OUT/dmesg.baseline"
say "Xid lines so far: $(grep -c Xid "$OUT/dmesg.baseline" || true)"
cat "$OUT/gpu.baseline"
say "step 1 passed; $OUT has the baseline"
