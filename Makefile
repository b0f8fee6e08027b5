# vMem. `make help` lists the targets; V=1 shows the commands.
# SPDX-License-Identifier: MIT

PYTHON ?= python3
CC     ?= cc
CFLAGS ?= -O2 -g
WARN   := -Wall -Wextra -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla \
          -Werror=implicit-function-declaration -Werror=incompatible-pointer-types -Werror=int-conversion \
          -Werror=return-type
CPPFLAGS += -D_GNU_SOURCE -Ilibvmem/include -Ilibvmem/src
PREFIX ?= /usr/local
DEST    = $(DESTDIR)$(PREFIX)
VERSION = $(shell sed -n 's/.*VMEM_VERSION_[A-Z]* \([0-9]*\)$$/\1/p' libvmem/include/vmem.h | paste -sd.)
VENV   := .venv
PY     := $(VENV)/bin/python
Q      := $(if $(V),,@)
export V

SOURCES := $(sort $(shell find libvmem/src -name '*.c'))
HEADERS := $(sort $(shell find libvmem -name '*.h') $(wildcard uvm_ext/*_ioctl.h uvm_ext/*_status.h))
OBJECTS := $(SOURCES:%.c=build/obj/%.o)
BINDING := setup.py pyproject.toml pyvmem/_ffi_build.py $(wildcard pyvmem/native/*)

.DEFAULT_GOAL := all
.PHONY: all help lib install venv bench lint format wheel clean
.PHONY: check test test-fast test-uvm-ext test-c mutants-c test-asan test-tsan test-python test-python-fake test-gpu
.PHONY: test-vllm

all: lib venv ## Build libvmem and install pyvmem into .venv (the default)

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

lib: build/libvmem.so build/libvmem.a ## Build build/libvmem.so and build/libvmem.a

PACKAGE := lib/pkgconfig/vmem.pc lib/cmake/vmem/vmem-config.cmake lib/cmake/vmem/vmem-config-version.cmake
install: lib ## Install headers, libraries, and what pkg-config and CMake need, under PREFIX (/usr/local); DESTDIR stages
	$(Q)install -d $(DEST)/include $(addprefix $(DEST)/,$(dir $(PACKAGE)))
	$(Q)install -m 644 libvmem/include/vmem.h libvmem/include/vmem_kv.h $(DEST)/include
	$(Q)install -m 644 build/libvmem.a $(DEST)/lib
	$(Q)install -m 755 build/libvmem.so $(DEST)/lib/libvmem.so.$(VERSION)
	$(Q)ln -sf libvmem.so.$(VERSION) $(DEST)/lib/libvmem.so.0
	$(Q)ln -sf libvmem.so.0 $(DEST)/lib/libvmem.so
	$(Q)for file in $(PACKAGE); do \
	    sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|' libvmem/package/$${file##*/}.in > $(DEST)/$$file || exit 1; done

venv: $(VENV)/.ready ## Build the Python extension and install pyvmem into .venv

check: lint test-uvm-ext test-fast ## Format, style, types, and the quick tests: before each commit; no root (1 minute)

test: check test-c test-asan test-python test-python-fake ## `check`, and every test that needs no GPU (15 minutes)
test: test-module test-vm-quick

# Of the C and the Python tests those that take a second or less, and start no further process.
FAST_C := abi_stock access busy commit context create host_memory kv_races kv_sharing kv_wait map ownership release \
          replace reserve struct unmap uvm_batch uvm_open
FAST_PYTHON := arguments errors glossary kv_blocks kv_prefix library map mutants owned without_torch
test-fast: lib venv ## The quick ones of the C and the Python tests, on host memory
	$(Q)$(MAKE) --no-print-directory -C tests/c check BACKENDS=host T="$(FAST_C:%=test_%)"
	$(Q)VMEM_TEST_BACKENDS=host $(PY) -m pytest -q $(FAST_PYTHON:%=tests/python/test_%.py)

test-uvm-ext: ## The kernel extension's parts that need no kernel, under the sanitizers, and its ABI
	$(Q)$(MAKE) --no-print-directory -C tests/uvm_ext check

test-c: lib ## C tests of libvmem, on host memory and over a fake GPU driver
	$(Q)$(MAKE) --no-print-directory -C tests/c check
	$(Q)$(MAKE) --no-print-directory -C tests/fakegpu check

test-asan: ## C tests under the address and undefined-behaviour sanitizers
	$(Q)$(MAKE) --no-print-directory -C tests/c check-asan

mutants-c: ## Seeded faults in libvmem: each must be noticed by a C test (4 minutes)
	$(Q)$(PYTHON) tests/c/mutants.py

test-tsan: ## C tests under the thread sanitizer
	$(Q)$(MAKE) --no-print-directory -C tests/c check-tsan

test-python: lib venv ## Python tests, on every backend that works here
	$(Q).ci/need cmake=cmake pkg-config=pkg-config c++=g++ || true # the tests that need them say so too
	$(Q)$(PY) -m pytest -q tests/python --ignore=tests/python/gpu

test-python-fake: venv ## Python tests on the stock and cuda backends, over a fake GPU driver in CPU memory
	$(Q)$(MAKE) --no-print-directory -C tests/fakegpu ../../build/fakegpu/libcuda.so.1
	$(Q)LD_LIBRARY_PATH=build/fakegpu LD_PRELOAD=$(CURDIR)/build/fakegpu/libcuda.so.1 VMEM_TEST_BACKENDS=stock,cuda \
	    $(PY) -m pytest -q tests/python/test_map.py tests/python/test_errors.py tests/python/test_model.py \
	        tests/python/test_owned.py tests/python/test_interrupt.py

test-gpu: all ## C and Python tests and the torch matrix, on the GPU's backends
	$(Q)$(MAKE) --no-print-directory -C tests/c check BACKENDS="cuda stock"
	$(Q)VMEM_TEST_BACKENDS=cuda,stock $(PY) -m pytest -q tests/python

test-vllm: venv ## vLLM's own answers against its answers on vMem, on a GPU (vLLM must be installed)
	$(Q)VMEM_TEST_VLLM=1 $(PY) -m pytest -q tests/python/gpu/test_vllm_answers.py \
	    tests/python/gpu/test_vllm_scheduler.py tests/python/gpu/test_vllm_serve.py

bench: venv ## Run every benchmark, quickly, on the best backend
	$(Q)$(VENV)/bin/pyvmem bench all --quick

lint: venv ## Compile with -Werror; clang-format, ruff and mypy --strict over the whole tree
	$(Q)$(CC) -fsyntax-only -std=gnu11 $(CPPFLAGS) $(WARN) -Werror $(SOURCES)
	$(Q)$(PY) .ci/lint.py --beside $(PYTHON)

format: venv ## Bring the C and the Python code into the form of .clang-format and pyproject.toml
	$(Q)$(PY) .ci/lint.py --beside $(PYTHON) --fix

wheel: | toolchain ## Build the source distribution and the manylinux wheel into build/dist, and try the wheel
	$(Q)$(PYTHON) .ci/make_wheel.py build/dist

clean: ## Remove everything that was built
	$(Q)rm -rf build $(VENV) *.egg-info pyvmem/*.so .hypothesis .ruff_cache
	$(Q)find pyvmem tests -name __pycache__ -prune -exec rm -rf {} +

include kernel-open/module.mk
include tests/vm/vm.mk

# ---- how ----------------------------------------------------------------------------------------------------

build/obj/%.o: %.c Makefile | toolchain
	@mkdir -p $(@D)
	$(Q)$(CC) -std=gnu11 -fPIC $(CPPFLAGS) $(CFLAGS) $(WARN) -MMD -MP -c $< -o $@

build/libvmem.a: $(OBJECTS)
	$(Q)rm -f $@ && $(AR) rcs $@ $(OBJECTS)

build/libvmem.so: $(OBJECTS) libvmem/libvmem.map
	$(Q)$(CC) -shared -Wl,-soname,libvmem.so.0 -Wl,--version-script=libvmem/libvmem.map -Wl,-z,defs \
	    $(OBJECTS) $(LDFLAGS) -lpthread -ldl -o $@
	$(Q)ln -sf $(@F) $@.0 # what a program linked with it asks for

$(VENV)/.ready: $(BINDING) $(SOURCES) $(HEADERS) .ci/make_venv.py | toolchain
	$(Q)$(PYTHON) .ci/make_venv.py $(VENV)
	@touch $@
	@echo "pyvmem is in $(VENV); what works on this machine: $(VENV)/bin/pyvmem doctor"

.PHONY: toolchain
toolchain:
	$(Q).ci/need cc=gcc $(PYTHON)=python3
	$(Q).ci/need $$($(PYTHON) .ci/make_venv.py --needs)

-include $(OBJECTS:.o=.d)
