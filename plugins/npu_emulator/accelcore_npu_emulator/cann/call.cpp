// How a call is written, and how the calls of several ranks are compared.
#include "communicator.h"

#include <map>

namespace emulator {
namespace {

std::string name(HcclDataType type) {
  static const char *const names[] = {"int8",   "int16",  "int32",  "float16", "float32",  "int64", "uint64",
                                      "uint8",  "uint16", "uint32", "float64", "bfloat16", "int128"};
  return size_t(type) < sizeof names / sizeof *names ? names[type] : "data type " + std::to_string(type);
}

std::string name(HcclReduceOp reduction) {
  static const char *const names[] = {"sum", "product", "maximum", "minimum"};
  return size_t(reduction) < sizeof names / sizeof *names ? names[reduction]
                                                          : "reduction " + std::to_string(reduction);
}

}  // namespace

std::string Call::text() const {
  std::string text = operation;
  if (type != HCCL_DATA_TYPE_RESERVED) {
    text += (count ? " of " + std::to_string(count) : std::string(" of")) + " " + name(type);
  }
  if (reduction != HCCL_REDUCE_RESERVED) text += ", " + name(reduction);
  if (root >= 0) text += ", root " + std::to_string(root);
  return text;
}

std::string differences(const std::vector<std::string> &texts) {
  std::map<std::string, std::string> ranks;  // by what they say
  std::vector<std::string> order;
  for (size_t rank = 0; rank < texts.size(); rank++) {
    std::string &who = ranks[texts[rank]];
    if (who.empty()) order.push_back(texts[rank]);
    who += (who.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (order.size() < 2) return "";
  std::string told;
  for (const std::string &text : order) {
    const std::string &who = ranks[text];
    bool several = who.find(',') != std::string::npos;
    told += (told.empty() ? "" : "; ") + std::string(several ? "ranks " : "rank ") + who + ": " + text;
  }
  return told;
}

}  // namespace emulator
