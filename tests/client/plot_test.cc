#include "client/cli/plot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"

namespace attendant::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(PlotTest, NumbersHaveFourDigitsAndAPrefix) {
  EXPECT_EQ(Scaled(0, Unit::kOperations), "0");
  EXPECT_EQ(Scaled(999, Unit::kOperations), "999");
  EXPECT_EQ(Scaled(1000, Unit::kOperations), "1.000 k");
  EXPECT_EQ(Scaled(4'294'967'296, Unit::kOperations), "4.295 G");
  EXPECT_EQ(Scaled(9.3e18, Unit::kOperations), "9.300 E");
  EXPECT_EQ(Scaled(1023, Unit::kBytes), "1023 B");
  EXPECT_EQ(Scaled(1024, Unit::kBytes), "1.000 KiB");
  EXPECT_EQ(Scaled(0x1p20 - 1024, Unit::kBytes), "1023 KiB");
  EXPECT_EQ(Scaled(0x1p37, Unit::kBytes), "128.0 GiB");
  EXPECT_EQ(Scaled(0.0125, Unit::kSeconds), "12.50 ms");
  EXPECT_EQ(Scaled(4.5e-7, Unit::kSeconds), "0.450 us");
  EXPECT_EQ(Scaled(90, Unit::kSeconds), "90.00 s");
  EXPECT_EQ(Scaled(7200, Unit::kSeconds), "2.000 h");
  EXPECT_EQ(Scaled(1e6, Unit::kSeconds), "11.57 days");
  EXPECT_EQ(Scaled(1e9, Unit::kSeconds), "31.69 years");
}

// y = x^2 and y = 16 x over 1 to 256, which meet at 16.
Plot Crossing() {
  Plot plot;
  plot.title = "cost";
  plot.x_name = "tokens";
  plot.unit = Unit::kOperations;
  plot.curves = {Curve{"square", 's', "a", {}, {64, 4096}}, Curve{"line", 'l', "b", {}, {}}};
  for (double x = 1; x <= 256; x *= 2) {
    plot.curves[0].points.push_back({x, x * x});
    plot.curves[1].points.push_back({x, 16 * x});
  }
  plot.crossover = 16;
  return plot;
}

TEST(PlotTest, CurvesMeetWhereTheLineCrosses) {
  const std::vector<std::string> lines = absl::StrSplit(DrawText(Crossing()), '\n');
  EXPECT_EQ(lines[0], "cost: s square, l line, # both, : crossover at 16");
  // The marks of a column from top to bottom, after the names and the axis.
  const auto column = [&](size_t x) {
    std::string marks;
    for (const std::string& line : lines) {
      const char mark = line.size() > 11 + x ? line[11 + x] : ' ';
      if (&line != &lines[0] && absl::StrContains("sl#", mark)) marks += mark;
    }
    return marks;
  };
  EXPECT_EQ(column(8), "ls");
  EXPECT_EQ(column(32), "#");  // half way across 64 columns
  EXPECT_EQ(column(56), "sl");
  EXPECT_THAT(lines, testing::Contains(HasSubstr("tokens")));
  for (const std::string& line : lines) EXPECT_LE(line.size(), 90u) << line;
}

TEST(PlotTest, APointOfNothingIsNotDrawn) {
  Plot plot = Crossing();
  for (Point& point : plot.curves[0].points) point.y = 0;
  EXPECT_TRUE(HasCurve(plot));
  const std::string text = DrawText(plot);
  EXPECT_THAT(text.substr(text.find('\n')), Not(HasSubstr("#")));
  for (Point& point : plot.curves[1].points) point.y = 0;
  EXPECT_FALSE(HasCurve(plot));
  EXPECT_EQ(DrawText(plot), "");
  EXPECT_FALSE(HasCurve(Plot()));
}

TEST(PlotTest, AFlatCurveHasAnAxisToo) {
  Plot plot = Crossing();
  plot.curves.resize(1);
  for (Point& point : plot.curves[0].points) point.y = 1000;
  EXPECT_THAT(DrawText(plot), HasSubstr("1 k +ssssssss"));
}

TEST(PlotTest, ThePictureHasEveryCurveAndItsNames) {
  const std::string svg = DrawSvg("a < b & c", {Crossing(), Plot(), Crossing()});
  EXPECT_THAT(svg, HasSubstr("<title>a &lt; b &amp; c</title>"));
  EXPECT_THAT(svg, HasSubstr("width=\"720\""));  // what has no curve takes no room
  const auto count = [&](absl::string_view what) {
    return std::vector<std::string>(absl::StrSplit(svg, what)).size() - 1;
  };
  EXPECT_EQ(count("<polyline"), 4u);
  EXPECT_EQ(count("<circle"), 2u);
  EXPECT_EQ(count(">crossover: 16 tokens<"), 2u);
  EXPECT_EQ(count(">square<"), 2u);
  EXPECT_EQ(count("prefers-color-scheme: dark"), 1u);
  EXPECT_EQ(count("<g "), count("</g>"));
  for (const char* nonsense : {"nan", "inf"}) EXPECT_THAT(svg, Not(HasSubstr(nonsense)));
}

}  // namespace
}  // namespace attendant::cli
