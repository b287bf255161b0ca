#include "bench/memory.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "core/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/memory.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // compiles the rest of this file once a target
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace attendant::bench::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// How far ahead memory is asked for: the hardware prefetcher alone leaves a tenth of the bandwidth
// unused (measured on Zen 3: 512 B 0.93, 1 KiB to 8 KiB 1.00, none 0.90). Past the end it does no
// harm.
constexpr int64_t kPrefetchWords = 4096 / sizeof(uint64_t);
constexpr int64_t kLineWords = 64 / sizeof(uint64_t);

// The exclusive or of all words: a result that needs every byte, at one cheap instruction a load.
uint64_t XorOf(const uint64_t* words, int64_t count) {
  const hn::ScalableTag<uint64_t> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto x0 = hn::Zero(d), x1 = hn::Zero(d), x2 = hn::Zero(d), x3 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    for (int64_t word = 0; word < 4 * lanes; word += kLineWords) {
      hwy::Prefetch(words + i + kPrefetchWords + word);
    }
    x0 = hn::Xor(x0, hn::Load(d, words + i));
    x1 = hn::Xor(x1, hn::Load(d, words + i + lanes));
    x2 = hn::Xor(x2, hn::Load(d, words + i + 2 * lanes));
    x3 = hn::Xor(x3, hn::Load(d, words + i + 3 * lanes));
  }
  for (; i < count; i += lanes) x0 = hn::Xor(x0, hn::Load(d, words + i));
  HWY_ALIGN uint64_t folded[HWY_MAX_BYTES / sizeof(uint64_t)];
  hn::Store(hn::Xor(hn::Xor(x0, x1), hn::Xor(x2, x3)), d, folded);
  uint64_t result = 0;
  for (int64_t lane = 0; lane < lanes; ++lane) result ^= folded[lane];
  return result;
}

}  // namespace attendant::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attendant::bench {

HWY_EXPORT(XorOf);

int64_t LastLevelCacheBytes() {
  // Not by sysconf, which may tell the whole socket's: 256 MiB on a Zen 3 whose cores share 32.
  int64_t bytes = 0;
  for (int index = 0;; ++index) {
    std::ifstream file(absl::StrCat("/sys/devices/system/cpu/cpu0/cache/index", index, "/size"));
    std::string size;
    if (!(file >> size)) break;
    int64_t kibibytes = 0;
    if (absl::SimpleAtoi(absl::StripSuffix(size, "K"), &kibibytes)) {
      bytes = std::max(bytes, kibibytes << 10);
    }
  }
  return bytes > 0 ? bytes : int64_t{32} << 20;
}

absl::Status Read(core::Scheduler& scheduler, const std::vector<Stretch>& stretches) {
  // What was read has to go somewhere, or the compiler would leave the reading out.
  std::atomic<uint64_t> sink = 0;
  return scheduler.Run(
      {{"read", static_cast<int64_t>(stretches.size()), [&](const core::TileContext& context) {
          const Stretch& stretch = stretches[context.tile];
          sink.fetch_xor(HWY_DYNAMIC_DISPATCH(XorOf)(static_cast<const uint64_t*>(stretch.data),
                                                     stretch.bytes / 8),
                         std::memory_order_relaxed);
          return absl::OkStatus();
        }}});
}

}  // namespace attendant::bench
#endif  // HWY_ONCE
