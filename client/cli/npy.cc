#include "client/cli/npy.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "core/checked_math.h"

namespace attendant::cli {
namespace {

constexpr absl::string_view kMagic("\x93NUMPY", 6);
// NumPy's own readers refuse longer headers too.
constexpr size_t kLongestHeader = 64 << 10;

struct Header {
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  std::vector<int64_t> shape;
};

// NumPy's names of the element types.
struct Element {
  v1::DataType dtype;
  absl::string_view descr;
  int64_t size;
};
constexpr Element kElements[] = {{v1::DATA_TYPE_FLOAT32, "<f4", 4},
                                 {v1::DATA_TYPE_FLOAT64, "<f8", 8},
                                 {v1::DATA_TYPE_FLOAT16, "<f2", 2},
                                 {v1::DATA_TYPE_BOOL, "|b1", 1}};

const Element& ElementOf(v1::DataType dtype) {
  return *std::find_if(std::begin(kElements), std::end(kElements),
                       [&](const Element& element) { return element.dtype == dtype; });
}

// What stands after "'key':" in a Python dictionary's text, leading blanks removed.
std::optional<absl::string_view> ValueOf(absl::string_view dictionary, absl::string_view key) {
  for (const char quote : {'\'', '"'}) {
    const std::string name = absl::StrCat(std::string(1, quote), key, std::string(1, quote));
    const size_t at = dictionary.find(name);
    if (at == absl::string_view::npos) continue;
    absl::string_view rest = absl::StripLeadingAsciiWhitespace(dictionary.substr(at + name.size()));
    if (absl::ConsumePrefix(&rest, ":")) return absl::StripLeadingAsciiWhitespace(rest);
  }
  return std::nullopt;
}

absl::StatusOr<std::vector<int64_t>> ParseShape(absl::string_view text) {
  const size_t end = text.find(')');
  if (text.empty() || text[0] != '(' || end == absl::string_view::npos) {
    return absl::InvalidArgumentError("its header has no shape");
  }
  std::vector<int64_t> shape;
  for (absl::string_view part : absl::StrSplit(text.substr(1, end - 1), ',')) {
    part = absl::StripAsciiWhitespace(part);
    if (part.empty()) continue;  // "(3,)" and "()"
    int64_t size = 0;
    if (!absl::SimpleAtoi(part, &size) || size < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("its shape has '", part, "', which is no size"));
    }
    shape.push_back(size);
  }
  return shape;
}

absl::StatusOr<Header> ParseHeader(absl::string_view text) {
  const auto descr = ValueOf(text, "descr");
  const auto order = ValueOf(text, "fortran_order");
  const auto shape = ValueOf(text, "shape");
  if (!descr || !order || !shape) {
    return absl::InvalidArgumentError("its header lacks descr, fortran_order or shape");
  }
  Header header;
  for (const Element& element : kElements) {
    for (const char* quote : {"'", "\""}) {
      if (absl::StartsWith(*descr, absl::StrCat(quote, element.descr, quote))) {
        header.dtype = element.dtype;
      }
    }
  }
  if (header.dtype == v1::DATA_TYPE_UNSPECIFIED) {
    return absl::InvalidArgumentError(absl::StrCat(
        "its elements are ", descr->substr(0, descr->find(',')),
        ", must be '<f4', '<f8', '<f2' or '|b1': save array.astype('float32'), 'float64', "
        "'float16' or 'bool'"));
  }
  auto sizes = ParseShape(*shape);
  if (!sizes.ok()) return sizes.status();
  header.shape = *std::move(sizes);
  // The order matters only where there are two axes to exchange.
  if (!absl::StartsWith(*order, "False") && header.shape.size() > 1) {
    return absl::InvalidArgumentError(
        "it is in Fortran order: save numpy.ascontiguousarray(array)");
  }
  return header;
}

// The text of the header, with the file left at the first element.
absl::StatusOr<std::string> ReadHeader(std::istream& file) {
  char start[8];
  if (!file.read(start, sizeof(start)) || absl::string_view(start, kMagic.size()) != kMagic) {
    return absl::InvalidArgumentError("it is no .npy file");
  }
  const int version = static_cast<unsigned char>(start[6]);
  if (version < 1 || version > 3) {
    return absl::InvalidArgumentError(
        absl::StrCat("its .npy version is ", version, ", must be 1 to 3"));
  }
  unsigned char length_bytes[4] = {};
  file.read(reinterpret_cast<char*>(length_bytes), version == 1 ? 2 : 4);
  size_t length = 0;
  for (int i = 3; i >= 0; --i) length = length << 8 | length_bytes[i];
  if (!file || length > kLongestHeader) {
    return absl::InvalidArgumentError("its header is cut off or too long");
  }
  std::string header(length, '\0');
  if (!file.read(header.data(), static_cast<std::streamsize>(length))) {
    return absl::InvalidArgumentError("its header is cut off");
  }
  return header;
}

absl::StatusOr<Tensor> Read(std::istream& file) {
  const auto text = ReadHeader(file);
  if (!text.ok()) return text.status();
  const auto header = ParseHeader(*text);
  if (!header.ok()) return header.status();
  int64_t bytes = ElementOf(header->dtype).size;
  for (const int64_t size : header->shape) bytes = core::SaturatingProduct({bytes, size});
  const std::streampos data = file.tellg();
  file.seekg(0, std::ios::end);
  const auto actual = static_cast<int64_t>(file.tellg() - data);
  if (actual != bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("it has ", actual, " bytes of elements, its shape (",
                     absl::StrJoin(header->shape, ", "), ") says ", bytes));
  }
  Tensor tensor{header->dtype, header->shape, std::string(static_cast<size_t>(bytes), '\0')};
  file.seekg(data);
  if (!file.read(tensor.bytes.data(), bytes)) {
    return absl::InvalidArgumentError("its elements cannot be read");
  }
  return tensor;
}

}  // namespace

absl::StatusOr<Tensor> ReadNpy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  auto tensor = Read(file);
  if (tensor.ok()) return tensor;
  return absl::Status(tensor.status().code(), absl::StrCat(path, ": ", tensor.status().message()));
}

absl::Status WriteNpy(const std::string& path, const Tensor& tensor) {
  std::string header = absl::StrCat(
      "{'descr': '", ElementOf(tensor.dtype).descr, "', 'fortran_order': False, 'shape': (",
      absl::StrJoin(tensor.shape, ", "), tensor.shape.size() == 1 ? ",), }" : "), }");
  // Magic, version and length take 10 bytes; the elements start at a multiple of 64, after a
  // newline.
  header.append(63 - (10 + header.size()) % 64, ' ');
  header += '\n';
  std::ofstream file(path, std::ios::binary);
  file << kMagic << '\x01' << '\0' << static_cast<char>(header.size() & 0xff)
       << static_cast<char>(header.size() >> 8) << header << tensor.bytes;
  file.close();
  if (file) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat(path, ": cannot be written: ", std::strerror(errno)));
}

}  // namespace attendant::cli
