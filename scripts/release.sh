#!/bin/sh
# Collects what a release consists of in target/release-VERSION: the wheels of target/wheels, the site of target/book,
# the changelog's section and SHA-256 checksums. `make release` builds those first. Nothing is published.
set -eu
cd "$(dirname "$0")/.."

# version FILE: the first `version = "..."` of it
version() { sed -n 's/^version = "\(.*\)"$/\1/p' "$1" | head -n 1; }
fail() { echo "release: $1" >&2; exit 1; }

version=$(version Cargo.toml)
[ -n "$version" ] || fail "Cargo.toml has no version"
[ "$(version python/pyproject.toml)" = "$version" ] || fail "python/pyproject.toml has another version than Cargo.toml: $version"
out=target/release-$version

# The list is split at blanks below: names of wheels have none.
wheels=$(ls target/wheels/sinew-"$version"-*.whl 2>/dev/null) || fail "no wheel of $version in target/wheels: run make wheel"
[ -f target/book/index.html ] || fail "no site in target/book: run make book"
section=$(awk -v head="## [$version]" 'index($0, "## [") == 1 { on = index($0, head) == 1 } on' CHANGELOG.md)
[ -n "$section" ] || fail "CHANGELOG.md has no section ## [$version]"
case $section in
*"- unreleased"*) echo "release: CHANGELOG.md calls $version unreleased: put its date there before it is published" >&2 ;;
esac
[ -z "$(git status --porcelain)" ] || echo "release: the working tree has changes that no commit has" >&2

rm -rf "$out"
mkdir -p "$out"
cp $wheels "$out"
# The same files give the same bytes.
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --transform "s,^book,sinew-$version-docs," -C target -cf - book |
    gzip -n >"$out/sinew-$version-docs.tar.gz"
printf '%s\n' "$section" >"$out/CHANGELOG-$version.md"
(cd "$out" && sha256sum -- * >SHA256SUMS)
echo "release: $out"
cat "$out/SHA256SUMS"
