#include "client/cli/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/temp_dir.h"

namespace attendant::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string PathOf(const std::string& name) {
  static const TempDir folder;
  return folder.PathOf(name);
}

std::string WriteBytes(const std::string& name, const std::string& bytes) {
  std::ofstream(PathOf(name), std::ios::binary) << bytes;
  return PathOf(name);
}

// A file as NumPy writes it, with any header.
std::string Npy(const std::string& header, const std::string& elements, char version = 1) {
  std::string bytes("\x93NUMPY", 6);
  bytes += {version, '\0', static_cast<char>(header.size() & 0xff),
            static_cast<char>(header.size() >> 8)};
  if (version > 1) bytes += std::string(2, '\0');
  return bytes + header + elements;
}

TEST(NpyTest, WhatIsWrittenIsReadBack) {
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  const Tensor tensor{
      v1::DATA_TYPE_FLOAT32, {2, 3}, std::string(TensorRef(values, {2, 3}).bytes())};
  const std::string path = PathOf("round_trip.npy");
  ASSERT_TRUE(WriteNpy(path, tensor).ok());
  const auto read = ReadNpy(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->dtype, v1::DATA_TYPE_FLOAT32);
  EXPECT_THAT(read->shape, ElementsAre(2, 3));
  EXPECT_THAT(read->values<float>(), ElementsAre(1, 2, 3, 4, 5, 6));
  // NumPy aligns the elements to 64 bytes.
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  EXPECT_EQ((static_cast<int64_t>(file.tellg()) - 24) % 64, 0);
}

TEST(NpyTest, BoolsAreBytes) {
  const Tensor tensor{v1::DATA_TYPE_BOOL, {3}, std::string("\1\0\1", 3)};
  const std::string path = PathOf("bool.npy");
  ASSERT_TRUE(WriteNpy(path, tensor).ok());
  const auto read = ReadNpy(path);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->dtype, v1::DATA_TYPE_BOOL);
  EXPECT_EQ(read->bytes, tensor.bytes);
}

TEST(NpyTest, RanksAndEmptyAxesSurvive) {
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{}, {0}, {1}, {3, 0}, {1, 1, 1, 1}}) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    const Tensor tensor{v1::DATA_TYPE_FLOAT64, shape,
                        std::string(static_cast<size_t>(count) * 8, 'x')};
    const std::string path = PathOf("ranks.npy");
    ASSERT_TRUE(WriteNpy(path, tensor).ok());
    const auto read = ReadNpy(path);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->shape, shape);
    EXPECT_EQ(read->bytes, tensor.bytes);
  }
}

TEST(NpyTest, EveryVersionIsRead) {
  const std::string header = "{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }\n";
  for (const char version : {'\1', '\2', '\3'}) {
    const auto read =
        ReadNpy(WriteBytes("version.npy", Npy(header, std::string(8, '\0'), version)));
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_THAT(read->values<double>(), ElementsAre(0));
  }
}

struct BadFile {
  std::string bytes;
  const char* message;
};

class BadNpyTest : public testing::TestWithParam<BadFile> {};

TEST_P(BadNpyTest, IsRefusedByNameWithTheReason) {
  const std::string path = WriteBytes("bad.npy", GetParam().bytes);
  const absl::Status status = ReadNpy(path).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(path));
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().message));
}

const char kGood[] = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }\n";

INSTANTIATE_TEST_SUITE_P(
    Files, BadNpyTest,
    testing::Values(
        BadFile{"", "no .npy file"}, BadFile{"PK\3\4 a zip archive", "no .npy file"},
        BadFile{Npy(kGood, "", 9), "version is 9"},
        BadFile{Npy(kGood, std::string(16, ' ')).substr(0, 9), "cut off"},
        BadFile{Npy(kGood, "").substr(0, 30), "cut off"},
        BadFile{Npy(kGood, std::string(15, ' ')), "15 bytes"},
        BadFile{Npy(kGood, std::string(17, ' ')), "says 16"}, BadFile{Npy("{}", ""), "lacks"},
        BadFile{Npy("{'descr': '<i8', 'fortran_order': False, 'shape': (0,), }", ""), "'<i8'"},
        BadFile{Npy("{'descr': '>f4', 'fortran_order': False, 'shape': (0,), }", ""), "'>f4'"},
        BadFile{
            Npy("{'descr': '<f4', 'fortran_order': True, 'shape': (1, 1), }", std::string(4, ' ')),
            "Fortran order"},
        BadFile{Npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 2), }", ""), "'-1'"},
        BadFile{Npy("{'descr': '<f4', 'fortran_order': False, 'shape': (two,), }", ""), "'two'"},
        BadFile{Npy("{'descr': '<f4', 'fortran_order': False, 'shape': 2, }", ""), "no shape"},
        // 2^32 x 2^32: the product overflows.
        BadFile{Npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }",
                    ""),
                "0 bytes of elements"}));

TEST(NpyTest, FilesThatCannotBeOpenedAreNamed) {
  EXPECT_EQ(ReadNpy("/no/such/file.npy").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(ReadNpy("/no/such/file.npy").status().message()),
              HasSubstr("/no/such/file.npy: No such file"));
  EXPECT_EQ(WriteNpy("/no/such/file.npy", {v1::DATA_TYPE_FLOAT32, {0}, ""}).code(),
            absl::StatusCode::kPermissionDenied);
}

}  // namespace
}  // namespace attendant::cli
