# SPDX-License-Identifier: MIT OR GPL-2.0-only
# The kernel module's targets; docs/kernel-module.md explains them.
#   NVIDIA_SRC      NVIDIA's kernel-open tree; default: the installed driver's, or Debian's package
#   NVIDIA_RELEASE  driver release, or the beginning of its number (535, 550.163.01)
#   KERNEL          kernel to build for (newest: the newest with headers); default: the running one
#   UVM_BUILD_TYPE  release, develop (UVM's asserts log) or debug
#   KBUILD_EXTRA_SYMBOLS  Module.symvers of the nvidia.ko that the module will be loaded with
#   MODULE          the module for module-load; default: the one that `make module` builds
export NVIDIA_SRC NVIDIA_RELEASE KERNEL UVM_BUILD_TYPE KBUILD_EXTRA_SYMBOLS MODULE_BOOT
KERNEL_OPEN := $(patsubst %/,%,$(dir $(lastword $(MAKEFILE_LIST))))

# The releases that the tests build: those that Debian packages.
MODULE_RELEASES ?= 535 550

.PHONY: module module-check module-diff module-install module-uninstall module-load module-unload
.PHONY: test-module

module: module-tools ## Build nvidia-uvm.ko with vMem inside
	$(Q)$(PYTHON) $(KERNEL_OPEN)/build.py $(if $(V),--verbose)

module-check: module-tools ## Build under sparse; a warning in vMem's files is an error
	$(Q).ci/need sparse=sparse
	$(Q)$(PYTHON) $(KERNEL_OPEN)/build.py --check $(if $(V),--verbose)

test-module: $(MODULE_RELEASES:%=module-check-%) ## Build the module under sparse, for the releases that Debian packages

module-check-%: # skipped where the tools, the kernel's headers or the driver's source are not there and cannot be fetched
	$(Q).ci/need xz=xz-utils sparse=sparse && \
	    $(PYTHON) $(KERNEL_OPEN)/build.py --check --release $* --kernel $(or $(KERNEL),newest) $(if $(V),--verbose) || \
	    { [ $$? = 77 ] && echo "skip test-module $*: what it needs is not here"; }

module-diff: ## Show what is inserted into NVIDIA's files, as a diff, or why the hooks do not fit
	$(Q)$(PYTHON) $(KERNEL_OPEN)/build.py diff

module-install: module-tools ## Install the DKMS package nvidia-uvm-vmem; with MODULE_BOOT=1, modprobe loads it from now on
	$(Q).ci/need dkms=dkms modinfo=kmod
	$(Q)$(PYTHON) $(KERNEL_OPEN)/install.py install

module-uninstall: ## Remove the DKMS package
	$(Q)$(PYTHON) $(KERNEL_OPEN)/install.py remove

module-load: ## Load the patched module in place of the stock one
	$(Q)module="$(MODULE)"; [ -n "$$module" ] || module=$$($(PYTHON) $(KERNEL_OPEN)/build.py) && \
	    $(PYTHON) $(KERNEL_OPEN)/load.py load "$$module" $(MODULE_PARAMETERS)

module-unload: ## Load the stock module again
	$(Q)$(PYTHON) $(KERNEL_OPEN)/load.py unload

test-dkms: module-tools ## Test the DKMS package with the real dkms, in a Debian tree of each suite (root, 20 minutes)
	$(Q).ci/need debootstrap=debootstrap unshare=util-linux
	$(Q)$(PYTHON) tests/dkms/run.py $(DKMS_SUITES)

.PHONY: module-tools test-dkms
module-tools:
	$(Q).ci/need $(PYTHON)=python3 gcc=gcc make=make xz=xz-utils
