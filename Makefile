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
.PHONY: check test test-fast test-uvm-ext test-c mutants-c fuzz-kv fuzz-kv-gpu test-asan test-tsan test-python test-python-fake test-gpu
.PHONY: test-gpu-c test-gpu-python test-transformers-releases
.PHONY: test-vllm test-vllm-alone test-vllm-together

all: lib venv ## Build libvmem, and install pyvmem into .venv (the default)

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

lib: build/libvmem.so build/libvmem.a ## Build build/libvmem.so and build/libvmem.a

PACKAGE := lib/pkgconfig/vmem.pc lib/cmake/vmem/vmem-config.cmake lib/cmake/vmem/vmem-config-version.cmake
install: lib ## Install headers, libraries, pkg-config and CMake files under PREFIX (/usr/local); DESTDIR stages
	$(Q)install -d "$(DEST)/include" $(patsubst %,"$(DEST)/%",$(dir $(PACKAGE)))
	$(Q)install -m 644 libvmem/include/vmem.h libvmem/include/vmem_kv.h "$(DEST)/include"
	$(Q)install -m 644 build/libvmem.a "$(DEST)/lib"
	$(Q)install -m 755 build/libvmem.so "$(DEST)/lib/libvmem.so.$(VERSION)"
	$(Q)ln -sf libvmem.so.$(VERSION) "$(DEST)/lib/libvmem.so.0"
	$(Q)ln -sf libvmem.so.0 "$(DEST)/lib/libvmem.so"
	$(Q)for file in $(PACKAGE); do \
	    sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|' libvmem/package/$${file##*/}.in > "$(DEST)/$$file" || exit 1; done

venv: $(VENV)/.ready ## Build the Python extension and install pyvmem into .venv

check: lint test-uvm-ext test-fast ## Format, style, types and the quick tests, for use before each commit; no root (1 minute)

test: check test-c test-asan test-python test-python-fake ## `check`, and every test that needs no GPU (17 minutes)
test: test-module test-vm-quick

# C and Python tests that take a second or less and start no further process.
FAST_C := abi_stock access busy commit context create host_memory kv_races kv_sharing kv_wait map ownership release \
          replace reserve struct unmap uvm_batch uvm_open
FAST_PYTHON := arguments errors glossary kv_blocks kv_prefix library map mutants owned without_torch
test-fast: lib venv ## The quick C and Python tests, on host memory
	$(Q)$(MAKE) --no-print-directory -C tests/c check BACKENDS=host T="$(FAST_C:%=test_%)"
	$(Q)VMEM_TEST_BACKENDS=host $(PY) -m pytest -q $(FAST_PYTHON:%=tests/python/test_%.py)

test-uvm-ext: ## The kernel extension's ABI, and its parts that need no kernel, under the sanitizers
	$(Q)$(MAKE) --no-print-directory -C tests/uvm_ext check

test-c: lib ## C tests of libvmem, on host memory and over a fake GPU driver; T=test_map, BACKENDS=stock: one, on one backend
	$(Q)$(MAKE) --no-print-directory -C tests/c check
	$(if $(T)$(BACKENDS),,$(Q)$(MAKE) --no-print-directory -C tests/fakegpu check)

test-asan: ## C tests under the address and undefined-behaviour sanitizers
	$(Q)$(MAKE) --no-print-directory -C tests/c check-asan

mutants-c: ## Seeded faults in libvmem, each of which a C test must notice (4 minutes)
	$(Q)$(PYTHON) tests/c/mutants.py

fuzz-kv: lib ## The KV cache beside kernels that lag behind by 1 to 3 steps: 100,000 iterations of each (6 minutes)
	$(Q)$(MAKE) --no-print-directory -C tests/fakegpu fuzz-kv

fuzz-kv-gpu: ## The same on a GPU, with nvcc and two steps in flight; GPU_BACKEND=stock or cuda (1 to 6 minutes)
	$(Q)$(MAKE) --no-print-directory -C tests/c fuzz-kv-gpu

test-tsan: ## C tests under the thread sanitizer
	$(Q)$(MAKE) --no-print-directory -C tests/c check-tsan

test-python: lib venv ## Python tests, on every backend that works on this machine
	$(Q).ci/need cmake=cmake pkg-config=pkg-config c++=g++ || true # tests that need them are skipped without them
	$(Q)$(PY) -m pytest -q tests/python --ignore=tests/python/gpu

TRANSFORMERS_RELEASES = 5.17.0 5.18.0 5.19.0 5.20.2 5.21.1 5.22.2 5.23.0
test-transformers-releases: venv ## The cache of generate() with every supported release of transformers (12 minutes)
	$(Q)for release in $(TRANSFORMERS_RELEASES); do \
	    folder=build/transformers/$$release; echo "transformers $$release"; \
	    [ -d $$folder ] || $(PY) -m pip install -q --no-deps --target $$folder transformers==$$release || exit 1; \
	    VMEM_TRANSFORMERS_FORCE=1 PYTHONPATH=$$folder $(PY) -m pytest -q -n 2 tests/python/test_transformers*.py || exit 1; \
	done

test-python-fake: venv ## Python tests on the stock and cuda backends, over a fake GPU driver in CPU memory
	$(Q)$(MAKE) --no-print-directory -C tests/fakegpu ../../build/fakegpu/libcuda.so.1
	$(Q)LD_LIBRARY_PATH=build/fakegpu LD_PRELOAD=$(CURDIR)/build/fakegpu/libcuda.so.1 VMEM_TEST_BACKENDS=stock,cuda \
	    $(PY) -m pytest -q tests/python/test_map.py tests/python/test_errors.py tests/python/test_model.py \
	        tests/python/test_owned.py tests/python/test_interrupt.py

test-gpu: test-gpu-c test-gpu-python ## C and Python tests and the torch matrix, on the GPU's backends; JOBS=6 at once

JOBS ?= 6
test-gpu-c: lib # two programs make fewer steps than on the host, where a step takes no system call
	$(Q)JOBS=$(JOBS) VMEM_TEST_OPERATIONS=$${VMEM_TEST_OPERATIONS:-100} VMEM_TEST_STEPS=$${VMEM_TEST_STEPS:-12000} $(MAKE) --no-print-directory -C tests/c check BACKENDS="cuda stock"

test-gpu-python: venv
	$(Q)OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} VMEM_TEST_BACKENDS=cuda,stock $(PY) -m pytest -q -n $(JOBS) --maxschedchunk 1 tests/python

test-vllm: test-vllm-alone test-vllm-together ## Compare vLLM on vMem with unmodified vLLM, on a GPU (needs vLLM); JOBS=6 pairs of engines at once

VLLM_TESTS = VMEM_TEST_VLLM=1 VMEM_TEST_VLLM_PROCESSES=$(JOBS) $(PY) -m pytest -q --dist loadfile
test-vllm-alone: venv # the second needs no GPU
	$(Q)$(VLLM_TESTS) -n 2 $(addprefix tests/python/gpu/test_vllm_,sleep.py scheduler.py)

test-vllm-together: venv
	$(Q)$(VLLM_TESTS) -n 3 $(addprefix tests/python/gpu/test_vllm_,answers.py serve.py load.py)

bench: venv ## Run every benchmark quickly, on the best backend
	$(Q)$(VENV)/bin/pyvmem bench all --quick

lint: venv ## Compile with -Werror; clang-format, ruff and mypy --strict over the whole tree
	$(Q)$(CC) -fsyntax-only -std=gnu11 $(CPPFLAGS) $(WARN) -Werror $(SOURCES)
	$(Q)$(PY) .ci/lint.py --beside $(PYTHON)

format: venv ## Format the C and Python code (.clang-format, pyproject.toml)
	$(Q)$(PY) .ci/lint.py --beside $(PYTHON) --fix

wheel: | toolchain ## Build and test the manylinux wheel and the source distribution, in build/dist
	$(Q)$(PYTHON) .ci/make_wheel.py build/dist

clean: ## Remove all build results
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
	$(Q)ln -sf $(@F) $@.0 # the name that linked programs load

$(VENV)/.ready: $(BINDING) $(SOURCES) $(HEADERS) .ci/make_venv.py | toolchain
	$(Q)$(PYTHON) .ci/make_venv.py $(VENV)
	@touch $@
	@echo "pyvmem is installed in $(VENV). $(VENV)/bin/pyvmem doctor shows which backends work."

.PHONY: toolchain
toolchain:
	$(Q).ci/need cc=gcc $(PYTHON)=python3
	$(Q).ci/need $$($(PYTHON) .ci/make_venv.py --needs)

-include $(OBJECTS:.o=.d)
