#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: build_ucx.sh URL SHA256 PREFIX
# Builds a release of UCX that is newer than Debian's. Its libraries go beside the package, into PREFIX.
set -eu
url=$1 sum=$2 prefix=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

refuse() {
  echo "error: build argument $1" >&2
  exit 1
}

curl -fsSL "$url" -o "$work/ucx.tar.gz" || refuse "UCX_URL: $url cannot be downloaded"
found=$(sha256sum "$work/ucx.tar.gz" | cut -d ' ' -f 1)
[ "$found" = "$sum" ] || refuse "UCX_SHA256: the download has $found"
mkdir "$work/ucx"
tar -C "$work/ucx" -xzf "$work/ucx.tar.gz" --strip-components=1 || refuse "UCX_URL: $url is no .tar.gz"
cd "$work/ucx"
[ -x contrib/configure-release ] || refuse "UCX_URL: $url is no release of UCX: it has no contrib/configure-release"
apt-get install -y --no-install-recommends libibverbs-dev librdmacm-dev libnuma-dev
./contrib/configure-release --prefix="$prefix" --with-verbs --with-rdmacm --without-go --without-java
make -j"$(nproc)" install
