#!/bin/sh
# SPDX-License-Identifier: MIT OR GPL-2.0-only
# modprobe-uvm.sh RELEASE [option=value]...: what `modprobe nvidia-uvm` does after `make module-install MODULE_BOOT=1`.
# The patched module if the loaded driver is of its release and it loads, the stock one otherwise.
release=$1
shift
# nvidia-modprobe, which CUDA calls, leaves PATH=/sbin: without the rest, the stock module would be loaded silently.
PATH=$PATH:/usr/sbin:/usr/bin:/sbin:/bin
modprobe nvidia || exit
# Options configured for the stock module, under any of its names, are meant for ours, too. modprobe does not know that.
options=$(modprobe --showconfig |
    sed -nE 's/^options nvidia[-_](current[-_])?(open[-_])?uvm[[:space:]]+//p' | tr '\n' ' ')
if [ "$(cat "$VMEM_ROOT/sys/module/nvidia/version")" = "$release" ]; then
    # shellcheck disable=SC2086
    modprobe nvidia-uvm-vmem $options "$@" && exit
    echo "nvidia-uvm-vmem does not load; the stock nvidia-uvm follows" >&2
fi
for stock in nvidia-uvm nvidia-current-open-uvm nvidia-current-uvm; do
    modprobe --ignore-install --quiet "$stock" "$@" && exit
done
exit 1
