# SPDX-License-Identifier: Apache-2.0
# The Debian 12 packages that the demo, a build and the tests need, and a function that installs missing ones.
# Sourced by tools/test, tools/demo and the image: these lists are the only ones.

# Compiled objects are kept in the checkout: nothing is written outside it.
export CCACHE_DIR="${CCACHE_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/build/ccache}"

# The daemon, its client library and the demo. Preset demo needs only these.
ASHLAR_DEMO_PACKAGES=(
  # build
  g++ cmake ninja-build ccache pkg-config
  # control plane, configuration, logs, metrics
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev libssl-dev
  libyaml-cpp-dev libspdlog-dev prometheus-cpp-dev libmicrohttpd-dev nlohmann-json3-dev
  # command lines
  libcli11-dev
  # events for routers
  libzmq3-dev
  # the daemon's own filter of system calls
  libseccomp-dev
  # bytes between nodes
  libucx-dev
  # the SSD tier's index
  librocksdb-dev
  # kernels and the reference engine
  libhwy-dev libxxhash-dev libopenblas-dev
  # packed traces, which ashlar-replay reads
  libzstd-dev
)
# Everything except tests.
ASHLAR_BUILD_PACKAGES=(
  "${ASHLAR_DEMO_PACKAGES[@]}"
  # the Python module; its other dependencies come from PyPI (tools/python-environment)
  python3 python3-dev python3-venv
  # client of a server with which ashlar-bench compares
  libhiredis-dev
)
# Everything that tools/test builds and runs.
ASHLAR_TEST_PACKAGES=(
  "${ASHLAR_BUILD_PACKAGES[@]}"
  libgtest-dev libgmock-dev
  # formatting and lint of sources, and annotations of mutexes
  clang-format clang-tidy clang
  # server with which ashlar-bench compares
  redis-tools
  # ashlar-replay's plots
  gnuplot-nox
  # tests of rules and dashboards
  prometheus
  # tests of many nodes: the directory and its published messages, certificates, links between network namespaces
  etcd-server golang-etcd-server-dev openssl iproute2 faketime etcd-client
)

ashlar_missing_packages() {
  local package
  for package in "$@"; do
    [[ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" == installed ]] || echo "$package"
  done
}

# ashlar_install_dependencies demo|build|test: installs the packages of a list that are missing, as root or by sudo.
# Fetches package lists only if the present ones do not suffice.
ashlar_install_dependencies() {
  local -n wanted="ASHLAR_${1^^}_PACKAGES"
  local missing as_root=()
  mapfile -t missing < <(ashlar_missing_packages "${wanted[@]}")
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
