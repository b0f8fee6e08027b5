# SPDX-License-Identifier: MIT
"""Seeded faults in uvm_ext, each of which a named test must notice.

All of them are compiled into one module, each switched off until the parameter uvm_vmem_mutant names its number; so one
build serves all runs, and number 0 shows that the tests pass without a fault. A mutant whose function or tokens are
gone is an error: then it has to follow the source.
"""

import dataclasses
import re
import shutil

import kernel as kernels
import modules
from guest import Step
from kernel import CACHE, TOP, Missing, digest, say
from mutant_list import MUTANTS


def _selected(number, fault, old, new):
    """C text that is `new` when the mutant is on and `old` otherwise."""
    if fault.operator == "drop" or fault.old.endswith((";", "}")):  # statements
        return f"if (uvm_vmem_mutant == {number}) {{ {new} }} else {{ {old} }}"
    return f"(uvm_vmem_mutant == {number} ? ({new}) : ({old}))"


def apply(sources):
    """{file: text} with every mutant in it."""
    places = {}  # {file: [(start, end, number, fault, new)]}
    for number, mutant in enumerate(MUTANTS, 1):
        try:
            for file, start, end, fault, new in mutant.places():
                places.setdefault(file, []).append((start, end, number, fault, new))
        except LookupError as error:
            raise Missing(str(error)) from None
    out = dict(sources)
    for file, found in places.items():
        text, before = sources[file], len(sources[file])
        for start, end, number, fault, new in sorted(found, key=lambda place: place[:2], reverse=True):
            if end > before:
                raise Missing(f"mutant {MUTANTS[number - 1].name}: another mutant has its place in {file}")
            text = text[:start] + _selected(number, fault, text[start:end], new) + text[end:]
            before = start
        out[file] = text
    for file, text in out.items():
        if text != sources[file]:
            # behind the last include of the head of the file
            last = [m.end() for m in re.finditer(r'^#include [<"].*\n', text, re.M)][-1]
            out[file] = text[:last] + "extern unsigned int uvm_vmem_mutant;\n" + text[last:]
    head = out["uvm_vmem_dispatch.c"]
    last = [m.end() for m in re.finditer(r'^#include [<"].*\n', head, re.M)][-1]
    out["uvm_vmem_dispatch.c"] = (head[:last] + "#include <linux/module.h>\nunsigned int uvm_vmem_mutant;\n"
                                  "module_param(uvm_vmem_mutant, uint, 0644);\n" + head[last:])  # fmt: skip
    return out


def build(src, release, kernel, sim):
    """The module with all mutants in it. Only our files differ from the patched module's, so its objects are reused."""
    patched = modules.uvm(src, release, "patched", kernel, sim)
    sources = {p.name: p.read_text() for p in sorted((TOP / "uvm_ext").glob("*.[ch]"))}
    changed = {name: text for name, text in apply(sources).items() if text != sources[name]}

    def compile_in(folder):
        say(f"building nvidia-uvm.ko {release} with {len(MUTANTS)} mutants")
        tree = modules.uvm_tree(src, release, "patched", kernel)
        ours = tree / "nvidia-uvm" / "uvm_ext"
        try:
            for name, text in changed.items():
                (ours / name).write_text(text)
            shutil.copyfile(modules.rebuild(tree, kernel, sim), folder / "nvidia-uvm.ko")
        finally:
            for name in changed:
                (ours / name).write_text(sources[name])
                (ours / name).with_suffix(".o").unlink(missing_ok=True)

    return modules.made(f"mutants-{release}", digest(patched, *changed.values()), compile_in) / "nvidia-uvm.ko"


def plan(number, mutant, arch):
    program, cases = mutant.test.split()[0], mutant.test.split()[1:]
    gpu = f"arch={arch} {mutant.gpu}".strip()
    return [
        Step(f"load {number}", f"load_gpu {gpu} && load_uvm mutants uvm_vmem_mutant={number} && insmod /mod/failmem.ko",
             60, quiet=True),
        Step(mutant.test, f"OPS=800 SECONDS_EACH=3 KILLS=3 CASE_TIMEOUT=200 /tests/{program} {' '.join(cases)}", 250),
        Step(f"unload {number}", "unload_all", 60, quiet=True),
    ]  # fmt: skip


def why(results, guest):
    """The first thing that was noticed, without the time stamp."""
    for result in results:
        if result.failed:
            return result.failed[0]
        if result.complaints:
            return re.sub(r"^\[[^]]*\] *", "", result.complaints[0])
        if result.rc is None:
            return guest.why or "the guest died"
        if result.rc:
            return f"{result.step.name}: exit status {result.rc}"
    return ""


def verdicts(args, kernel, files, todo, boot, arch):
    """Yield (number, mutant, what was noticed). One guest serves many; one that misbehaved gives way to a fresh one."""
    todo = list(todo)
    while todo:
        steps = [step for number, mutant in todo for step in plan(number, mutant, arch)]

        def spoilt(result):
            # the kernel complained, or the module cannot be unloaded: what follows would be no clean run
            return bool(result.complaints) or (result.rc != 0 and "load" in result.step.name)

        _, guest = boot(args, kernel, files, steps, label="mutants", quiet=True, stop_after=spoilt)
        before = len(todo)
        for at in range(0, len(guest.results), 3):
            load, test, unload = guest.results[at : at + 3]
            if load.rc != 0:
                break
            number, mutant = todo.pop(0)
            yield number, mutant, why([test, unload], guest)
        if len(todo) == before:
            log = CACHE / "logs" / "mutants.log"
            raise Missing(f"the guest could not load mutant {todo[0][0]}: {guest.why}; log: {log}")


def main(args, boot, gather, src, release, arch):
    kernel = kernels.debian()
    files, release = gather(release, kernel, variants=("patched",), source=src)
    with modules.build_lock():
        sim = modules.simgpu(src, release, kernel)
        files["mod/mutants/nvidia-uvm.ko"] = build(src, release, kernel, sim)
    chosen = [(n, m) for n, m in enumerate(MUTANTS, 1) if not args.lines or any(text in m.name for text in args.lines)]
    print(f"{len(chosen)} mutants of vMem on the simulated GPU ({arch}), driver {release}", flush=True)

    # without a fault every test that is to kill one must pass
    tests = sorted({(m.test, m.gpu) for _, m in chosen})
    clean = [(0, dataclasses.replace(MUTANTS[0], name="none", test=test, gpu=gpu)) for test, gpu in tests]
    bad = 0
    for _, mutant, noticed in verdicts(args, kernel, files, clean, boot, arch):
        if noticed:
            print(f"  FAIL without any mutant: {mutant.test}: {noticed}", flush=True)
            bad += 1
    rows = []
    for number, mutant, noticed in verdicts(args, kernel, files, chosen, boot, arch):
        rows.append((number, mutant, noticed))
        verdict = "killed  " if noticed else "SURVIVED"
        print(f"  {verdict} {number:2} {mutant.name:<26} {mutant.test:<56} {noticed[:120]}", flush=True)
    survived = [m.name for _, m, noticed in rows if not noticed]
    named = f"; survived: {', '.join(survived)}" if survived else ""
    print(f"{len(rows) - len(survived)} of {len(rows)} killed{named}")
    return 1 if survived or bad else 0
