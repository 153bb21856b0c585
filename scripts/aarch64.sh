#!/bin/sh
# Builds for aarch64 and runs the tests of the numeric crates under qemu-user.
#
#   scripts/aarch64.sh setup             cross compiler, emulator, Rust standard library (Debian 12, x86-64, root)
#   scripts/aarch64.sh test [ARGS]       nextest of sinew-tensor, sinew-model and sinew-infer; ARGS go to nextest
#   scripts/aarch64.sh cargo ARGS        any other cargo command with the target, the compiler and the emulator set
#
# rustup offers no aarch64 standard library where only Debian's mirrors can be reached. Debian has one for its own
# compiler (`rustc-web`), so that both come from there; they are unpacked, not installed, and leave rustup alone.
set -eu
cd "$(dirname "$0")/.."
here="$(pwd)/.cache/aarch64"
root="$here/root"
target=aarch64-unknown-linux-gnu

setup() {
	if ! command -v qemu-aarch64-static >/dev/null || ! command -v aarch64-linux-gnu-g++ >/dev/null; then
		apt-get update -qq
		apt-get install -qq -y --no-install-recommends \
			gcc-aarch64-linux-gnu g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static >/dev/null
	fi
	if [ ! -e "$here/ready" ]; then
		dpkg --add-architecture arm64
		apt-get update -qq
		rm -rf "$here" && mkdir -p "$here/deb" "$root"
		chmod a+rwx "$here/deb"
		std="$(apt-cache depends rustc-web | sed -n 's/.*Depends: \(libstd-rust-web-dev\)$/\1/p')"
		driver="$(apt-cache depends "$std" | sed -n 's/.*Depends: \(libstd-rust-web-[0-9.]*\)$/\1/p')"
		llvm="$(apt-cache depends "$driver" | sed -n 's/.*Depends: \(libllvm[0-9]*\)$/\1/p')"
		(cd "$here/deb" && apt-get download -qq rustc-web "$std" "$driver" "$llvm" libz3-4 libedit2 libxml2 libbsd0 libmd0 "$std:arm64")
		for deb in "$here"/deb/*.deb; do dpkg -x "$deb" "$root"; done
		rm -rf "$here/deb"
		"$root/usr/bin/rustc" --version >/dev/null 2>&1 || LD_LIBRARY_PATH="$root/usr/lib/x86_64-linux-gnu" "$root/usr/bin/rustc" --version
		touch "$here/ready"
	fi
}

with_target() {
	[ -e "$here/ready" ] || { echo "run scripts/aarch64.sh setup first" >&2; exit 1; }
	export LD_LIBRARY_PATH="$root/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
	export RUSTC="$root/usr/bin/rustc"
	export CARGO_TARGET_DIR="$here/target" CARGO_BUILD_TARGET="$target"
	export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
	export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu"
	export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc CXX_aarch64_unknown_linux_gnu=aarch64-linux-gnu-g++
	cargo "$@"
}

command="${1:-}"
[ $# -gt 0 ] && shift
case "$command" in
setup) setup ;;
# Whole language models take minutes each under emulation; their kernels are in the other tests.
test) with_target nextest run --locked -p sinew-tensor -p sinew-model -p sinew-infer -E 'not test(/smollm2/)' "$@" ;;
cargo) with_target "$@" ;;
*) sed -n '2,7p' "$0" >&2; exit 2 ;;
esac
