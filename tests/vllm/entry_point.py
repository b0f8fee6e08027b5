"""Makes vLLM find pyvmem's plugin where pyvmem is on the path but not installed."""

import importlib.metadata
from pathlib import Path

NAME, VALUE = "vllm.platform_plugins", "pyvmem.vllm.plugin:platform"


def write(folder: Path) -> Path:
    """Write the entry point's metadata into a folder for PYTHONPATH."""
    made = Path(folder) / "pyvmem-0.dist-info"
    made.mkdir(parents=True, exist_ok=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: pyvmem\nVersion: 0\n")
    more = "[vllm.general_plugins]\nvmem = pyvmem.vllm.plugin:check_platform\n"
    (made / "entry_points.txt").write_text(f"[{NAME}]\nvmem = {VALUE}\n{more}")
    return Path(folder)


def needed() -> bool:
    """True if pyvmem is not installed with its entry point."""
    return not any(p.value == VALUE for p in importlib.metadata.entry_points(group=NAME))
