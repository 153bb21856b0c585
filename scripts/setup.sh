#!/bin/sh
# Installs what the tests need beyond a Rust toolchain. Idempotent; says what it does.
set -eu

if ! command -v cargo-nextest >/dev/null 2>&1; then
    echo "setup: installing cargo-nextest"
    cargo install --locked cargo-nextest
fi

missing=""
for pair in python3:python3 bwrap:bubblewrap git:git cc:gcc; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair##*:}"
done
if [ -n "$missing" ]; then
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "setup: please install:$missing" >&2
        exit 1
    fi
    echo "setup: installing$missing"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
fi
