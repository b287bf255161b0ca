// Curves on two logarithmic axes, as lines of text and as SVG.
#ifndef ATTENDANT_CLIENT_CLI_PLOT_H_
#define ATTENDANT_CLIENT_CLI_PLOT_H_

#include <string>
#include <vector>

namespace attendant::cli {

enum class Unit { kOperations, kSeconds, kBytes };

// With four digits and the prefix that suits it: "4.295 G", "12.50 ms", "128.0 MiB", "96 B".
std::string Scaled(double value, Unit unit);

struct Point {
  double x = 0;
  double y = 0;
};

struct Curve {
  std::string name;
  char mark = '*';            // in text
  const char* tone = "";      // in SVG: "a" to "d"
  std::vector<Point> points;  // x grows; a point without a positive y is not drawn
  Point here;                 // what is pointed out on it; none where y is 0
};

struct Plot {
  std::string title;
  std::string x_name;
  Unit unit = Unit::kOperations;  // of y
  std::vector<Curve> curves;
  double crossover = 0;  // the x of a line across; 0: none
};

// Whether there is anything to draw: a curve with two points.
bool HasCurve(const Plot& plot);

// A legend, the curves, and both axes. Empty where there is nothing to draw.
std::string DrawText(const Plot& plot);

// A document with the plots side by side, readable on light and on dark ground.
std::string DrawSvg(const std::string& title, const std::vector<Plot>& plots);

}  // namespace attendant::cli

#endif  // ATTENDANT_CLIENT_CLI_PLOT_H_
