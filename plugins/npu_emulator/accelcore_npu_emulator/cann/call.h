// One collective or message as a rank calls it: what all ranks have to say alike, and how they are told that they
// do not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <third_party/hccl/inc/hccl/hccl_types.h>

namespace emulator {

struct Call {
  std::string operation;
  uint64_t count = 0;  // elements; 0 where each rank has sizes of its own
  HcclDataType type = HCCL_DATA_TYPE_RESERVED;
  HcclReduceOp reduction = HCCL_REDUCE_RESERVED;
  int root = -1;

  std::string text() const;
};

// "" where all texts are the same; else who says what: "rank 0: A; ranks 1, 2: B".
std::string differences(const std::vector<std::string> &texts);

}  // namespace emulator
