#!/bin/sh
# SPDX-License-Identifier: MIT OR GPL-2.0-only
# stock-symvers.sh KERNEL OUT: what the installed stock nvidia-uvm.ko of the tree's release says of nvidia.ko's symbols,
# as a Module.symvers. Fails, with no file, where there is no such module.
release=$(sed -n 's/.*NV_VERSION_STRING=\\"\([0-9.]*\)\\".*/\1/p' Kbuild)
rm -f "$2"
stock=$(modinfo -k "$1" -n nvidia-uvm 2>/dev/null) || exit 1
[ "$(modinfo -F version "$stock")" = "$release" ] || exit 1
modprobe --dump-modversions "$stock" |
    awk '$2 ~ /^nvUvmInterface/ {printf "%s\t%s\tnvidia\tEXPORT_SYMBOL\t\n", $1, $2}' >"$2"
[ -s "$2" ] || { rm -f "$2"; exit 1; }
