#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: check_arguments.sh built|given [ROOT]
# Refuses invalid build arguments by name, before anything is downloaded or compiled. They are in the
# environment, where ARG puts them. ROOT: the base's root, / if not given.
set -eu
package=$1 root=${2:-}
url=${UCX_URL:-} sum=${UCX_SHA256:-} options=${CMAKE_OPTIONS:-}

refuse() {
  echo "error: build argument $1" >&2
  exit 1
}

if [ "$package" = given ]; then
  [ -z "$url$sum" ] || refuse "UCX_URL: PACKAGE=given compiles nothing, so there is no UCX to build it against"
  [ -z "$options" ] || refuse "CMAKE_OPTIONS: PACKAGE=given compiles nothing"
  exit 0
fi

id='' version=''
if [ -r "$root/etc/os-release" ]; then
  id=$(sed -n 's/^ID="\{0,1\}\([^"]*\)"\{0,1\}$/\1/p' "$root/etc/os-release")
  version=$(sed -n 's/^VERSION_ID="\{0,1\}\([^"]*\)"\{0,1\}$/\1/p' "$root/etc/os-release")
fi
[ "$id $version" = "debian 12" ] || refuse "BUILD_BASE: it is ${id:-no Debian} $version; the package is for Debian 12"

case " $options " in
  *CMAKE_CUDA_COMPILER*) ;;
  *" -DASHLAR_CUDA=ON "* | *" -DASHLAR_CUDA:STRING=ON "*)
    # Where CMake looks for it.
    if ! command -v "${CUDACXX:-nvcc}" >/dev/null && [ ! -x "$root/usr/local/cuda/bin/nvcc" ]; then
      refuse "CMAKE_OPTIONS: ASHLAR_CUDA=ON needs nvcc, and BUILD_BASE has none in PATH nor /usr/local/cuda/bin: take a Debian 12 with CUDA's toolkit"
    fi
    ;;
esac

case $url in
  '') [ -z "$sum" ] || refuse "UCX_URL: required beside UCX_SHA256" ;;
  *.tar.gz)
    [ "$(printf %s "$sum" | tr -d '0-9a-f' | wc -c)" -eq 0 ] && [ ${#sum} -eq 64 ] ||
      refuse "UCX_SHA256: \"$sum\" is no SHA-256 (64 digits 0-9a-f) of what UCX_URL names"
    ;;
  *) refuse "UCX_URL: $url is no .tar.gz" ;;
esac
