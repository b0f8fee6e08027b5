"""Compares libvmem/src/driver/abi.h and its table with every release of NVIDIA's open kernel modules.

Takes a git checkout (or bare repository) of the driver's source with its release tags, reads the definitions that the
stock backend restates, compiles them as they are in each tag, and compares sizes, offsets and numbers.

    python3 tests/abi/compare_releases.py --repo PATH [TAG ...]

SPDX-License-Identifier: MIT
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]

NVOS = "src/common/sdk/nvidia/inc/nvos.h"
DEVICE = "src/common/sdk/nvidia/inc/class/cl0080.h"
GPU = "src/common/sdk/nvidia/inc/ctrl/ctrl0000/ctrl0000gpu.h"
FB = "src/common/sdk/nvidia/inc/ctrl/ctrl0080/ctrl0080fb.h"
LIMITS = "src/common/sdk/nvidia/inc/nvlimits.h"
UVM = "kernel-open/nvidia-uvm/uvm_ioctl.h"
UVM_TYPES = "kernel-open/nvidia-uvm/uvm_types.h"
UVM_TYPES_OLD = "kernel-open/common/inc/uvm_types.h"
FILES = (NVOS, DEVICE, GPU, FB, LIMITS, UVM, UVM_TYPES, UVM_TYPES_OLD)

# Their struct, ours, and their fields beside ours. A field that a release lacks is left to the table.
STRUCTS = [
    (
        "NVOS21_PARAMETERS",
        "rm_alloc",
        "hRoot client hObjectParent parent hObjectNew object hClass class_id pAllocParms params paramsSize params_size",
    ),
    ("NVOS00_PARAMETERS", "rm_free", "hRoot client hObjectParent parent hObjectOld object status status"),
    (
        "NVOS54_PARAMETERS",
        "rm_control",
        "hClient client hObject object cmd command flags flags params params paramsSize params_size status status",
    ),
    (
        "NV0080_ALLOC_PARAMETERS",
        "rm_device",
        "deviceId device hClientShare client_share flags flags vaSpaceSize va_size vaMode va_mode",
    ),
    (
        "NV0000_CTRL_GPU_GET_UUID_INFO_PARAMS",
        "rm_uuid_info",
        "gpuUuid uuid flags flags gpuId gpu_id deviceInstance device subdeviceInstance subdevice",
    ),
    (
        "NV_MEMORY_ALLOCATION_PARAMS",
        "rm_memory",
        "owner owner type type flags flags attr attr attr2 attr2 size size "
        "alignment alignment offset offset limit limit hVASpace va_space "
        "internalflags internal_flags tag tag numaNode numa_node",
    ),
    (
        "UvmGpuMappingAttributes",
        "uvm_attributes",
        "gpuUuid uuid gpuMappingType mapping gpuCachingType caching "
        "gpuFormatType format gpuElementBits element_bits "
        "gpuCompressionType compression",
    ),
    ("UVM_MAP_EXTERNAL_SPARSE_PARAMS", "uvm_unmap", "base base length length gpuUuid uuid rmStatus status"),
    ("UVM_UNMAP_EXTERNAL_PARAMS", "uvm_unmap", "base base length length gpuUuid uuid rmStatus status"),
]
# Sizes of these depend on the release: the table has them.
VARYING = {"NV_MEMORY_ALLOCATION_PARAMS"}
NUMBERS = [
    ("NV0000_CTRL_CMD_GPU_GET_UUID_INFO", "RM_CONTROL_UUID_INFO"),
    ("NV0080_CTRL_CMD_FB_GET_CAPS_V2", "RM_CONTROL_FB_CAPS"),
    ("NV0080_CTRL_FB_CAPS_TBL_SIZE", "RM_FB_CAPS_BYTES"),
    ("NVOS32_ALLOC_FLAGS_IGNORE_BANK_PLACEMENT", "RM_MEMORY_IGNORE_BANK_PLACEMENT"),
    ("NVOS32_ALLOC_FLAGS_ALIGNMENT_FORCE", "RM_MEMORY_ALIGNMENT_FORCE"),
    ("NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED", "RM_MEMORY_HANDLE_PROVIDED"),
    ("NVOS32_ALLOC_FLAGS_MAP_NOT_REQUIRED", "RM_MEMORY_MAP_NOT_REQUIRED"),
    ("NVOS32_ALLOC_FLAGS_PERSISTENT_VIDMEM", "RM_MEMORY_PERSISTENT"),
    ("(NVOS32_ATTR_PAGE_SIZE_HUGE << 23)", "RM_ATTR_PAGE_SIZE_HUGE"),
    ("(NVOS32_ATTR_PHYSICALITY_ALLOW_NONCONTIGUOUS << 27)", "RM_ATTR_ALLOW_NONCONTIGUOUS"),
    ("(NVOS32_ATTR2_PAGE_SIZE_HUGE_2MB << 20)", "RM_ATTR2_HUGE_2M"),
    ("UVM_MAP_EXTERNAL_ALLOCATION", "UVM_MAP_EXTERNAL_ALLOCATION"),
    ("UVM_UNMAP_EXTERNAL", "UVM_UNMAP_EXTERNAL"),
    ("UVM_MAP_EXTERNAL_SPARSE", "UVM_MAP_EXTERNAL_SPARSE"),
]
MACROS = [
    "NV_MAX_DEVICES",
    "NV_MAX_SUBDEVICES",
    "UVM_PARENT_ID_MAX_SUB_PROCESSORS",
    "UVM_MAX_GPUS_V1",
    "UVM_MAX_GPUS_V2",
    "UVM_MAX_GPUS",
    "NV0000_GPU_MAX_GID_LENGTH",
]
PREAMBLE = """
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
typedef uint8_t NvU8, NvBool; typedef uint16_t NvU16; typedef uint32_t NvU32, NvHandle, NvV32, NV_STATUS;
typedef uint64_t NvU64, NvP64, NvLength; typedef int32_t NvS32;
typedef NvU32 UvmGpuMappingType, UvmGpuCachingType, UvmGpuFormatType, UvmGpuFormatElementBits, UvmGpuCompressionType;
typedef struct { NvU8 uuid[16]; } NvProcessorUuid;
#define NV_ALIGN_BYTES(x) __attribute__((aligned(x)))
#define NV_DECLARE_ALIGNED(type, x) type __attribute__((aligned(x)))
#define UVM_IOCTL_BASE(i) i
"""


def find_struct(text, name):
    for match in re.finditer(r"typedef struct(?:\s+\w+)?\s*\{(?:[^{}]|\{[^{}]*\})*\}\s*(\w+)\s*;", text):
        if match.group(1) == name:
            return re.sub(r"//.*", "", match.group(0))
    raise SystemExit(f"no struct {name}")


def find_macro(text, name):
    match = re.search(rf"^#define\s+{name}\s+(\S.*?)\s*(?:/[/*].*)?$", text, re.M)
    return f"#define {name} {match.group(1)}\n" if match else ""


def run(directory, name, source, *options):
    """Compiles and runs a program; its output is lines of a key and a number."""
    (directory / f"{name}.c").write_text(source)
    program = directory / name
    subprocess.run(["cc", "-w", "-std=gnu11", "-o", program, directory / f"{name}.c", *options], check=True)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    return {key: int(value) for key, value in (line.split("=") for line in lines)}


def show(key, expression):
    return f'printf("%s=%llu\\n", "{key}", (unsigned long long)({expression}));\n'


def theirs(directory, read):
    """The declarations of one release's headers."""
    text = "\n".join(read(path) for path in FILES)
    source, body = PREAMBLE, ""
    for name in MACROS + sorted({re.search(r"[A-Z]\w+", n).group(0) for n, _ in NUMBERS}):
        source += find_macro(text, name)
    for name, ours, fields in STRUCTS + [("UVM_MAP_EXTERNAL_ALLOCATION_PARAMS", "uvm_map", "")]:
        struct = find_struct(text, name)
        source += struct + "\n"
        pairs = fields.split()
        for field, our_field in zip(pairs[::2], pairs[1::2]):
            if re.search(rf"\b{field}\b", struct):
                body += show(f"{ours}.{our_field}", f"offsetof({name}, {field})")
        if name not in VARYING:
            body += show(f"sizeof {ours}", f"sizeof({name})")
    for name, ours in NUMBERS:
        body += show(ours, name)
    body += show("table: alloc_status", "offsetof(NVOS21_PARAMETERS, status)")
    body += show("table: memory_size", "sizeof(NV_MEMORY_ALLOCATION_PARAMS)")
    body += show("table: tail", "offsetof(UVM_MAP_EXTERNAL_ALLOCATION_PARAMS, gpuAttributesCount)")
    for field in ("rmCtrlFd", "hClient", "hMemory", "rmStatus"):
        body += show(
            f"tail.{field}",
            f"offsetof(UVM_MAP_EXTERNAL_ALLOCATION_PARAMS, {field}) - "
            "offsetof(UVM_MAP_EXTERNAL_ALLOCATION_PARAMS, gpuAttributesCount)",
        )
    return run(directory, "theirs", f"{source}int main(void) {{ {body} return 0; }}\n")


def ours(directory, tag):
    """The same, as libvmem assumes it for that release."""
    source = """
#include <stdarg.h>
#include <stdio.h>
#include "driver/abi.h"
int vmem__error(int err, const char *fmt, ...) { (void)fmt; return err; }
"""
    body = f'const struct vmem__abi *abi; struct uvm_map map; if (vmem__abi_find("{tag}", 0, &abi)) return 1;\n'
    for _, name, fields in STRUCTS:
        for field in fields.split()[1::2]:
            body += show(f"{name}.{field}", f"offsetof(struct {name}, {field})")
        body += show(f"sizeof {name}", f"sizeof(struct {name})")
    for _, name in NUMBERS:
        body += show(name, name)
    body += show("table: alloc_status", "abi->alloc_status") + show("table: memory_size", "abi->memory_size")
    body += show("table: tail", "(char *)vmem__abi_map_tail(abi, &map) - (char *)&map")
    body += show("sizeof uvm_map", "(char *)(vmem__abi_map_tail(abi, &map) + 1) - (char *)&map")
    for field, name in (
        ("rmCtrlFd", "rm_control_fd"),
        ("hClient", "client"),
        ("hMemory", "memory"),
        ("rmStatus", "status"),
    ):
        body += show(f"tail.{field}", f"offsetof(struct uvm_map_tail, {name})")
    return run(
        directory,
        "ours",
        f"{source}int main(void) {{ {body} return 0; }}\n",
        f"-I{TOP / 'libvmem/src'}",
        f"-I{TOP / 'libvmem/include'}",
        TOP / "libvmem/src/driver/abi.c",
    )


def main():
    parser = argparse.ArgumentParser(description="compare the stock backend's ABI with releases of the driver's source")
    parser.add_argument("--repo", required=True, help="git repository with the driver's release tags")
    parser.add_argument("tags", nargs="*", help="releases; default: every tag that looks like one")
    args = parser.parse_args()

    def git(*command):
        return subprocess.run(["git", "-C", args.repo, *command], capture_output=True, text=True, errors="replace")

    tags = args.tags or [t for t in git("tag").stdout.split() if re.fullmatch(r"\d+(\.\d+)+", t)]
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        for tag in tags:
            want = theirs(Path(name), lambda path, tag=tag: git("show", f"{tag}:{path}").stdout)
            have = ours(Path(name), tag)
            wrong = [f"{k}: driver {value}, ours {have.get(k)}" for k, value in want.items() if have.get(k) != value]
            bad += bool(wrong)
            for line in wrong:
                print(f"{tag}: {line}")
    print(f"{len(tags)} releases compared, {bad} differ")
    return bad != 0


if __name__ == "__main__":
    sys.exit(main())
