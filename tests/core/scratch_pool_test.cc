#include "core/scratch_pool.h"

#include <gtest/gtest.h>

#include <latch>
#include <set>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core/workspace.h"

namespace attendant::core {
namespace {

TEST(ScratchPoolTest, MakesOneForEachTileThatCanRunAtATime) {
  for (const auto& [threads, tiles, size] :
       {std::tuple(3, 100, 3), std::tuple(8, 2, 2), std::tuple(1, 1, 1)}) {
    ScratchPool<int> pool(threads, tiles);
    int made = 0;
    const auto make = [&]() -> absl::StatusOr<int> { return 100 + made++; };
    ASSERT_TRUE(pool.Take(0, make).ok());
    EXPECT_EQ(made, size);
    ASSERT_TRUE(pool.Take(threads - 1, make).ok());
    EXPECT_EQ(made, size);
    EXPECT_EQ(ScratchCount(threads, tiles), size);
  }
}

TEST(ScratchPoolTest, NoTwoLeasesAreOfOneObject) {
  ScratchPool<int> pool(4, 10);
  int made = 0;
  const auto make = [&]() -> absl::StatusOr<int> { return made++; };
  // All by one worker.
  std::vector<ScratchPool<int>::Lease> leases;
  std::set<int> objects;
  for (int i = 0; i < 4; ++i) {
    auto lease = pool.Take(1, make);
    ASSERT_TRUE(lease.ok());
    objects.insert(**lease);
    leases.push_back(*std::move(lease));
  }
  EXPECT_EQ(objects.size(), 4u);
  EXPECT_EQ(pool.Take(1, make).status().code(), absl::StatusCode::kInternal);
  leases.pop_back();
  EXPECT_TRUE(pool.Take(1, make).ok());
}

TEST(ScratchPoolTest, AWorkerGetsWhatItHadBefore) {
  ScratchPool<int> pool(3, 3);
  int made = 0;
  const auto make = [&]() -> absl::StatusOr<int> { return made++; };
  for (const int worker : {2, 0, 1, 2, 0}) EXPECT_EQ(**pool.Take(worker, make), worker);
}

TEST(ScratchPoolTest, PassesAnErrorOnAndGoesOnWhereItEnded) {
  ScratchPool<int> pool(2, 2);
  int made = 0;
  const auto make = [&](int most) {
    return [&made, most]() -> absl::StatusOr<int> {
      if (made == most) return absl::ResourceExhaustedError("full");
      return ++made;
    };
  };
  EXPECT_EQ(pool.Take(0, make(1)).status(), absl::ResourceExhaustedError("full"));
  EXPECT_TRUE(pool.Take(0, make(2)).ok());
  EXPECT_EQ(made, 2);
}

TEST(ScratchPoolTest, GivesBackWhatItHolds) {
  Workspace workspace(nullptr);
  {
    ScratchPool<Buffer<float>> pool(2, 5);
    EXPECT_EQ(workspace.current_bytes(), 0);
    ASSERT_TRUE(pool.Take(0, [&] { return workspace.Allocate<float>(4); }).ok());
    EXPECT_EQ(workspace.current_bytes(), 32);
  }
  EXPECT_EQ(workspace.current_bytes(), 0);
}

TEST(ScratchPoolTest, ThreadsTakeAndGiveBackAtOnce) {
  constexpr int kWorkers = 4;
  ScratchPool<int> pool(kWorkers, 1000);
  std::latch start(kWorkers);
  std::vector<std::thread> threads;
  for (int worker = 0; worker < kWorkers; ++worker) {
    threads.emplace_back([&, worker] {
      start.arrive_and_wait();
      for (int i = 0; i < 1000; ++i) {
        const auto lease = pool.Take(worker, []() -> absl::StatusOr<int> { return 0; });
        ASSERT_TRUE(lease.ok());
        ++**lease;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<ScratchPool<int>::Lease> leases;
  int sum = 0;
  for (int worker = 0; worker < kWorkers; ++worker) {
    leases.push_back(*pool.Take(worker, []() -> absl::StatusOr<int> { return 0; }));
    sum += *leases.back();
  }
  EXPECT_EQ(sum, kWorkers * 1000);
}

}  // namespace
}  // namespace attendant::core
