#include "client/cli/plot.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace attendant::cli {
namespace {

// A logarithmic axis: 0 at its low end, 1 at its high end.
struct Axis {
  double low = 1;
  double high = 1;
  double Share(double value) const { return std::log(value / low) / std::log(high / low); }
  double At(double share) const { return low * std::pow(high / low, share); }
};

struct Prefix {
  double factor;
  const char* name;
};

absl::Span<const Prefix> PrefixesOf(Unit unit) {
  // Largest first.
  static constexpr Prefix kOperations[] = {{1e18, " E"}, {1e15, " P"}, {1e12, " T"}, {1e9, " G"},
                                           {1e6, " M"},  {1e3, " k"},  {1, ""}};
  static constexpr Prefix kSeconds[] = {{86400 * 365.25, " years"},
                                        {86400, " days"},
                                        {3600, " h"},
                                        {1, " s"},
                                        {1e-3, " ms"},
                                        {1e-6, " us"}};
  static constexpr Prefix kBytes[] = {{0x1p60, " EiB"}, {0x1p50, " PiB"}, {0x1p40, " TiB"},
                                      {0x1p30, " GiB"}, {0x1p20, " MiB"}, {0x1p10, " KiB"},
                                      {1, " B"}};
  switch (unit) {
    case Unit::kOperations:
      return kOperations;
    case Unit::kSeconds:
      return kSeconds;
    case Unit::kBytes:
      break;
  }
  return kBytes;
}

// The largest prefix that leaves 1 or more before the point.
const Prefix& PrefixOf(double value, Unit unit) {
  const absl::Span<const Prefix> prefixes = PrefixesOf(unit);
  for (const Prefix& prefix : prefixes) {
    if (value >= prefix.factor) return prefix;
  }
  return prefixes.back();
}

// For an axis: without digits that say nothing.
std::string TickName(double value, Unit unit) {
  Prefix prefix = PrefixOf(value * (1 + 1e-9), unit);
  // Powers of ten are none of hours.
  if (unit == Unit::kSeconds && prefix.factor > 1) prefix = {1, " s"};
  return absl::StrFormat("%.4g%s", value / prefix.factor, prefix.name);
}

// As it is common for the length of a context.
std::string TokensName(double tokens) {
  if (tokens >= 0x1p30) return absl::StrFormat("%.4gG", tokens / 0x1p30);
  if (tokens >= 0x1p20) return absl::StrFormat("%.4gM", tokens / 0x1p20);
  if (tokens >= 0x1p10) return absl::StrFormat("%.4gK", tokens / 0x1p10);
  return absl::StrFormat("%.4g", tokens);
}

bool IsDrawn(const Point& point) { return point.x > 0 && point.y > 0; }

Axis AcrossOf(const Plot& plot) {
  Axis axis{std::numeric_limits<double>::infinity(), 0};
  for (const Curve& curve : plot.curves) {
    for (const Point& point : curve.points) {
      if (!IsDrawn(point)) continue;
      axis.low = std::min(axis.low, point.x);
      axis.high = std::max(axis.high, point.x);
    }
  }
  return axis;
}

// Powers of this stand on the axis.
double BaseOf(Unit unit) { return unit == Unit::kBytes ? 2 : 10; }

// From one power of the base to another.
Axis UpOf(const Plot& plot) {
  double low = std::numeric_limits<double>::infinity();
  double high = 0;
  for (const Curve& curve : plot.curves) {
    for (const Point& point : curve.points) {
      if (!IsDrawn(point)) continue;
      low = std::min(low, point.y);
      high = std::max(high, point.y);
    }
  }
  const double base = BaseOf(plot.unit);
  const auto exponent = [base](double value) { return std::log(value) / std::log(base); };
  const double first = std::floor(exponent(low) + 1e-9);
  const double last = std::max(std::ceil(exponent(high) - 1e-9), first + 1);
  return {std::pow(base, first), std::pow(base, last)};
}

// Powers of `base` on an axis, as many apart as leave `most` or fewer.
std::vector<double> TicksOf(const Axis& axis, double base, int most) {
  const int first =
      static_cast<int>(std::lround(std::ceil(std::log(axis.low) / std::log(base) - 1e-9)));
  const int last =
      static_cast<int>(std::lround(std::floor(std::log(axis.high) / std::log(base) + 1e-9)));
  int step = 1;
  while ((last - first) / step + 1 > most) ++step;
  std::vector<double> ticks;
  for (int exponent = first; exponent <= last; exponent += step) {
    ticks.push_back(std::pow(base, exponent));
  }
  return ticks;
}

// A curve's y between its points, or 0 outside them.
double Interpolate(const Curve& curve, double x) {
  for (size_t i = 1; i < curve.points.size(); ++i) {
    const Point& from = curve.points[i - 1];
    const Point& to = curve.points[i];
    if (!IsDrawn(from) || !IsDrawn(to) || x < from.x * (1 - 1e-9) || x > to.x * (1 + 1e-9)) {
      continue;
    }
    return Axis{from.y, to.y}.At(Axis{from.x, to.x}.Share(x));
  }
  return 0;
}

// Characters of a text plot, and columns of the names left of it.
constexpr int kColumns = 64;
constexpr int kRows = 14;
constexpr int kMargin = 10;
constexpr char kMeeting = '#';

// Where a share of an axis falls among so many places.
size_t PlaceOf(double share, int places) {
  return static_cast<size_t>(std::clamp<int64_t>(std::lround(share * (places - 1)), 0, places - 1));
}

void DrawCurve(const Curve& curve, const Axis& across, const Axis& up,
               std::vector<std::string>& canvas) {
  for (int column = 0; column < kColumns; ++column) {
    const double y = Interpolate(curve, across.At(static_cast<double>(column) / (kColumns - 1)));
    if (!(y > 0)) continue;
    char& at = canvas[PlaceOf(1 - up.Share(y), kRows)][static_cast<size_t>(column)];
    at = at == ' ' || at == ':' ? curve.mark : kMeeting;
  }
}

std::string LegendOf(const Plot& plot) {
  std::string legend = absl::StrCat(plot.title, ": ");
  for (const Curve& curve : plot.curves) {
    absl::StrAppend(&legend, &curve == &plot.curves.front() ? "" : ", ", std::string(1, curve.mark),
                    " ", curve.name);
  }
  if (plot.curves.size() > 1) absl::StrAppend(&legend, ", # both");
  if (plot.crossover > 0) absl::StrAppendFormat(&legend, ", : crossover at %.0f", plot.crossover);
  return legend;
}

// Lines of the x axis: its ticks, and their names.
std::string AcrossText(const Plot& plot, const Axis& across) {
  std::string line(kColumns, '-');
  std::string names(kMargin + kColumns + 8, ' ');
  for (const double tick : TicksOf(across, 2, 8)) {
    const size_t column = PlaceOf(across.Share(tick), kColumns);
    line[column] = '+';
    const std::string name = TokensName(tick);
    names.replace(kMargin + 1 + column - (name.size() - 1) / 2, name.size(), name);
  }
  names.erase(names.find_last_not_of(' ') + 1);
  return absl::StrFormat("%*s+%s\n%s %s\n", kMargin, "", line, names, plot.x_name);
}

}  // namespace

std::string Scaled(double value, Unit unit) {
  const Prefix& prefix = PrefixOf(value, unit);
  const double scaled = value / prefix.factor;
  if (prefix.factor == 1 && unit != Unit::kSeconds) {
    return absl::StrFormat("%.0f%s", scaled, prefix.name);
  }
  // Four digits: 1.000, 10.00, 100.0, 1000.
  const int whole = scaled < 1 ? 0 : static_cast<int>(std::floor(std::log10(scaled)));
  return absl::StrFormat("%.*f%s", std::max(3 - whole, 0), scaled, prefix.name);
}

bool HasCurve(const Plot& plot) {
  return std::any_of(plot.curves.begin(), plot.curves.end(), [](const Curve& curve) {
    return std::count_if(curve.points.begin(), curve.points.end(), IsDrawn) > 1;
  });
}

std::string DrawText(const Plot& plot) {
  if (!HasCurve(plot)) return "";
  const Axis across = AcrossOf(plot);
  const Axis up = UpOf(plot);
  std::vector<std::string> canvas(kRows, std::string(kColumns, ' '));
  if (plot.crossover > across.low && plot.crossover < across.high) {
    const size_t column = PlaceOf(across.Share(plot.crossover), kColumns);
    for (std::string& row : canvas) row[column] = ':';
  }
  for (const Curve& curve : plot.curves) DrawCurve(curve, across, up, canvas);
  std::vector<std::string> names(kRows);
  for (const double tick : TicksOf(up, BaseOf(plot.unit), kRows / 2)) {
    names[PlaceOf(1 - up.Share(tick), kRows)] = TickName(tick, plot.unit);
  }
  std::string text = LegendOf(plot) + "\n";
  for (size_t row = 0; row < canvas.size(); ++row) {
    canvas[row].erase(canvas[row].find_last_not_of(' ') + 1);
    absl::StrAppendFormat(&text, "%*s %s%s\n", kMargin - 1, names[row],
                          names[row].empty() ? "|" : "+", canvas[row]);
  }
  return text + AcrossText(plot, across);
}

namespace {

// Of one plot in SVG, in pixels; its curves are drawn in the rectangle between the margins.
constexpr double kPlotWidth = 360;
constexpr double kLeft = 70;
constexpr double kRight = 20;
constexpr double kTop = 86;
constexpr double kInnerWidth = kPlotWidth - kLeft - kRight;
constexpr double kInnerHeight = 240;
constexpr double kBottom = 48;
constexpr double kHeading = 44;
constexpr double kLine = 16;  // of text
constexpr double kHeight = kHeading + kTop + kInnerHeight + kBottom;

// Light ground, and dark where the viewer asks for it. The four tones differ for the color-blind
// too, and by their dashes.
constexpr char kStyle[] = R"(<style>
  .ground { fill: #ffffff; }
  text { fill: #24292f; font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
  .heading { font-size: 15px; font-weight: 600; }
  .title { font-size: 13px; font-weight: 600; }
  .soft { fill: #57606a; }
  .grid { stroke: #d8dee4; stroke-width: 1; }
  .frame { stroke: #8c959f; stroke-width: 1; fill: none; }
  .cross { stroke: #57606a; stroke-width: 1.5; stroke-dasharray: 2 4; }
  .curve { fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round; }
  .a { stroke: #c2410c; } .dot.a { fill: #c2410c; }
  .b { stroke: #1d4ed8; stroke-dasharray: 7 5; } .dot.b { fill: #1d4ed8; }
  .c { stroke: #15803d; stroke-dasharray: 2 5; } .dot.c { fill: #15803d; }
  .d { stroke: #7e22ce; } .dot.d { fill: #7e22ce; }
  .dot { stroke: none; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; }
    text { fill: #e6edf3; }
    .soft { fill: #9198a1; }
    .grid { stroke: #2a313c; }
    .frame { stroke: #656c76; }
    .cross { stroke: #9198a1; }
    .a { stroke: #fb923c; } .dot.a { fill: #fb923c; }
    .b { stroke: #7aa8ff; } .dot.b { fill: #7aa8ff; }
    .c { stroke: #4ade80; } .dot.c { fill: #4ade80; }
    .d { stroke: #d8a4ff; } .dot.d { fill: #d8a4ff; }
  }
</style>
)";

std::string Escaped(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}});
}

// anchor: "start", "middle" or "end".
void AddText(double x, double y, const char* anchor, const char* style, absl::string_view text,
             std::string& svg) {
  absl::StrAppendFormat(&svg,
                        "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" class=\"%s\">%s</text>\n",
                        x, y, anchor, style, Escaped(text));
}

void AddLine(double x1, double y1, double x2, double y2, absl::string_view style,
             std::string& svg) {
  absl::StrAppendFormat(&svg,
                        "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" class=\"%s\"/>\n",
                        x1, y1, x2, y2, style);
}

// One plot, whose upper left corner is at (0, 0).
class SvgPlot {
 public:
  explicit SvgPlot(const Plot& plot) : plot_(plot), across_(AcrossOf(plot)), up_(UpOf(plot)) {}

  void Draw(std::string& svg) const {
    AddText(kLeft, kLine, "start", "title", plot_.title, svg);
    Legend(svg);
    Grid(svg);
    Crossover(svg);
    for (const Curve& curve : plot_.curves) DrawCurve(curve, svg);
  }

 private:
  double X(double x) const { return kLeft + across_.Share(x) * kInnerWidth; }
  double Y(double y) const { return kTop + (1 - up_.Share(y)) * kInnerHeight; }
  static constexpr double kFloor = kTop + kInnerHeight;

  void Legend(std::string& svg) const {
    double y = 2 * kLine + 6;
    for (const Curve& curve : plot_.curves) {
      AddLine(kLeft, y - 4, kLeft + 30, y - 4, absl::StrCat("curve ", curve.tone), svg);
      AddText(kLeft + 38, y, "start", "", curve.name, svg);
      y += kLine;
    }
  }

  void Grid(std::string& svg) const {
    for (const double tick : TicksOf(across_, 2, 7)) {
      AddLine(X(tick), kTop, X(tick), kFloor, "grid", svg);
      AddText(X(tick), kFloor + 18, "middle", "soft", TokensName(tick), svg);
    }
    for (const double tick : TicksOf(up_, BaseOf(plot_.unit), 8)) {
      AddLine(kLeft, Y(tick), kLeft + kInnerWidth, Y(tick), "grid", svg);
      AddText(kLeft - 7, Y(tick) + 4, "end", "soft",
              absl::StrReplaceAll(TickName(tick, plot_.unit), {{" us", " \u00b5s"}}), svg);
    }
    absl::StrAppendFormat(
        &svg, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" class=\"frame\"/>\n",
        kLeft, kTop, kInnerWidth, kInnerHeight);
    AddText(kLeft + kInnerWidth / 2, kFloor + 38, "middle", "soft", plot_.x_name, svg);
  }

  // Named above the frame, where no curve is.
  void Crossover(std::string& svg) const {
    if (plot_.crossover <= across_.low || plot_.crossover >= across_.high) return;
    const double x = X(plot_.crossover);
    AddLine(x, kTop, x, kFloor, "cross", svg);
    // Half of what the name takes: it does not leave the frame's width.
    constexpr double kHalf = 80;
    AddText(std::clamp(x, kLeft + kHalf, kLeft + kInnerWidth - kHalf), kTop - 7, "middle", "soft",
            absl::StrFormat("crossover: %.0f %s", plot_.crossover, plot_.x_name), svg);
  }

  void DrawCurve(const Curve& curve, std::string& svg) const {
    std::string points;
    for (const Point& point : curve.points) {
      if (IsDrawn(point)) absl::StrAppendFormat(&points, "%.1f,%.1f ", X(point.x), Y(point.y));
    }
    absl::StrAppendFormat(&svg, "<polyline points=\"%s\" class=\"curve %s\"/>\n", points,
                          curve.tone);
    if (!IsDrawn(curve.here)) return;
    absl::StrAppendFormat(&svg, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4.5\" class=\"dot %s\"/>\n",
                          X(curve.here.x), Y(curve.here.y), curve.tone);
  }

  const Plot& plot_;
  const Axis across_;
  const Axis up_;
};

}  // namespace

std::string DrawSvg(const std::string& title, const std::vector<Plot>& plots) {
  std::string inner;
  double x = 0;
  for (const Plot& plot : plots) {
    if (!HasCurve(plot)) continue;
    absl::StrAppendFormat(&inner, "<g transform=\"translate(%.0f %.0f)\">\n", x, kHeading);
    SvgPlot(plot).Draw(inner);
    inner += "</g>\n";
    x += kPlotWidth;
  }
  const double width = std::max(x, 2 * kPlotWidth);  // of the heading
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" "
      "viewBox=\"0 0 %.0f %.0f\" role=\"img\">\n<title>%s</title>\n%s",
      width, kHeight, width, kHeight, Escaped(title), kStyle);
  absl::StrAppendFormat(&svg, "<rect width=\"%.0f\" height=\"%.0f\" class=\"ground\"/>\n", width,
                        kHeight);
  AddText(20, 28, "start", "heading", title, svg);
  return absl::StrCat(svg, inner, "</svg>\n");
}

}  // namespace attendant::cli
