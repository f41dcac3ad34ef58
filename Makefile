# `make demo` shows Aquifer at work; `make test` runs every test. Both install what they need (apt, as root).
.PHONY: help demo test soak fuzz lab build guest install clean
.DEFAULT_GOAL := help

help: ## what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s '	'

demo: ## build, then show two hosts sharing memory, memcached in a region, a VM that moves, one that grows, and two groups of them: `aquifer demo sharing`, `region`, `migrate`, `resize`, `groups`
	scripts/need-root demo
	scripts/install-packages demo
	cargo build --release --locked --workspace --lib --bins
	target/release/aquifer demo sharing --picture sharing.png
	target/release/aquifer demo region --picture region.png
	target/release/aquifer demo migrate --picture migrate.png --kernel "$$(target/release/testbed kernel 6.12 | cut -f 3)"
	target/release/aquifer demo resize --picture resize.png --kernel "$$(target/release/testbed kernel 6.12 | cut -f 3)"
	target/release/aquifer demo groups --picture groups.png --kernel "$$(target/release/testbed kernel 6.12 | cut -f 3)"

test: ## every check and test, from format to VMs (14 minutes on two processors)
	scripts/need-root test
	scripts/install-packages test
	scripts/test

soak: ## long random tests (hours if asked: SOAK_MINUTES=60)
	scripts/need-root soak
	scripts/install-packages test
	scripts/soak

fuzz: ## broken peers against servers and clients (10 minutes if not told: FUZZ_SECONDS=3600)
	scripts/install-packages demo
	scripts/fuzz $(FUZZ_SECONDS)

lab: ## the figures in docs/figures.md, measured again beside the peers
	scripts/need-root lab
	scripts/install-packages lab
	cargo build --release --locked --workspace --examples --bins
	lab/nbd
	lab/nvme
	lab/fabrics
	lab/swap
	lab/store
	lab/sealing
	lab/idle
	lab/recall
	lab/floor
	lab/floor --tcp
	lab/policies --picture policies.png
	lab/zipf --picture zipf.png
	lab/migrate --picture migrate.png
	lab/programs --picture programs.png
	lab/resize
	lab/groups ksm
	lab/groups rates
	lab/groups loss
	lab/groups pool
	lab/isolation
	lab/surplus policies --picture policies-groups.png
	lab/surplus hog --picture hog.png
	lab/surplus lend --picture lend.png
	lab/surplus cache
	lab/consolidation --picture consolidation.png

build: ## the release binaries: target/release/aquifer, and the agent for guests
	cargo build --release --locked
	scripts/guest-agent

guest: ## the agent for guests, static: target/release/aquifer-guest
	scripts/guest-agent

install: build ## copy the binary to /usr/local/bin, the libraries for regions and their header to /usr/local/lib and include
	install -m 755 target/release/aquifer target/release/aquifer-guest /usr/local/bin/
	install -m 755 target/release/libaquifer_preload.so target/release/libaquifer.so /usr/local/lib/
	install -m 644 crates/libaquifer/include/aquifer.h /usr/local/include/aquifer.h

clean: ## remove what was built
	cargo clean
