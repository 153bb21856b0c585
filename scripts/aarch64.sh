#!/bin/sh
# Builds for aarch64 and runs the tests of the numeric crates under qemu-user, with the NEON kernels.
#
#   scripts/aarch64.sh setup             cross compiler and emulator (Debian on x86-64, root), Rust standard library (rustup)
#   scripts/aarch64.sh ready             whether all of these are there
#   scripts/aarch64.sh kernels           tests of sinew-tensor: NEON against plain references and portable kernels
#   scripts/aarch64.sh test [ARGS]       these, and the tests of sinew-model and sinew-infer; ARGS go to nextest
#   scripts/aarch64.sh cargo ARGS        any other cargo command with the target, the compiler and the emulator set
set -eu
cd "$(dirname "$0")/.."
target=aarch64-unknown-linux-gnu

std() { [ -d "$(rustc --print target-libdir --target $target)" ]; }
tools() { command -v qemu-aarch64-static && command -v aarch64-linux-gnu-g++ && command -v cargo-nextest; } >/dev/null

setup() {
	if ! command -v qemu-aarch64-static >/dev/null || ! command -v aarch64-linux-gnu-g++ >/dev/null; then
		apt-get update -qq
		apt-get install -qq -y --no-install-recommends \
			gcc-aarch64-linux-gnu g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static >/dev/null
	fi
	command -v cargo-nextest >/dev/null || cargo install --locked cargo-nextest
	std || rustup target add $target
}

with_target() {
	tools && std || { echo "aarch64: run scripts/aarch64.sh setup first" >&2; exit 1; }
	export CARGO_BUILD_TARGET=$target
	export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
	export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu"
	export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc CXX_aarch64_unknown_linux_gnu=aarch64-linux-gnu-g++
	cargo "$@"
}

command="${1:-}"
[ $# -gt 0 ] && shift
case "$command" in
setup) setup ;;
ready) tools && std ;;
kernels) with_target nextest run --locked -p sinew-tensor ;;
# Left out, by name: tests of the packaged SmolLM2. With 135 million weights each takes many minutes under emulation,
# and its kernels are those of the tiny models of the same families.
test) with_target nextest run --locked -p sinew-tensor -p sinew-model -p sinew-infer -E 'not test(/smollm2/)' "$@" ;;
cargo) with_target "$@" ;;
*) sed -n '2,8p' "$0" >&2; exit 2 ;;
esac
