#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>

#include "tests/core/flags.h"

int main(int argc, char** argv) {
  testing::InitGoogleMock(&argc, argv);  // takes its own flags out
  attendant::core::Flags& flags = attendant::core::TheFlags();
  CLI::App app("The tests of core/; --help lists GoogleTest's flags beside these.");
  app.set_help_flag();
  app.add_option("--problems", flags.problems, "Random problems for each type and kernel");
  app.add_option("--seed", flags.seed, "The first one's seed");
  CLI11_PARSE(app, argc, argv);
  return RUN_ALL_TESTS();
}
