// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "tools/replay/commands.h"

namespace ashlar::replay {
namespace {

constexpr size_t kColours = 8;  // gnuplot's colours

// gnuplot's strings in single quotes know one special character.
std::string Quoted(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("''") : std::string(1, c);
  return quoted + "'";
}

std::string Script(const Curves& curves) {
  const size_t panels = curves.panels.size();
  std::string script = absl::StrCat("set terminal svg noenhanced size 900,", 420 * panels,
                                    " font 'sans,12' background 'white'\nset multiplot layout ", panels, ",1 title ",
                                    Quoted(curves.title), "\nset key outside right\nset grid\nset xlabel ",
                                    Quoted(curves.x), "\nset ylabel ", Quoted(curves.y), "\nset yrange [0:*]\n",
                                    curves.logarithmic ? "set logscale x 2\n" : "");
  for (const Curves::Panel& panel : curves.panels) {
    absl::StrAppend(&script, "set title ", Quoted(panel.title), "\nplot ");
    for (size_t i = 0; i < panel.curves.size(); ++i) {
      // More curves than gnuplot has colours: repeated colours are dashed.
      const std::string& name = panel.curves[i].name;
      absl::StrAppend(&script, i > 0 ? ", " : "", "'-' using 1:2 with linespoints linetype ", i % kColours + 1,
                      " pointtype ", i + 1, " dashtype ", i / kColours + 1, " linewidth 2 title ", Quoted(name));
    }
    absl::StrAppend(&script, "\n");
    for (const Curves::Curve& curve : panel.curves) {
      for (const auto& [x, y] : curve.points) absl::StrAppend(&script, x, " ", y, "\n");
      absl::StrAppend(&script, "e\n");
    }
  }
  return script + "unset multiplot\n";
}

}  // namespace

absl::StatusOr<std::string> Draw(const Curves& curves) {
  // gnuplot reads the script from a file, so that its output can be read from a pipe.
  std::string script_path = std::filesystem::temp_directory_path() / "ashlar-replay-XXXXXX";
  const int script_fd = mkstemp(script_path.data());
  if (script_fd < 0) return absl::ErrnoToStatus(errno, "--plot: cannot make a temporary file");
  close(script_fd);
  const absl::Cleanup remove_script = [&] { std::remove(script_path.c_str()); };
  if (const absl::Status status = WriteFile(script_path, Script(curves)); !status.ok()) return status;
  FILE* const gnuplot = popen(absl::StrCat("gnuplot '", script_path, "'").c_str(), "r");
  if (gnuplot == nullptr) return absl::UnavailableError("--plot: cannot start a process");
  std::string picture;
  char piece[1 << 14];
  while (const size_t read = std::fread(piece, 1, sizeof piece, gnuplot)) picture.append(piece, read);
  const int status = pclose(gnuplot);
  if (status == 0 && !picture.empty()) return picture;
  return absl::UnavailableError(
      absl::StrCat("--plot: gnuplot failed with exit status ", status, "; install gnuplot-nox to draw plots"));
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << text;
  out.close();
  if (out) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(path, ": cannot write: ", std::strerror(errno)));
}

}  // namespace ashlar::replay
