"""The manual, by Sphinx: `make docs` builds it, with warnings as errors.

SPDX-License-Identifier: MIT
"""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))
sys.path.insert(0, str(HERE.parent))

header = (HERE.parent / "libvmem/include/vmem.h").read_text()
project = "vMem"
author = "the vMem developers"
copyright = author
release = ".".join(re.search(rf"VMEM_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc", "vmem_reference"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "_ext"]
html_theme = "furo"
html_title = f"vMem {release}"
html_static_path = ["_static"]
html_css_files = ["vmem.css"]

# Names in backticks of docstrings become links where there is something to lead to.
default_role = "autolink"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["vllm", "sglang", "triton", "flash_attn", "flash_attn_interface"]
autodoc_typehints = "none"  # they stand in the signatures
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
# Every public function says its parameters and what it returns. Excluded: records, which list attributes; objects that
# another call makes; errors; what a kernel implements; transformers' constructor, whose signature is another's.
numpydoc_validation_checks = {"PR01", "PR02", "RT01", "YD01"}
numpydoc_validation_exclude = {
    r"\.(Info|PageInfo|Stats|Spare|KVCacheOptions|TensorSpec|Shortage|Run|Choice|Shape|Cache)$",
    r"\.(Reservation|Pages|VirtualTensor|VMemCache)$",
    r"\.(VmemError|InvalidArgument|OutOfMemory)$",
    r"\.Kernel\.",
}
autosummary_generate = False

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = [
    "myst.xref_missing",  # links to files of the repository are checked by tests/python/test_readme.py
    "config.cache",
]

man_pages = [
    ("reference/cli", "pyvmem", "GPU memory on demand, at addresses that never change", author, 1),
    ("kernel-module", "vmem-module", "the patched nvidia-uvm.ko: build, install, load", author, 8),
]
