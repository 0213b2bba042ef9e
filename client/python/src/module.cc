// SPDX-License-Identifier: Apache-2.0
// The extension module of the package `ashlar`: the engine API (ashlar/engine.h) for Python, without policy of its own.
// ashlar/cache.py is what users call.
#include <nanobind/nanobind.h>

#include "client/python/src/handles.h"
#include "proto/version.h"

NB_MODULE(_ashlar, module) {
  using ashlar::python::Verdict;
  namespace nb = nanobind;
  nb::enum_<Verdict>(module, "Verdict")
      .value("OK", Verdict::kOk)
      .value("PENDING", Verdict::kPending)
      .value("RESTART", Verdict::kRestart)
      .value("OTHER_PAGES", Verdict::kOtherPages)
      .value("NO_PAGES", Verdict::kNoPages);
  ashlar::python::BindArguments(module);
  ashlar::python::BindRequest(module);
  ashlar::python::BindCache(module);
  ashlar::python::BindPages(module);
  ashlar::python::BindProber(module);
  module.def("version", &ashlar::Version);
}
