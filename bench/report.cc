#include "bench/report.h"

#include <google/protobuf/util/json_util.h>

#include <cstdio>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "core/gemm.h"
#include "core/kernel.h"
#include "core/machine.h"
#include "core/version.h"

namespace attendant::bench {

CaseResult ResultFor(const char* mode, const Case& c, const Settings& settings) {
  // The explicit path has one kernel, the libraries'.
  const core::Kernel kernel =
      c.path == core::Path::kExplicit ? core::Kernel::kOneDnn : settings.kernel;
  CaseResult result;
  result.set_mode(mode);
  result.set_name(c.name);
  result.set_version(core::Version());
  result.set_cpu(core::CpuName());
  result.set_target(core::SimdTarget());
  result.set_kernel(core::NameOf(kernel, c.dtype));
  result.set_threads(settings.threads);
  result.set_dtype(absl::AsciiStrToLower(core::NameOf(c.dtype)));
  result.set_path(std::string(core::NameOf(c.path)));
  result.set_layout(c.layout == core::Layout::kBhtd ? "bhtd" : "bthd");
  result.set_causal(c.causal != core::Causal::kNone);
  result.set_b(static_cast<int32_t>(c.batch));
  result.set_h(static_cast<int32_t>(c.heads));
  result.set_hkv(static_cast<int32_t>(c.kv_heads));
  result.set_tq(static_cast<int32_t>(c.queries));
  result.set_tk(static_cast<int32_t>(c.keys));
  result.set_d(static_cast<int32_t>(c.width));
  if (c.window_left.has_value()) result.set_window_left(static_cast<int32_t>(*c.window_left));
  if (c.key_length.has_value()) result.set_key_length(static_cast<int32_t>(*c.key_length));
  result.set_softcap(c.softcap);
  result.set_alibi_slope(c.alibi_slope);
  result.set_mask(NameOf(c.mask));
  result.set_flops(FlopsOf(c));
  result.set_pass(NameOf(c.pass));
  result.set_key_value_bytes(
      static_cast<double>(2 * c.batch * c.kv_heads * c.keys * c.width * core::SizeOf(c.dtype)));
  return result;
}

void PrintMachine(const Settings& settings) {
  std::printf("attend_bench %s, %s, %s, float32 by %s, float64 by %s, %s, %d threads\n",
              core::Version(), core::CpuName().c_str(), core::SimdTarget().c_str(),
              core::NameOf(settings.kernel, core::DType::kFloat32).c_str(),
              core::NameOf(settings.kernel, core::DType::kFloat64).c_str(),
              core::GemmLibraryVersion().c_str(), settings.threads);
}

std::string ToJson(const std::vector<CaseResult>& results) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json = "[\n";
  for (size_t i = 0; i < results.size(); ++i) {
    if (i > 0) json += ",\n";
    // Cannot fail: every message of a proto3 file without Any has a JSON form.
    (void)google::protobuf::util::MessageToJsonString(results[i], &json, options);
  }
  return json + "]\n";
}

}  // namespace attendant::bench
