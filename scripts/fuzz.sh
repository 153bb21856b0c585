#!/bin/sh
# Runs one fuzz target in libFuzzer: scripts/fuzz.sh TARGET SECONDS [OPTION OF LIBFUZZER]...
# Needs a C++ compiler; no nightly toolchain, as coverage is a pass of LLVM that stable compilers have.
# New inputs stay in target/fuzz/corpus/TARGET, inputs that break a property in target/fuzz/found/TARGET-*.
set -eu
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { echo "fuzz: usage: scripts/fuzz.sh TARGET SECONDS [OPTION]...; targets: $(ls crates/sinew-fuzz/corpus | xargs)" >&2; exit 2; }
target=$1 seconds=$2
shift 2
first=crates/sinew-fuzz/corpus/$target
[ -d "$first" ] || { echo "fuzz: no target $target; one of: $(ls crates/sinew-fuzz/corpus | xargs)" >&2; exit 2; }
host=$(rustc -vV | sed -n 's/^host: //p')
flags="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
flags="$flags -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table"
flags="$flags -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing"
# Its versions are those of the workspace; cargo adds libFuzzer.
cp Cargo.lock fuzz/Cargo.lock
RUSTFLAGS="$flags" cargo build --manifest-path fuzz/Cargo.toml --release --target "$host" --target-dir target/fuzz
mkdir -p "target/fuzz/corpus/$target" target/fuzz/found
# A run takes at most 10 s and 2 GiB of memory; more is a defect.
case $target in
trace) more=crates/sinew-types/tests/data ;;
chat_template) more=crates/sinew-render/tests/templates ;;
recipe) more=recipes ;;
*) more= ;;
esac
SINEW_FUZZ_TARGET=$target exec "target/fuzz/$host/release/sinew-libfuzzer" "target/fuzz/corpus/$target" "$first" $more \
    -max_total_time="$seconds" -max_len=65536 -timeout=10 -rss_limit_mb=2048 \
    -artifact_prefix="target/fuzz/found/$target-" "$@"
