// HCCL's collectives, through slots of shared memory: each rank shows a piece of its data, all meet, each takes what
// it needs, all meet again.
#include <algorithm>
#include <cstring>
#include <memory>

#include "communicator.h"

namespace emulator {
namespace {

using Bytes = std::unique_ptr<char[]>;
using Sizes = std::vector<size_t>;

// Nothing more to do after an error.
#define TRY(expression) \
  if (HcclResult error = (expression)) return error

HcclResult all_reduce(Communicator &group, const void *send, void *receive, uint64_t count, HcclDataType type,
                      HcclReduceOp op) {
  size_t size = element_size(type), piece = kSlot / size;
  for (uint64_t done = 0; done == 0 || done < count; done += piece) {
    size_t now = std::min<uint64_t>(piece, count - done);
    char *out = static_cast<char *>(receive) + done * size;
    memcpy(group.slot(group.rank()), static_cast<const char *>(send) + done * size, now * size);
    TRY(group.barrier());
    // Every rank adds in the same order, so that all get the same bits.
    memcpy(out, group.slot(0), now * size);
    for (int rank = 1; rank < group.size(); rank++) {
      if (!reduce_into(out, group.slot(rank), now, type, op)) {
        std::string what = "reduction " + std::to_string(op) + " of data type " + std::to_string(type);
        return group.refuse(HCCL_E_NOT_SUPPORT, what + " is not emulated");
      }
    }
    TRY(group.barrier());
  }
  return HCCL_SUCCESS;
}

HcclResult broadcast(Communicator &group, void *buffer, size_t bytes, int root) {
  for (size_t done = 0; done == 0 || done < bytes; done += kSlot) {
    size_t now = std::min(kSlot, bytes - done);
    char *data = static_cast<char *>(buffer) + done;
    if (group.rank() == root) memcpy(group.slot(root), data, now);
    TRY(group.barrier());
    if (group.rank() != root) memcpy(data, group.slot(root), now);
    TRY(group.barrier());
  }
  return HCCL_SUCCESS;
}

// Bytes from every rank to every rank; each collective that only moves data is a case of this.
struct Exchange {
  explicit Exchange(int ranks)
      : send_sizes(size_t(ranks)), send_offsets(send_sizes), receive_sizes(send_sizes), receive_offsets(send_sizes) {}

  Sizes send_sizes, send_offsets, receive_sizes, receive_offsets;
};

// What a rank sends is what the others expect of it. All learn the sizes of all, so that each refuses alike; and all
// take part in as many rounds as the longest message needs.
HcclResult agree(Communicator &group, const Exchange &plan, size_t *longest) {
  size_t ranks = size_t(group.size()), bytes = ranks * sizeof(size_t);
  memcpy(group.slot(group.rank()), plan.send_sizes.data(), bytes);
  memcpy(group.slot(group.rank()) + bytes, plan.receive_sizes.data(), bytes);
  TRY(group.barrier());
  auto shown = [&](size_t rank, size_t place) {
    size_t size;
    memcpy(&size, group.slot(int(rank)) + place * sizeof size, sizeof size);
    return size;
  };
  std::string told;
  *longest = 0;
  for (size_t from = 0; from < ranks; from++) {
    for (size_t to = 0; to < ranks; to++) {
      size_t sent = shown(from, to), expected = shown(to, ranks + from);
      *longest = std::max(*longest, sent);
      if (sent == expected || !told.empty()) continue;
      told = "rank " + std::to_string(from) + ": sends " + std::to_string(sent) + " bytes to rank " +
             std::to_string(to) + "; rank " + std::to_string(to) + ": receives " + std::to_string(expected) +
             " bytes from rank " + std::to_string(from);
    }
  }
  TRY(group.barrier());
  return told.empty() ? HcclResult(HCCL_SUCCESS) : group.refuse_difference(told);
}

HcclResult exchange(Communicator &group, const void *send, void *receive, const Exchange &plan) {
  size_t ranks = size_t(group.size()), me = size_t(group.rank()), piece = kSlot / ranks, longest;
  TRY(agree(group, plan, &longest));
  for (size_t done = 0; done < longest; done += piece) {
    auto now = [&](size_t size) { return size > done ? std::min(piece, size - done) : 0; };
    for (size_t to = 0; to < ranks; to++) {
      const char *from = static_cast<const char *>(send) + plan.send_offsets[to] + done;
      if (size_t bytes = now(plan.send_sizes[to])) memcpy(group.slot(group.rank()) + to * piece, from, bytes);
    }
    TRY(group.barrier());
    for (size_t from = 0; from < ranks; from++) {
      char *to = static_cast<char *>(receive) + plan.receive_offsets[from] + done;
      if (size_t bytes = now(plan.receive_sizes[from])) memcpy(to, group.slot(int(from)) + me * piece, bytes);
    }
    TRY(group.barrier());
  }
  return HCCL_SUCCESS;
}

// HCCL gives counts and displacements as arrays of uint64_t, in elements.
void fill(Sizes *sizes, const void *counts, size_t size) {
  for (size_t rank = 0; rank < sizes->size(); rank++) {
    (*sizes)[rank] = size_t(static_cast<const uint64_t *>(counts)[rank]) * size;
  }
}

Communicator &group_of(HcclComm handle) { return *static_cast<Communicator *>(handle); }

}  // namespace
}  // namespace emulator

using namespace emulator;

EXPORT HcclResult HcclAllReduce(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp op,
                                HcclComm handle, aclrtStream) {
  Communicator &group = group_of(handle);
  TRY(group.meet({"HcclAllReduce", count, type, op}));
  return all_reduce(group, send, receive, count, type, op);
}

EXPORT HcclResult HcclReduce(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp op,
                             uint32_t root, HcclComm handle, aclrtStream) {
  Communicator &group = group_of(handle);
  TRY(group.meet({"HcclReduce", count, type, op, int(root)}));
  if (group.rank() == int(root)) return all_reduce(group, send, receive, count, type, op);
  Bytes unused(new char[count * element_size(type)]);
  return all_reduce(group, send, unused.get(), count, type, op);
}

EXPORT HcclResult HcclBroadcast(void *buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                                aclrtStream) {
  Communicator &group = group_of(handle);
  TRY(group.meet({"HcclBroadcast", count, type, HCCL_REDUCE_RESERVED, int(root)}));
  return broadcast(group, buffer, count * element_size(type), int(root));
}

EXPORT HcclResult HcclAllGather(void *send, void *receive, uint64_t count, HcclDataType type, HcclComm handle,
                                aclrtStream) {
  Communicator &group = group_of(handle);
  TRY(group.meet({"HcclAllGather", count, type}));
  size_t bytes = count * element_size(type);
  Exchange plan(group.size());
  for (size_t rank = 0; rank < size_t(group.size()); rank++) {
    plan.send_sizes[rank] = plan.receive_sizes[rank] = bytes;
    plan.receive_offsets[rank] = rank * bytes;
  }
  return exchange(group, send, receive, plan);
}

EXPORT HcclResult HcclAllGatherV(void *send, uint64_t count, void *receive, const void *counts, const void *offsets,
                                 HcclDataType type, HcclComm handle, aclrtStream) {
  Communicator &group = group_of(handle);
  TRY(group.meet({"HcclAllGatherV", 0, type}));
  size_t size = element_size(type);
  Exchange plan(group.size());
  std::fill(plan.send_sizes.begin(), plan.send_sizes.end(), count * size);
  fill(&plan.receive_sizes, counts, size);
  fill(&plan.receive_offsets, offsets, size);
  return exchange(group, send, receive, plan);
}

EXPORT HcclResult HcclReduceScatter(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp op,
                                    HcclComm handle, aclrtStream) {
  Communicator &group = group_of(handle);
  TRY(group.meet({"HcclReduceScatter", count, type, op}));
  size_t bytes = count * element_size(type), ranks = size_t(group.size());
  Bytes all(new char[bytes * ranks]);
  TRY(all_reduce(group, send, all.get(), count * ranks, type, op));
  memcpy(receive, all.get() + bytes * size_t(group.rank()), bytes);
  return HCCL_SUCCESS;
}

EXPORT HcclResult HcclReduceScatterV(void *send, const void *counts, const void *offsets, void *receive,
                                     uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm handle,
                                     aclrtStream) {
  Communicator &group = group_of(handle);
  TRY(group.meet({"HcclReduceScatterV", 0, type, op}));
  Sizes elements(size_t(group.size())), starts(elements);
  fill(&elements, counts, 1);
  fill(&starts, offsets, 1);
  size_t total = 0, size = element_size(type), me = size_t(group.rank()), longest;
  Exchange plan(group.size());
  fill(&plan.send_sizes, counts, size);
  std::fill(plan.receive_sizes.begin(), plan.receive_sizes.end(), count * size);
  TRY(agree(group, plan, &longest));
  for (size_t rank = 0; rank < elements.size(); rank++) total = std::max(total, starts[rank] + elements[rank]);
  Bytes all(new char[total * size]);
  TRY(all_reduce(group, send, all.get(), total, type, op));
  memcpy(receive, all.get() + starts[me] * size, count * size);
  return HCCL_SUCCESS;
}

EXPORT HcclResult HcclScatter(void *send, void *receive, uint64_t count, HcclDataType type, uint32_t root,
                              HcclComm handle, aclrtStream) {
  Communicator &group = group_of(handle);
  TRY(group.meet({"HcclScatter", count, type, HCCL_REDUCE_RESERVED, int(root)}));
  size_t bytes = count * element_size(type);
  Exchange plan(group.size());
  plan.receive_sizes[root] = bytes;
  if (group.rank() == int(root)) {
    for (size_t rank = 0; rank < size_t(group.size()); rank++) {
      plan.send_sizes[rank] = bytes;
      plan.send_offsets[rank] = rank * bytes;
    }
  }
  return exchange(group, send, receive, plan);
}

EXPORT HcclResult HcclAlltoAll(const void *send, uint64_t send_count, HcclDataType send_type, const void *receive,
                               uint64_t receive_count, HcclDataType receive_type, HcclComm handle, aclrtStream) {
  Communicator &group = group_of(handle);
  TRY(group.meet({"HcclAlltoAll", 0, send_type}));
  Exchange plan(group.size());
  for (size_t rank = 0; rank < size_t(group.size()); rank++) {
    plan.send_sizes[rank] = send_count * element_size(send_type);
    plan.send_offsets[rank] = rank * plan.send_sizes[rank];
    plan.receive_sizes[rank] = receive_count * element_size(receive_type);
    plan.receive_offsets[rank] = rank * plan.receive_sizes[rank];
  }
  return exchange(group, send, const_cast<void *>(receive), plan);
}

EXPORT HcclResult HcclAlltoAllV(const void *send, const void *send_counts, const void *send_offsets,
                                HcclDataType send_type, const void *receive, const void *receive_counts,
                                const void *receive_offsets, HcclDataType receive_type, HcclComm handle, aclrtStream) {
  Communicator &group = group_of(handle);
  TRY(group.meet({"HcclAlltoAllV", 0, send_type}));
  Exchange plan(group.size());
  fill(&plan.send_sizes, send_counts, element_size(send_type));
  fill(&plan.send_offsets, send_offsets, element_size(send_type));
  fill(&plan.receive_sizes, receive_counts, element_size(receive_type));
  fill(&plan.receive_offsets, receive_offsets, element_size(receive_type));
  return exchange(group, send, const_cast<void *>(receive), plan);
}
