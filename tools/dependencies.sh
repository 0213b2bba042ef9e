# SPDX-License-Identifier: Apache-2.0
# The Debian 12 packages that building and testing take, and a function that installs those that are missing.
# Sourced by tools/test and tools/demo: this list is the only one.

# Compiled objects are kept in the checkout: nothing is left behind outside it.
export CCACHE_DIR="${CCACHE_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/build/ccache}"

ASHLAR_PACKAGES=(
  # build
  g++ cmake ninja-build ccache pkg-config python3
  # control plane, configuration, logs, metrics
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev libssl-dev
  libyaml-cpp-dev libspdlog-dev prometheus-cpp-dev libmicrohttpd-dev nlohmann-json3-dev
  # command lines
  libcli11-dev
  # events for routers
  libzmq3-dev
  # the filter of system calls that the daemon puts on itself
  libseccomp-dev
  # bytes between nodes
  libucx-dev
  # the SSD tier's index
  librocksdb-dev
  # kernels and the reference engine
  libhwy-dev libxxhash-dev libopenblas-dev
  # a server that ashlar-bench compares with, and its client
  redis-tools libhiredis-dev
  # ashlar-replay: packed traces, plots
  libzstd-dev gnuplot-nox
  # the Python module; the rest of what it takes comes from PyPI (tools/python-environment)
  python3-dev python3-venv
  # tests
  libgtest-dev libgmock-dev
  # formatting of sources
  clang-format
  # tests of rules and dashboards
  prometheus
  # tests of many nodes: the directory and its published messages, certificates, links between network namespaces
  etcd-server golang-etcd-server-dev openssl iproute2 faketime etcd-client
)

ashlar_missing_packages() {
  local package
  for package in "${ASHLAR_PACKAGES[@]}"; do
    [[ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" == installed ]] || echo "$package"
  done
}

# Installs what is missing, as root or by sudo, and does nothing where nothing is. Package lists are fetched only when
# the ones at hand cannot serve.
ashlar_install_dependencies() {
  local missing as_root=()
  mapfile -t missing < <(ashlar_missing_packages)
  if ((${#missing[@]} == 0)); then return 0; fi
  if ((EUID != 0)); then
    if ! command -v sudo >/dev/null; then
      echo "error: packages are missing; as root, run: apt-get install ${missing[*]}" >&2
      return 1
    fi
    as_root=(sudo)
  fi
  echo "Installing ${#missing[@]} packages: ${missing[*]}"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -q)
  local install=(install -y --no-install-recommends "${missing[@]}")
  if "${apt[@]}" -s "${install[@]}" >/dev/null 2>&1 && "${apt[@]}" "${install[@]}"; then return 0; fi
  "${apt[@]}" update && "${apt[@]}" "${install[@]}"
}
