// A head's softmax weights as a picture of characters.
#ifndef ATTENDANT_CLIENT_CLI_MAP_H_
#define ATTENDANT_CLIENT_CLI_MAP_H_

#include <cstdint>
#include <string>
#include <vector>

namespace attendant::cli {

// weights: (queries, keys), row-major. A line a query, a character a key; where there are more than
// fit a screen, a character stands for the largest of its neighbours. A blank is exactly 0, and the
// darkest character the largest weight, which the first line says.
std::string DrawMap(const std::vector<double>& weights, int64_t queries, int64_t keys);

}  // namespace attendant::cli

#endif  // ATTENDANT_CLIENT_CLI_MAP_H_
