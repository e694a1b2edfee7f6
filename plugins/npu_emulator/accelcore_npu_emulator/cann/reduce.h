// Element types of HCCL and reductions of arrays of them.
#pragma once

#include <cstddef>

#include <third_party/hccl/inc/hccl/hccl_types.h>

namespace emulator {

size_t element_size(HcclDataType type);

// into[i] = into[i] op from[i]; false where the type has no reductions.
bool reduce_into(void *into, const void *from, size_t count, HcclDataType type, HcclReduceOp op);

}  // namespace emulator
