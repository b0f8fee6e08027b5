# vMem's kernel module on a simulated GPU, in a QEMU guest. Downloads and build results are kept in build/vm.
# SPDX-License-Identifier: MIT

VM := $(PYTHON) tests/vm/run.py
# driver releases for the test tiers; Debian also packages 535
VM_RELEASES ?= $(if $(VM_SOURCE),,550)
# driver source trees for other releases, such as NVIDIA's open-gpu-kernel-modules at a tag
VM_SOURCE ?=
# architectures of the simulated GPU: turing, ampere, ada, hopper, blackwell, gb20x, or all that the release knows
VM_ARCH ?= turing
# processors of the guest; 1 takes about half the processor time, but tests less concurrency
VM_CPUS ?= 2
VM_DRIVER = $(VM_RELEASES:%=--release %) $(VM_SOURCE:%=--source %) $(VM_ARCH:%=--arch %)
VM_TEST = $(VM) test $(VM_DRIVER) --cpus $(VM_CPUS)

.PHONY: test-vm test-vm-quick test-vm-arch test-vm-long test-vm-debug test-vm-python vm-shell mutants

test-vm: ## Test the kernel module on a simulated GPU: the short tier (VM_RELEASES="550 535" for both)
	$(Q)$(VM_TEST)

test-vm-quick: ## The quickest part of the short tier; part of `make test`
	$(Q)$(VM_TEST) $(foreach step,test_calls test_neighbour test_release test_errors test_atomic test_lifetime test_process,--only $(step)) || \
	    { [ $$? = 77 ] && echo "skip test-vm-quick: what it needs is not here"; }

test-vm-arch: VM_ARCH := all
test-vm-arch: ## The tests that depend on the architecture, on each that the driver knows
	$(Q)$(VM_TEST) --tier arch

test-vm-long: ## The short tier with 100,000 random operations and 100,000 calls with bad or changing input
	$(Q)$(VM_TEST) --tier long

test-vm-debug: ## The short tier in a kernel with KASAN, lockdep and kmemleak, and with UVM's asserts
	$(Q)$(VM_TEST) --tier debug

# runs the environment's interpreter, whose packages are copied into the guest
test-vm-python: venv ## Module loading, and libvmem's and pyvmem's tests, on the simulated GPU
	$(Q)$(PY) tests/vm/run.py python

vm-shell: venv ## Open a shell in the guest, with the module loaded and pyvmem ready
	$(Q)$(PY) tests/vm/run.py shell

mutants: ## Seeded faults in the module, each of which a named test must notice (6 minutes)
	$(Q)$(VM) mutants $(VM_DRIVER) --cpus $(VM_CPUS)
