#!/bin/sh
# SPDX-License-Identifier: MIT OR GPL-2.0-only
# Kbuild's CHECK: sparse for vMem's files only. Its findings in NVIDIA's headers are NVIDIA's.
for file; do :; done
case $file in
*/uvm_ext/*) exec sparse "$@" ;;
esac
