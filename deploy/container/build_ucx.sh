#!/bin/sh
# usage: build_ucx.sh URL SHA256 PREFIX
# Builds a release of UCX that is newer than Debian's. Its libraries go beside the package, into PREFIX.
set -eu
url=$1 sum=$2 prefix=$3
work=$(mktemp -d)
apt-get install -y --no-install-recommends libibverbs-dev librdmacm-dev libnuma-dev
curl -fsSL "$url" -o "$work/ucx.tar.gz"
echo "$sum  $work/ucx.tar.gz" | sha256sum --check --quiet
tar -C "$work" -xzf "$work/ucx.tar.gz" --strip-components=1
cd "$work"
./contrib/configure-release --prefix="$prefix" --with-verbs --with-rdmacm --without-go --without-java
make -j"$(nproc)" install
