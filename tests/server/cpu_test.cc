#include "server/cpu.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/machine.h"
#include "tests/temp_dir.h"

namespace attendant::server {
namespace {

// A machine made of files.
class CgroupTest : public testing::Test {
 protected:
  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = folder_.PathOf("root") + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }

  // This process in a group of version 2, or of the version 1's cpu and memory.
  void MountVersion2(const std::string& top, const std::string& group) {
    Write("/proc/self/cgroup", absl::StrCat("0::", group));
    Write("/proc/self/mountinfo",
          absl::StrCat("22 1 0:5 / /proc rw - proc proc rw\n", "31 23 0:28 ", top,
                       " /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw"));
  }
  void MountVersion1(const std::string& top, const std::string& group) {
    Write("/proc/self/cgroup",
          absl::StrCat("9:name=systemd:/\n4:memory:", group, "\n2:cpu,cpuacct:", group, "\n0::/"));
    Write(
        "/proc/self/mountinfo",
        absl::StrCat("32 31 0:29 ", top, " /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n",
                     "35 31 0:32 ", top, " /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
                     "36 31 0:33 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"));
  }

  CgroupLimits Read() { return ReadCgroupLimits(folder_.PathOf("root")); }

 private:
  TempDir folder_;
};

TEST_F(CgroupTest, NoFilesAreNoLimit) {
  EXPECT_FALSE(Read().cpus.has_value());
  EXPECT_FALSE(Read().memory_bytes.has_value());
}

TEST_F(CgroupTest, Version2OfAContainer) {
  MountVersion2("/", "/");
  Write("/sys/fs/cgroup/cpu.max", "150000 100000");
  Write("/sys/fs/cgroup/memory.max", "536870912");
  Write("/sys/fs/cgroup/memory.high", "max");
  EXPECT_EQ(Read().cpus, 1.5);
  EXPECT_EQ(Read().memory_bytes, 536870912);
}

TEST_F(CgroupTest, Version2WithoutALimitSaysMax) {
  MountVersion2("/", "/a");
  Write("/sys/fs/cgroup/a/cpu.max", "max 100000");
  Write("/sys/fs/cgroup/a/memory.max", "max");
  EXPECT_FALSE(Read().cpus.has_value());
  EXPECT_FALSE(Read().memory_bytes.has_value());
}

TEST_F(CgroupTest, TheSmallestOnTheWayUpCounts) {
  MountVersion2("/", "/pod/app/worker");
  Write("/sys/fs/cgroup/pod/cpu.max", "300000 100000");
  Write("/sys/fs/cgroup/pod/app/cpu.max", "50000 10000");
  Write("/sys/fs/cgroup/pod/app/worker/cpu.max", "max 100000");
  Write("/sys/fs/cgroup/pod/memory.max", "2000");
  Write("/sys/fs/cgroup/pod/app/memory.max", "3000");
  EXPECT_EQ(Read().cpus, 3);
  EXPECT_EQ(Read().memory_bytes, 2000);
}

TEST_F(CgroupTest, AboveMemoryHighTheKernelHoldsUsBack) {
  MountVersion2("/", "/");
  Write("/sys/fs/cgroup/memory.max", "2000");
  Write("/sys/fs/cgroup/memory.high", "1500");
  EXPECT_EQ(Read().memory_bytes, 1500);
}

TEST_F(CgroupTest, Version1) {
  MountVersion1("/", "/pod/app");
  Write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1");
  Write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  Write("/sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us", "250000");
  Write("/sys/fs/cgroup/cpu/pod/cpu.cfs_period_us", "100000");
  Write("/sys/fs/cgroup/cpu/pod/app/cpu.cfs_quota_us", "-1");
  Write("/sys/fs/cgroup/cpu/pod/app/cpu.cfs_period_us", "100000");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  Write("/sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "9223372036854771712");
  Write("/sys/fs/cgroup/memory/pod/app/memory.limit_in_bytes", "1073741824");
  EXPECT_EQ(Read().cpus, 2.5);
  EXPECT_EQ(Read().memory_bytes, 1073741824);
}

TEST_F(CgroupTest, Version1OfAContainerShowsItsOwnGroupAtTheMount) {
  MountVersion1("/docker/12", "/docker/12/inner");
  Write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000");
  Write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  Write("/sys/fs/cgroup/cpu/inner/cpu.cfs_quota_us", "300000");
  Write("/sys/fs/cgroup/cpu/inner/cpu.cfs_period_us", "100000");
  EXPECT_EQ(Read().cpus, 3);
}

TEST_F(CgroupTest, AGroupOutsideTheMountIsSeenAtTheMount) {
  for (const char* const group : {"/docker/123", "/../other"}) {
    MountVersion2(group[1] == 'd' ? "/docker/12" : "/", group);
    Write("/sys/fs/cgroup/cpu.max", "200000 100000");
    EXPECT_EQ(Read().cpus, 2) << group;
  }
}

TEST_F(CgroupTest, WhatMakesNoSenseLimitsNothing) {
  MountVersion2("/", "/");
  for (const char* const text : {"", "0 100000", "100000 0", "100000", "two one"}) {
    Write("/sys/fs/cgroup/cpu.max", text);
    Write("/sys/fs/cgroup/memory.max", "0");
    EXPECT_FALSE(Read().cpus.has_value()) << text;
    EXPECT_FALSE(Read().memory_bytes.has_value());
  }
}

TEST(CpuTest, ThreadsAreTheWholeCpusOfTheQuota) {
  const auto cpus = [](int affinity, std::optional<double> quota) {
    CgroupLimits limits;
    limits.cpus = quota;
    return UsableCpus(affinity, limits);
  };
  EXPECT_EQ(cpus(8, std::nullopt), 8);
  EXPECT_EQ(cpus(8, 2.0), 2);
  EXPECT_EQ(cpus(8, 2.9), 2);
  EXPECT_EQ(cpus(8, 0.25), 1);
  EXPECT_EQ(cpus(2, 7.5), 2);
  EXPECT_EQ(cpus(8, 1e12), 8);
  EXPECT_EQ(cpus(0, std::nullopt), 1);
}

TEST(CpuTest, TheAffinityMaskCounts) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &before)) {
      CPU_SET(cpu, &one);
      break;
    }
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(UsableCpus(core::AvailableCpus(), {}), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
  EXPECT_EQ(UsableCpus(core::AvailableCpus(), {}), CPU_COUNT(&before));
}

TEST(CpuTest, MemoryIsTheMachinesOrTheLimit) {
  CgroupLimits limits;
  EXPECT_EQ(UsableMemoryBytes(1000, limits), 1000);
  limits.memory_bytes = 400;
  EXPECT_EQ(UsableMemoryBytes(1000, limits), 400);
  limits.memory_bytes = 4000;
  EXPECT_EQ(UsableMemoryBytes(1000, limits), 1000);
}

}  // namespace
}  // namespace attendant::server
