# SPDX-License-Identifier: GPL-2.0
#
# The front door. Each target is a script in scripts/, which says more with --help.

# Words of the command line that the scripts take. Only they: see PARAMS in `make help`.
run-args = $(if $(PARAMS),--param '$(PARAMS)') $(if $(filter-out 0,$(TRACE)),--trace)

.PHONY: help
help:
	@echo 'make run                  exercise completion queues on a stock Debian kernel in a virtual machine'
	@echo '     PARAMS="qps=64 ..."  with these parameters of the module'
	@echo '     TRACE=1              with the trace events of the RDMA core and of the module'
	@echo 'make test                 run every test (TESTS="name ..." some, JOBS=n so many at once)'
	@echo 'make soak                 what happens to real machines, a thousand times, for half an hour (NAMES="name ..." some,'
	@echo '                          SCALE=percent so much of it, SEED=n the same again)'
	@echo 'make bench                measure the Rust layer beside C, for half an hour (PARTS="insns ..." only these,'
	@echo '                          BENCH=quick less of it, for two minutes)'
	@echo 'make modules KDIR=DIR     only build the module, for your own kernel: a configured build tree'
	@echo 'make fmt                  format the Rust sources'
	@echo 'make lint                 clippy and shellcheck'
	@echo 'make doc                  the documentation of the Rust crates'
	@echo 'make clean                remove what was built in this checkout'
	@echo 'make distclean            and the caches: toolroot, kernels'

.PHONY: run test soak bench fmt lint doc
run:
	@scripts/run $(run-args)

test:
	@scripts/test $(TESTS)

soak:
	@scripts/soak $(if $(SCALE),--scale $(SCALE)) $(NAMES)

bench:
	@scripts/bench $(PARTS)

fmt lint doc:
	@scripts/$@

# Variables such as LLVM=1 or CC= reach the kernel's makefiles by themselves.
KDIR ?= /lib/modules/$(shell uname -r)/build

.PHONY: modules
modules:
	@test -f '$(KDIR)/.config' || { \
		echo 'error: no configured kernel build tree at KDIR=$(KDIR)' >&2; \
		echo '    Say where the one of your kernel is: make modules KDIR=/path/to/tree' >&2; exit 1; }
	@test -f '$(KDIR)/rust/libkernel.rmeta' || { \
		echo 'error: KDIR=$(KDIR) has no Rust metadata (rust/libkernel.rmeta)' >&2; \
		echo '    Needed is a tree with CONFIG_RUST=y in which make, or make prepare modules_prepare, has run.' >&2; \
		echo '    The headers packages of distributions leave it out; make run shows how to get it for Debian.' >&2; \
		exit 1; }
	@mkdir -p build/modules
	$(MAKE) -C '$(KDIR)' M='$(CURDIR)' MO='$(CURDIR)/build/modules' modules
	@echo 'built build/modules/cq_exerciser.ko'

.PHONY: clean distclean
clean:
	rm -rf build

distclean: clean
	@scripts/distclean
