# vMem. `make help` lists the targets; V=1 shows the commands.
# SPDX-License-Identifier: MIT

PYTHON ?= python3
CC     ?= cc
CFLAGS ?= -O2 -g
WARN   := -Wall -Wextra -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla \
          -Werror=implicit-function-declaration -Werror=incompatible-pointer-types -Werror=int-conversion \
          -Werror=return-type
CPPFLAGS += -D_GNU_SOURCE -Ilibvmem/include -Ilibvmem/src
PREFIX     ?= /usr/local
LIBDIR     ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
DOCDIR     ?= $(PREFIX)/share/doc/vmem
MANDIR     ?= $(PREFIX)/share/man
VERSION := $(shell sed -n 's/.*VMEM_VERSION_[A-Z]* \([0-9]*\)$$/\1/p' libvmem/include/vmem.h | paste -sd.)
# Releases with the same name of the shared library replace one another: until 1.0 those of a minor version.
ABI     := $(if $(filter 0.%,$(VERSION)),$(basename $(VERSION)),$(firstword $(subst ., ,$(VERSION))))
VENV   := .venv
PY     := $(VENV)/bin/python
Q      := $(if $(V),,@)
export V

SOURCES := $(sort $(shell find libvmem/src -name '*.c'))
HEADERS := $(sort $(shell find libvmem -name '*.h') $(wildcard uvm_ext/*_ioctl.h uvm_ext/*_status.h))
OBJECTS := $(SOURCES:%.c=build/obj/%.o)
BINDING := setup.py pyproject.toml pyvmem/_ffi_build.py $(wildcard pyvmem/native/*)

.DEFAULT_GOAL := all
.PHONY: all help lib install uninstall venv bench lint format docs notebook wheel deb clean
.PHONY: check test test-fast test-uvm-ext test-c mutants-c fuzz-kv fuzz-kv-gpu test-asan test-tsan test-python test-python-fake
.PHONY: figures test-triton test-shaken test-cross test-gpu test-gpu-c test-gpu-python test-transformers-releases
.PHONY: test-vllm-cpu test-vllm-quick check-vllm-releases
.PHONY: test-sglang-cpu test-sglang-quick check-sglang-releases

all: lib venv ## Build libvmem, and install pyvmem into .venv (the default)

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 28

lib: build/libvmem.so build/libvmem.a ## Build build/libvmem.so and build/libvmem.a

PACKAGE = $(LIBDIR)/pkgconfig/vmem.pc $(LIBDIR)/cmake/vmem/vmem-config.cmake $(LIBDIR)/cmake/vmem/vmem-config-version.cmake
PUBLIC := $(wildcard libvmem/include/*.h)
INSTALLED = $(PUBLIC:libvmem/include/%=$(INCLUDEDIR)/%) $(LIBDIR)/libvmem.a $(LIBDIR)/libvmem.so \
            $(LIBDIR)/libvmem.so.$(ABI) $(LIBDIR)/libvmem.so.$(VERSION) $(PACKAGE) $(DOCDIR)/LICENSE $(DOCDIR)/CHANGELOG.md
MAN := $(wildcard build/docs/man/*.[18]) # of `make docs`
MAN_INSTALLED = $(foreach page,$(notdir $(MAN)),$(MANDIR)/man$(subst .,,$(suffix $(page)))/$(page))
install: lib ## Install headers, libraries, pkg-config and CMake files (man pages after `make docs`) under PREFIX, LIBDIR; DESTDIR stages
	$(Q)install -d $(foreach file,$(INSTALLED) $(MAN_INSTALLED),"$(DESTDIR)$(dir $(file))")
	$(Q)install -m 644 $(PUBLIC) "$(DESTDIR)$(INCLUDEDIR)"
	$(Q)install -m 644 build/libvmem.a "$(DESTDIR)$(LIBDIR)"
	$(Q)install -m 755 build/libvmem.so "$(DESTDIR)$(LIBDIR)/libvmem.so.$(VERSION)"
	$(Q)ln -sf libvmem.so.$(VERSION) "$(DESTDIR)$(LIBDIR)/libvmem.so.$(ABI)"
	$(Q)ln -sf libvmem.so.$(ABI) "$(DESTDIR)$(LIBDIR)/libvmem.so"
	$(Q)install -m 644 LICENSE CHANGELOG.md "$(DESTDIR)$(DOCDIR)"
	$(Q)for page in $(MAN); do install -m 644 $$page "$(DESTDIR)$(MANDIR)/man$${page##*.}" || exit 1; done
	$(Q)from=$$(realpath -sm --relative-to="$(LIBDIR)/cmake/vmem" "$(PREFIX)") && \
	library=$$(realpath -sm --relative-to="$(PREFIX)" "$(LIBDIR)") && \
	include=$$(realpath -sm --relative-to="$(PREFIX)" "$(INCLUDEDIR)") && \
	for file in $(foreach file,$(PACKAGE),"$(file)"); do \
	    sed -e 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|; s|@ABI@|$(ABI)|' \
	        -e 's|@LIBDIR@|$(patsubst $(PREFIX)/%,$${prefix}/%,$(LIBDIR))|' \
	        -e 's|@INCLUDEDIR@|$(patsubst $(PREFIX)/%,$${prefix}/%,$(INCLUDEDIR))|' \
	        -e "s|@UP@|$$from|; s|@LIB@|$$library|; s|@INCLUDE@|$$include|" \
	        "libvmem/package/$${file##*/}.in" > "$(DESTDIR)$$file" && chmod 644 "$(DESTDIR)$$file" || exit 1; done

uninstall: ## Remove what `make install` with the same variables has installed
	$(Q)rm -f $(foreach file,$(INSTALLED) $(MANDIR)/man1/pyvmem.1 $(MANDIR)/man8/vmem-module.8,"$(DESTDIR)$(file)")
	$(Q)rmdir -p --ignore-fail-on-non-empty $(foreach folder,$(LIBDIR)/cmake/vmem $(LIBDIR)/pkgconfig $(DOCDIR) $(MANDIR)/man1 $(MANDIR)/man8,"$(DESTDIR)$(folder)") 2>/dev/null || true

venv: $(VENV)/.ready build/libbench.so ## Build the Python extension and install pyvmem into .venv

check: lint test-uvm-ext test-fast ## Format, style, types and the quick tests, for use before each commit; no root (1 minute)

test: ## `check`, and every test that needs no GPU; lists what was not run, and why, and fails if .ci/not_run.txt does not (25 minutes)
	$(Q)$(MAKE) --no-print-directory -j$(CPUS) lib
	$(Q)JOBS=$(CPUS) $(PYTHON) .ci/not_run.py $(MAKE) --no-print-directory all-tests
CPUS := $(shell nproc)
.PHONY: all-tests tests-before tests-after
# The tests of `check` are part of the others. Those of Python take all processors. What comes before and after them runs
# side by side, on one processor each: downloads, and programs that wait, leave theirs to another. The sanitizers' are the
# last before them, and take both.
all-tests: tests-before test-python tests-after
tests-before: ; $(Q)JOBS=1 $(MAKE) --no-print-directory -j$(CPUS) -Otarget lint test-uvm-ext test-c test-asan
tests-after: ; $(Q)$(MAKE) --no-print-directory -j$(CPUS) -Otarget PYTHON_JOBS=1 test-vllm-quick test-module test-vm-quick test-python-fake test-triton
test-vm-quick: | $(filter test-module,$(MAKECMDGOALS)) # whose objects it takes

# C and Python tests that take a second or less and start no further process.
FAST_C := abi_stock access blocks busy commit context create host_memory kv_races kv_sharing kv_wait map ownership release \
          replace reserve struct unmap uvm_batch uvm_open
FAST_PYTHON := arguments blocks errors glossary kv_hashes library map mutants owned without_torch
test-fast: lib venv ## The quick C and Python tests, on host memory
	$(Q)$(MAKE) --no-print-directory -C tests/c check BACKENDS=host T="$(FAST_C:%=test_%)"
	$(Q)VMEM_TEST_BACKENDS=host $(PY) -m pytest -q $(FAST_PYTHON:%=tests/python/test_%.py)

test-uvm-ext: ## The kernel extension's ABI, and its parts that need no kernel, under the sanitizers
	$(Q)$(MAKE) --no-print-directory -C tests/uvm_ext check

test-c: lib ## C tests of libvmem, on host memory and over a fake GPU driver; T=test_map, BACKENDS=stock: one, on one backend
	$(Q)$(MAKE) --no-print-directory -C tests/c check
	$(if $(T)$(BACKENDS),,$(Q)$(MAKE) --no-print-directory -C tests/fakegpu check)

test-asan: ## C tests under the address and undefined-behaviour sanitizers
	$(Q)JOBS=$(CPUS) $(MAKE) --no-print-directory -C tests/c check-asan

mutants-c: ## Seeded faults in libvmem, each of which a C test must notice (4 minutes)
	$(Q)$(PYTHON) tests/c/mutants.py

fuzz-kv: lib ## The KV cache beside kernels that lag behind by 1 to 3 steps: 100,000 iterations of each (6 minutes)
	$(Q)$(MAKE) --no-print-directory -C tests/fakegpu fuzz-kv

fuzz-kv-gpu: ## The same on a GPU, with nvcc and two steps in flight; GPU_BACKEND=stock or cuda (1 to 6 minutes)
	$(Q)$(MAKE) --no-print-directory -C tests/c fuzz-kv-gpu

CROSS ?= aarch64-linux-gnu
# QEMU keeps a table of all reserved addresses; test_reserve reserves 12 TiB, which takes it more memory than there is.
# It ignores MADV_WIPEONFORK, by which test_blocks finds that a forked child is refused.
test-cross: ## The quick C tests, cross-built for aarch64 and run under qemu-user (CROSS=aarch64-linux-gnu)
	$(Q).ci/need $(CROSS)-gcc=gcc-aarch64-linux-gnu qemu-$(firstword $(subst -, ,$(CROSS)))=qemu-user
	$(Q)RUN="qemu-$(firstword $(subst -, ,$(CROSS))) -L /usr/$(CROSS)" $(MAKE) --no-print-directory -C tests/c check \
	    CC=$(CROSS)-gcc BUILD=../../build/tests-c-$(CROSS) BACKENDS=host T="$(patsubst %,test_%,$(filter-out reserve blocks,$(FAST_C)))"

test-tsan: ## C tests under the thread sanitizer
	$(Q)$(MAKE) --no-print-directory -C tests/c check-tsan

test-shaken: ## C tests whose background threads are delayed at random; SHAKE=2: at every second point; SHAKE_MS=700 JOBS=8: any thread, as on a busy machine (4 minutes)
	$(Q)$(MAKE) --no-print-directory -C tests/c check-shaken

PYTHON_JOBS ?= 2
test-python: lib venv ## Python tests, on every backend that works on this machine
	$(Q).ci/need cmake=cmake pkg-config=pkg-config c++=g++ || true # tests that need them are skipped without them
	$(Q)OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest -q -n $(PYTHON_JOBS) --dist worksteal tests/python --ignore=tests/python/gpu \
	    --ignore=tests/python/test_selftest.py $(INTERPRETED:%=--deselect=%) # which test-python-fake and test-triton run

# torch's builds for CPUs bring no Triton, those of PyPI do.
TRITON = triton==3.7.1
INTERPRETED = tests/python/test_attention.py::test_triton_in_its_interpreter \
    $(foreach file,sums to_device,tests/python/test_$(file).py::test_the_kernel_in_tritons_interpreter)
test-triton: venv ## The tests of Triton's kernels, in its interpreter on the CPU; none may be skipped
	$(Q)$(PY) -c 'import triton' 2>/dev/null || [ -f build/triton/.ready ] || { \
	    $(PY) -m pip install -q --disable-pip-version-check --no-deps --upgrade --target build/triton $(TRITON) && touch build/triton/.ready; } || true
	$(Q)if $(PY) -c 'import triton' 2>/dev/null || [ -f build/triton/.ready ]; then \
	    PYTHONPATH=$(CURDIR)/build/triton $(PY) .ci/not_run.py --none $(PY) -m pytest -q $(INTERPRETED); \
	else echo "skipped: the registry does not give $(TRITON)"; fi

TRANSFORMERS_RELEASES = 5.17.0 5.18.0 5.19.0 5.20.2 5.21.1 5.22.2 5.23.0 5.24.0
test-transformers-releases: venv ## The cache of generate() with every supported release of transformers (12 minutes)
	$(Q)for release in $(TRANSFORMERS_RELEASES); do \
	    folder=build/transformers/$$release; echo "transformers $$release"; \
	    [ -d $$folder ] || $(PY) -m pip install -q --target $$folder transformers==$$release || exit 1; \
	    PYTHONPATH=$$folder $(PY) -c 'import transformers' || exit 1; \
	    VMEM_TEST_FAMILIES=all VMEM_TRANSFORMERS_FORCE=1 PYTHONPATH=$$folder $(PY) -m pytest -q -n 2 tests/python/test_transformers*.py || exit 1; \
	done

test-python-fake: venv ## Python tests on the stock and cuda backends, over a fake GPU driver in CPU memory
	$(Q)$(MAKE) --no-print-directory -C tests/fakegpu ../../build/fakegpu/libcuda.so.1
	$(Q)LD_LIBRARY_PATH=build/fakegpu LD_PRELOAD=$(CURDIR)/build/fakegpu/libcuda.so.1 VMEM_TEST_BACKENDS=stock,cuda \
	    $(PY) -m pytest -q tests/python/test_map.py tests/python/test_errors.py \
	        tests/python/test_owned.py tests/python/test_interrupt.py tests/python/test_late.py
	$(Q)LD_LIBRARY_PATH=build/fakegpu LD_PRELOAD=$(CURDIR)/build/fakegpu/libcuda.so.1 VMEM_TEST_BACKENDS=stock \
	    OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(PYTHON_JOBS) tests/python/test_transformers_late.py
	$(Q)$(PY) -m pytest -q -n $(PYTHON_JOBS) tests/python/test_selftest.py

test-gpu: test-gpu-c test-gpu-python ## C and Python tests and the torch matrix, on the GPU's backends (GPU_BACKENDS=uvm: on the module); JOBS=6 at once

figures: venv ## Figures of the GPUs here, those that tell most first, into build/figures (20 to 50 minutes; T="step vmm": these)
	$(Q)$(PY) .ci/figures.py $(T)

JOBS ?= 6
# uvm alone needs the patched module
GPU_BACKENDS ?= cuda stock
test-gpu-c: lib # two programs make fewer steps than on the host, where a step takes no system call
	$(Q)JOBS=$(JOBS) VMEM_TEST_OPERATIONS=$${VMEM_TEST_OPERATIONS:-100} VMEM_TEST_STEPS=$${VMEM_TEST_STEPS:-12000} $(MAKE) --no-print-directory -C tests/c check BACKENDS="$(GPU_BACKENDS)"

test-gpu-python: venv # two of its files take the whole device, or count what is on it
	$(Q)OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} VMEM_TEST_BACKENDS=$(shell echo $(GPU_BACKENDS) | tr ' ' ,) $(PY) -m pytest -q -n $(JOBS) --maxschedchunk 1 --ignore tests/python/gpu/test_fresh_memory.py tests/python
	$(Q)VMEM_TEST_BACKENDS=$(shell echo $(GPU_BACKENDS) | tr ' ' ,) $(PY) -m pytest -q -p no:xdist tests/python/gpu/test_fresh_memory.py
	$(Q)VMEM_TEST_BACKENDS=$(shell echo $(GPU_BACKENDS) | tr ' ' ,) $(PY) -m pytest -q -p no:xdist tests/python/gpu/test_lease_gpu.py -k drivers_count

# A third party's CPU build of vLLM, for tests only, and vLLM's own sources for the releases that pyvmem runs on.
test-vllm-cpu: venv ## vLLM itself on host memory, with tiny models: equal tokens, limits that move, its HTTP server (15 minutes; VLLM_CPU=0.30.0: another release)
	$(Q)$(PY) .ci/vllm_cpu.py test $(if $(T),-k "$(T)")

test-vllm-quick: venv ## Those of its tests that tell most (2 minutes)
	$(Q)$(PY) .ci/vllm_cpu.py quick

check-vllm-releases: venv ## vLLM's newest release and the three before: what vMem relies on, and its own scheduler on vMem's pages
	$(Q)$(PY) .ci/vllm_cpu.py releases $(VLLM_RELEASES)

# SGLang's own wheel on a CPU. What serves GPUs alone is a stub that fails if it is called.
test-sglang-cpu: venv ## SGLang itself on host memory, with tiny models: equal tokens, every row, limits that move, its HTTP server (SGLANG_CPU=0.5.22: another release)
	$(Q)$(PY) .ci/sglang_cpu.py test $(if $(T),-k "$(T)")

test-sglang-quick: venv ## Those of its tests that tell most
	$(Q)$(PY) .ci/sglang_cpu.py quick

check-sglang-releases: venv ## SGLang's newest releases: what vMem relies on, and the scheduler of each on vMem's pages
	$(Q)$(PY) .ci/sglang_cpu.py releases $(SGLANG_RELEASES)

bench: venv ## Run every benchmark but `vllm` and `sglang` quickly, on the best backend
	$(Q)$(PY) -m benchmarks all --quick

lint: venv $(OBJECTS) ## Compile every C file with warnings as errors; calls only go down; no retired words; clang-format, ruff and mypy --strict
	$(Q)$(PY) .ci/compile.py --cc "$(CC)"
	$(Q)$(PY) .ci/circles.py
	$(Q)$(PY) .ci/words.py
	$(Q)$(PY) .ci/lint.py --beside $(PYTHON)

DOCS := $(PY) -m sphinx -q -W --keep-going -d build/docs/.doctrees
docs: venv ## Build the manual into build/docs/html and the man pages into build/docs/man; a warning is an error
	$(Q)$(PY) -c "import sphinx, numpydoc, myst_parser, furo" 2>/dev/null || $(PY) -m pip install -q --disable-pip-version-check -e ".[docs]"
	$(Q)$(DOCS) -b html docs build/docs/html
	$(Q)$(DOCS) -b man docs build/docs/man

notebook: venv ## Run the tutorial as a notebook, into build/docs/tutorial.ipynb
	$(Q)$(PY) -c "import nbformat, nbclient, ipykernel" 2>/dev/null || $(PY) -m pip install -q --disable-pip-version-check -e ".[docs]"
	$(Q)$(PY) docs/notebook.py build/docs/tutorial.ipynb

format: venv ## Format the C and Python code (.clang-format, pyproject.toml)
	$(Q)$(PY) .ci/lint.py --beside $(PYTHON) --fix

wheel: | toolchain ## Build and test the manylinux wheel and the source distribution, in build/dist (WHEEL=aarch64: for another machine)
	$(Q)$(PYTHON) .ci/make_wheel.py build/dist $(WHEEL)

deb: ## Build Debian packages of the C library, in build/deb (dpkg-buildpackage and debhelper)
	$(Q).ci/need dpkg-buildpackage=dpkg-dev dh=debhelper
	$(Q)rm -rf build/deb && mkdir -p build/deb/vmem-$(VERSION)
	$(Q)cp -r Makefile .ci LICENSE CHANGELOG.md libvmem uvm_ext kernel-open tests build/deb/vmem-$(VERSION)
	$(Q)cp -r packaging/debian build/deb/vmem-$(VERSION)/debian
	$(Q)cd build/deb/vmem-$(VERSION) && MAKEFLAGS= dpkg-buildpackage -us -uc -b

clean: ## Remove all build results
	$(Q)rm -rf build $(VENV) *.egg-info pyvmem/*.so .hypothesis .ruff_cache
	$(Q)find pyvmem tests -name __pycache__ -prune -exec rm -rf {} +

include kernel-open/module.mk
include tests/vm/vm.mk

# ---- how ----------------------------------------------------------------------------------------------------

build/obj/%.o: %.c Makefile | compiler
	@mkdir -p $(@D)
	$(Q)$(CC) -std=gnu11 -fPIC $(CPPFLAGS) $(CFLAGS) $(WARN) -MMD -MP -c $< -o $@

build/libvmem.a: $(OBJECTS)
	$(Q)rm -f $@ && $(AR) rcs $@ $(OBJECTS)

build/libvmem.so: $(OBJECTS) libvmem/libvmem.map
	$(Q)$(CC) -shared -Wl,-soname,libvmem.so.$(ABI) -Wl,--version-script=libvmem/libvmem.map -Wl,-z,defs \
	    $(OBJECTS) $(LDFLAGS) -lpthread -ldl -o $@
	$(Q)ln -sf $(@F) $@.$(ABI) # the name that linked programs load

build/libbench.so: benchmarks/native.c build/libvmem.a # the loops of benchmarks/native.py
	$(Q)$(CC) -shared -std=gnu11 -fPIC $(CPPFLAGS) $(CFLAGS) $(WARN) $^ -Wl,--exclude-libs,ALL $(LDFLAGS) -lpthread -ldl -o $@

$(VENV)/.ready: $(BINDING) $(SOURCES) $(HEADERS) .ci/make_venv.py | toolchain
	$(Q)$(PYTHON) .ci/make_venv.py $(VENV)
	@touch $@
	@echo "pyvmem is installed in $(VENV). $(VENV)/bin/pyvmem doctor shows which backends work."

.PHONY: compiler toolchain
compiler:
	$(Q).ci/need $(firstword $(CC))=gcc
toolchain: compiler
	$(Q).ci/need $(PYTHON)=python3
	$(Q).ci/need $$($(PYTHON) .ci/make_venv.py --needs)

-include $(OBJECTS:.o=.d)
