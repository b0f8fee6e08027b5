# SPDX-License-Identifier: MIT OR GPL-2.0-only
# Builds nvidia-uvm.ko alone in a prepared tree, in this folder. DKMS runs it too.
#   KERNEL_UNAME          the kernel to build for
#   UVM_BUILD_TYPE        release, develop (asserts that log) or debug
#   KBUILD_EXTRA_SYMBOLS  Module.symvers of the nvidia.ko that the module will meet
ifneq ($(KERNELRELEASE),)
$(error run make without KERNELRELEASE in the environment)
endif

KERNEL_UNAME ?= $(shell uname -r)
MODLIB := /lib/modules/$(KERNEL_UNAME)
OUTPUT := $(realpath $(MODLIB)/build)
SOURCES := $(or $(realpath $(MODLIB)/source),$(OUTPUT))
ARCH ?= $(patsubst aarch64,arm64,$(patsubst ppc64le,powerpc,$(shell uname -m)))

# The compiler that built the kernel, where it is installed.
ifeq ($(origin CC),default)
BUILT_BY := $(shell sed -n 's/^CONFIG_CC_VERSION_TEXT="\([^ "]*\).*/\1/p' $(OUTPUT)/.config)
CC := $(or $(shell command -v $(BUILT_BY) 2>/dev/null),cc)
endif

# Without the exporter's Module.symvers the module would carry no symbol versions and no dependency on nvidia.ko. The
# stock nvidia-uvm.ko of this kernel knows them: the kernel then refuses to join the module to any other nvidia.ko.
KBUILD_EXTRA_SYMBOLS ?= $(shell sh ./stock-symvers.sh $(KERNEL_UNAME) stock.symvers && echo $(CURDIR)/stock.symvers)
ifeq ($(strip $(KBUILD_EXTRA_SYMBOLS)),)
UNRESOLVED := KBUILD_MODPOST_WARN=1
# kernel-open/tree.py looks for the first words in the output
$(warning no symbol versions: there is no stock nvidia-uvm.ko of this release for $(KERNEL_UNAME), so the kernel will not \
  notice if nvidia.ko differs from the one that this module was built for)
endif

# nvidia is listed for its share of the conftest list; the one target keeps it from being built.
nvidia-uvm.ko: FORCE
	+$(MAKE) -C $(SOURCES) $(if $(filter-out $(SOURCES),$(OUTPUT)),KBUILD_OUTPUT=$(OUTPUT)) M=$(CURDIR) ARCH=$(ARCH) \
	    CC="$(CC)" NV_KERNEL_SOURCES=$(SOURCES) NV_KERNEL_OUTPUT=$(OUTPUT) NV_KERNEL_MODULES="nvidia nvidia-uvm" \
	    NV_SPECTRE_V2=0 KBUILD_EXTRA_SYMBOLS="$(strip $(KBUILD_EXTRA_SYMBOLS))" $(UNRESOLVED) $@

clean:
	find . \( -name '*.o' -o -name '*.ko' -o -name '*.mod' -o -name '*.mod.c' -o -name '.*.cmd' \) -delete
	rm -rf conftest stock.symvers Module.symvers modules.order

FORCE:
.PHONY: FORCE clean
