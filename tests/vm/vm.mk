# vMem's kernel module on a simulated GPU, in a QEMU guest. What is fetched and built is kept in build/vm.
# SPDX-License-Identifier: MIT

VM := $(PYTHON) tests/vm/run.py
# driver releases that the test tiers run on; 535 is the other one that Debian has
VM_RELEASES ?= $(if $(VM_SOURCE),,550)
# trees of the driver's source for other releases, as NVIDIA's open-gpu-kernel-modules at a tag
VM_SOURCE ?=
# architectures of the simulated GPU: turing, ampere, ada, hopper, blackwell, gb20x, or all that the release knows
VM_ARCH ?= turing
# processors of the guest; 1 takes about half the time of a machine's, and leaves the tests of concurrency less to see
VM_CPUS ?= 2
# guests side by side, each with a part of a tier's steps
VM_JOBS ?= 1
VM_DRIVER = $(VM_RELEASES:%=--release %) $(VM_SOURCE:%=--source %) $(VM_ARCH:%=--arch %)
VM_TEST = $(VM) test $(VM_DRIVER) --cpus $(VM_CPUS) --jobs $(VM_JOBS)

.PHONY: test-vm test-vm-quick test-vm-arch test-vm-long test-vm-debug test-vm-python vm-shell mutants

test-vm: ## The kernel module on a simulated GPU: the short tier (VM_RELEASES="550 535" for both)
	$(Q)$(VM_TEST)

test-vm-quick: ## Of the short tier what needs the least time; part of `make test`
	$(Q)$(VM_TEST) $(foreach step,test_calls test_release test_errors test_atomic test_lifetime test_process,--only $(step))

test-vm-arch: VM_ARCH := all
test-vm-arch: ## What the architectures differ in, on each that the driver knows
	$(Q)$(VM_TEST) --tier arch

test-vm-long: ## The same with 100,000 random operations and a million bad calls
	$(Q)$(VM_TEST) --tier long

test-vm-debug: ## The same in a kernel with KASAN, lockdep and kmemleak, with the driver's asserts live
	$(Q)$(VM_TEST) --tier debug

# with the environment's interpreter, whose packages the guest gets
test-vm-python: venv ## Loading the module, libvmem's and pyvmem's suites and benchmarks, on the simulated GPU
	$(Q)$(PY) tests/vm/run.py python

vm-shell: venv ## A shell in the guest, with the module loaded and pyvmem ready
	$(Q)$(PY) tests/vm/run.py shell

mutants: ## Break the module in known ways, one at a time: each must be killed by a named test
	$(Q)$(VM) mutants $(VM_DRIVER) --cpus $(VM_CPUS)
