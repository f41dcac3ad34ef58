# `make demo` shows Aquifer at work; `make test` runs every test. Both install the packages that
# they need (apt, as root).
.PHONY: help demo demo-all test soak fuzz bench drills build guest install clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s '	'

demo: ## build, then show four hosts that keep a VM's memory (40 seconds after the build)
	scripts/need-root demo
	scripts/install-packages demo
	cargo build --release --locked --workspace --lib --bins
	kernel=$$(target/release/testbed kernel 6.12 | cut -f 3) && \
	    target/release/aquifer demo cluster --picture cluster.png --kernel "$$kernel"
	@echo 'The picture is cluster.png. Next: make demo-all, or docs/tutorial.md'

demo-all: ## build, then run each demo: cluster, sharing, region, migrate, resize, groups
	scripts/need-root demo-all
	scripts/install-packages demo
	cargo build --release --locked --workspace --lib --bins
	target/release/aquifer demo sharing --picture sharing.png
	target/release/aquifer demo region --picture region.png
	for demo in cluster migrate resize groups; do \
	    kernel=$$(target/release/testbed kernel 6.12 | cut -f 3) && \
	    target/release/aquifer demo $$demo --picture $$demo.png --kernel "$$kernel" || exit; \
	done

test: ## run every check and test, from format to VMs (15 minutes on two processors)
	scripts/need-root test
	scripts/install-packages test
	scripts/test

soak: ## run random tests for SOAK_MINUTES (10)
	scripts/need-root soak
	scripts/install-packages test
	scripts/soak

fuzz: ## send broken input to servers and clients for FUZZ_SECONDS (600)
	scripts/install-packages demo
	scripts/fuzz $(FUZZ_SECONDS)

bench: ## measure all figures of docs/benchmarks.md again, beside the peers (hours)
	scripts/need-root bench
	scripts/install-packages bench
	cargo build --release --locked --workspace --lib --examples --bins
	bench/run all

drills: ## break a cluster under load in each way that we know, and say what was lost (8 minutes)
	scripts/need-root drills
	scripts/install-packages drills
	cargo build --release --locked --workspace --lib --bins
	drills/run

build: ## build target/release/aquifer, its demos, and the agent for guests
	cargo build --release --locked
	scripts/guest-agent

guest: ## build target/release/aquifer-guest, the static agent for guests
	scripts/guest-agent

install: build ## copy binaries, libraries and header to /usr/local/{bin,lib,include}
	install -m 755 target/release/aquifer target/release/aquifer-demo /usr/local/bin/
	install -m 755 target/release/aquifer-guest /usr/local/bin/
	install -m 755 target/release/libaquifer_preload.so target/release/libaquifer.so /usr/local/lib/
	install -m 644 crates/libaquifer/include/aquifer.h /usr/local/include/aquifer.h

clean: ## remove all that was built
	cargo clean
