# SPDX-License-Identifier: MIT OR GPL-2.0-only
"""Everything vMem inserts into NVIDIA's files: eight hooks, each at an anchor that must match exactly once.

An anchor is one or more whole lines of the vendor's file, without leading text of their own: they are compared
literally, so a release that moved or rewrote them is refused instead of patched by guess.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """One insertion around one anchor; `before` and `after` are whole lines put above and below it."""

    name: str
    file: str
    anchor: str
    before: str = ""
    after: str = ""


HOOKS = (
    Hook(
        name="sources",
        file="nvidia-uvm/nvidia-uvm.Kbuild",
        anchor="include $(src)/nvidia-uvm/nvidia-uvm-sources.Kbuild\n",
        after="include $(src)/nvidia-uvm/uvm_ext/uvm_ext.Kbuild # vMem\n",
    ),
    Hook(
        name="ioctl",
        file="nvidia-uvm/uvm.c",
        anchor="    // Try the test ioctls if none of the above matched\n",
        before="    // vMem: its own block of ioctl numbers\n"
        "    if (uvm_vmem_is_ioctl(cmd))\n"
        "        return uvm_vmem_ioctl(filp, cmd, arg);\n"
        "\n",
    ),
    Hook(
        name="state",
        file="nvidia-uvm/uvm_va_space.h",
        anchor="struct uvm_va_space_struct\n{\n",
        before='#include "uvm_ext/uvm_vmem_hooks.h" // vMem\n\n',
        after="    // vMem: NULL until the file's first vMem ioctl\n    struct uvm_vmem_space *vmem;\n\n",
    ),
    Hook(
        name="unregister GPU",
        file="nvidia-uvm/uvm_va_space.c",
        anchor="    uvm_hmm_unregister_gpu(va_space, gpu, mm);\n",
        after="\n"
        "    // vMem: the GPU's mappings are gone, its pages may follow\n"
        "    uvm_vmem_unregister_gpu(va_space, gpu);\n",
    ),
    Hook(
        name="destroy",
        file="nvidia-uvm/uvm_va_space.c",
        anchor="    uvm_kvfree(va_space->mapping);\n",
        before="    uvm_vmem_destroy(va_space); // vMem\n",
    ),
    Hook(
        name="overlay",
        file="nvidia-uvm/uvm_va_range.h",
        anchor="} uvm_ext_gpu_map_t;\n",
        before="\n    // vMem: the overlay behind this mapping, and which mapping a part of one was cut from; "
        "zero in UVM's own\n"
        "    struct uvm_vmem_overlay *vmem;\n"
        "    NvU64 vmem_origin;\n",
    ),
    Hook(
        name="split",
        file="nvidia-uvm/uvm_map_external.c",
        anchor="    NvU64 new_start = new_end + 1;\n",
        after="\n"
        "    // vMem: an overlay is closed as a whole or not at all\n"
        "    if (uvm_vmem_is_overlay(existing_map))\n"
        "        return NV_ERR_INVALID_ADDRESS;\n",
    ),
    Hook(
        name="closed",
        file="nvidia-uvm/uvm_map_external.c",
        anchor="    if (deferred_free_list && ext_gpu_map->mem_handle) {\n",
        before="    uvm_vmem_closed(ext_gpu_map); // vMem\n\n",
    ),
)
