#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "tools/replay/commands.h"

namespace ashlar::replay {
namespace {

constexpr size_t kColours = 8;  // of gnuplot

// gnuplot's strings in single quotes know one special character.
std::string Quoted(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("''") : std::string(1, c);
  return quoted + "'";
}

std::string Script(const Curves& curves, const std::string& path) {
  const size_t panels = curves.panels.size();
  std::string script = absl::StrCat(
      "set terminal svg noenhanced size 900,", 420 * panels, " font 'sans,12' background 'white'\nset output ",
      Quoted(path), "\nset multiplot layout ", panels, ",1 title ", Quoted(curves.title),
      "\nset key outside right\nset grid\nset xlabel ", Quoted(curves.x), "\nset ylabel ", Quoted(curves.y),
      "\nset yrange [0:*]\n", curves.logarithmic ? "set logscale x 2\n" : "");
  for (const Curves::Panel& panel : curves.panels) {
    absl::StrAppend(&script, "set title ", Quoted(panel.title), "\nplot ");
    for (size_t i = 0; i < panel.curves.size(); ++i) {
      // More curves than gnuplot has colours: those that come round again are dashed.
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

absl::Status Draw(const Curves& curves, const std::string& path) {
  if (curves.panels.empty()) return absl::OkStatus();
  FILE* const gnuplot = popen("gnuplot", "w");
  if (gnuplot == nullptr) return absl::UnavailableError("--plot: no process can be started");
  const std::string script = Script(curves, path);
  const bool written = std::fwrite(script.data(), 1, script.size(), gnuplot) == script.size();
  const int status = pclose(gnuplot);
  if (written && status == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("--plot: gnuplot did not write ", path,
                                             " (Debian has it in gnuplot-nox; exit status ", status, ")"));
}

}  // namespace ashlar::replay
