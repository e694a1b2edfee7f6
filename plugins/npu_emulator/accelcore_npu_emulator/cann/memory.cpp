// Device memory: host memory with a limit a device, poisoned when fresh.
#include "emulator.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sys/mman.h>
#include <unordered_map>

namespace emulator {
namespace {

constexpr size_t kSmallAlignment = 512;
constexpr size_t kLargeAlignment = size_t(2) << 20;  // what large pages of the real driver give
constexpr int kPoison = 0xff;  // NaN in every floating-point type, -1 in the integers

struct Block {
  size_t bytes;
  int device;
};

std::mutex mutex;
std::unordered_map<void *, Block> blocks;
std::unordered_map<void *, size_t> mappings;  // of physical memory, with their bytes
size_t used[kMaxDevices];
std::unordered_map<void *, std::vector<char>> saved;

// The fault out_of_memory@K. torch_npu answers a failed allocation by freeing its cache and asking once more for the
// same size: both belong to the K-th allocation, or nobody would see the fault.
bool fault_hits(size_t bytes) {
  static uint64_t count = 0;
  static size_t failed = 0;
  if (failed && failed == bytes) {
    failed = 0;
    return true;
  }
  failed = 0;
  if (++count != settings().faults.out_of_memory) return false;
  failed = bytes;
  fprintf(stderr, "EMULATED: allocation %llu, of %zu bytes, fails (an injected fault)\n", (unsigned long long)count,
          bytes);  // torch's own error cannot say so
  return true;
}

// Takes `bytes` from the device's budget; call with the mutex held.
aclError reserve(size_t bytes, int device) {
  if (fault_hits(bytes)) return failure(kOutOfMemory, "npu:%d is out of memory (an injected fault)", device);
  if (bytes > settings().memory - used[device]) {
    return failure(kOutOfMemory, "npu:%d is out of memory: %zu bytes asked for, %zu of %zu are free", device, bytes,
                   settings().memory - used[device], settings().memory);
  }
  used[device] += bytes;
  return ACL_SUCCESS;
}

void poison(void *memory, size_t bytes) {
  if (settings().poison) memset(memory, kPoison, bytes);
}

aclError allocate(void **out, size_t bytes) {
  if (forked()) return refuse_forked();
  int device = allocation_device();
  std::lock_guard<std::mutex> lock(mutex);
  if (aclError error = reserve(bytes, device)) return error;
  void *memory = nullptr;
  size_t alignment = bytes >= kLargeAlignment ? kLargeAlignment : kSmallAlignment;
  if (posix_memalign(&memory, alignment, bytes ? bytes : 1)) {
    used[device] -= bytes;
    return failure(kOutOfMemory, "the host has no %zu bytes for npu:%d", bytes, device);
  }
  poison(memory, bytes);
  blocks[memory] = Block{bytes, device};
  trace("aclrtMalloc npu:%d, %zu bytes -> %p", device, bytes, memory);
  *out = memory;
  return ACL_SUCCESS;
}

const char *direction(aclrtMemcpyKind kind) {
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_DEVICE: return "host to device";
    case ACL_MEMCPY_DEVICE_TO_HOST: return "device to host";
    case ACL_MEMCPY_DEVICE_TO_DEVICE: return "device to device";
    default: return "host to host";
  }
}

aclError copy(void *to, size_t capacity, const void *from, size_t bytes, aclrtMemcpyKind kind) {
  if (forked()) return refuse_forked();
  if (bytes > capacity) return failure(ACL_ERROR_INVALID_PARAM, "a copy of %zu bytes into %zu", bytes, capacity);
  count_copy(direction(kind), bytes);
  memmove(to, from, bytes);
  return ACL_SUCCESS;
}

// Calls function(address, bytes) for all device memory; call with the mutex held.
template <class Function>
void for_each_range(Function function) {
  for (auto &[address, block] : blocks) function(address, block.bytes);
  for (auto &[address, bytes] : mappings) function(address, bytes);
}

}  // namespace

void save_memory() {
  std::lock_guard<std::mutex> lock(mutex);
  for_each_range([](void *address, size_t bytes) {
    const char *begin = static_cast<const char *>(address);
    saved[address].assign(begin, begin + bytes);
  });
}

void restore_memory() {
  std::lock_guard<std::mutex> lock(mutex);
  for_each_range([](void *address, size_t bytes) {
    auto before = saved.find(address);
    if (before != saved.end() && before->second.size() == bytes) {
      memcpy(address, before->second.data(), bytes);
    } else {
      poison(address, bytes);
    }
  });
  saved.clear();
}

}  // namespace emulator

using namespace emulator;

EXPORT aclError aclrtMalloc(void **memory, size_t bytes, aclrtMemMallocPolicy) { return allocate(memory, bytes); }
EXPORT aclError aclrtMallocAlign32(void **memory, size_t bytes, aclrtMemMallocPolicy) {
  return allocate(memory, bytes);
}

EXPORT aclError aclrtFree(void *memory) {
  std::lock_guard<std::mutex> lock(mutex);
  auto found = blocks.find(memory);
  if (found == blocks.end()) return failure(ACL_ERROR_INVALID_PARAM, "aclrtFree: %p is no device memory", memory);
  trace("aclrtFree npu:%d, %zu bytes at %p", found->second.device, found->second.bytes, memory);
  used[found->second.device] -= found->second.bytes;
  blocks.erase(found);
  free(memory);
  return ACL_SUCCESS;
}

EXPORT aclError aclrtMallocHost(void **memory, size_t bytes) {
  return posix_memalign(memory, 4096, bytes ? bytes : 1) ? ACL_ERROR_BAD_ALLOC : ACL_SUCCESS;
}

EXPORT aclError aclrtMallocHostWithCfg(void **memory, uint64_t bytes, aclrtMallocConfig *) {
  return aclrtMallocHost(memory, bytes);
}

EXPORT aclError aclrtFreeHost(void *memory) {
  free(memory);
  return ACL_SUCCESS;
}

// All host memory is as good as registered.
EXPORT aclError aclrtHostRegister(void *memory, uint64_t bytes, aclrtHostRegisterType, void **device) {
  if (!memory || !bytes) return failure(ACL_ERROR_INVALID_PARAM, "there is no host memory to register");
  if (device) *device = memory;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtHostRegisterV2(void *memory, uint64_t bytes, uint32_t) {
  return aclrtHostRegister(memory, bytes, ACL_HOST_REGISTER_MAPPED, nullptr);
}

EXPORT aclError aclrtHostUnregister(void *) { return ACL_SUCCESS; }

EXPORT aclError aclrtMemset(void *memory, size_t, int32_t value, size_t bytes) {
  if (forked()) return refuse_forked();
  memset(memory, value, bytes);
  return ACL_SUCCESS;
}

EXPORT aclError aclrtMemsetAsync(void *memory, size_t capacity, int32_t value, size_t bytes, aclrtStream) {
  if (capturing()) {
    if (aclError error = record(Tape::kFill, uint64_t(memory), uint64_t(value), bytes)) return error;
  }
  count_launch("aclrtMemsetAsync");
  return aclrtMemset(memory, capacity, value, bytes);
}

EXPORT aclError aclrtMemcpy(void *to, size_t capacity, const void *from, size_t bytes, aclrtMemcpyKind kind) {
  if (kind != ACL_MEMCPY_DEVICE_TO_DEVICE) count_synchronize(direction(kind));
  return copy(to, capacity, from, bytes, kind);
}

EXPORT aclError aclrtMemcpyAsync(void *to, size_t capacity, const void *from, size_t bytes, aclrtMemcpyKind kind,
                                 aclrtStream) {
  if (capturing()) {
    if (aclError error = record(Tape::kCopy, uint64_t(to), uint64_t(from), bytes)) return error;
  }
  return copy(to, capacity, from, bytes, kind);
}

EXPORT aclError aclrtGetMemInfo(aclrtMemAttr, size_t *available, size_t *total) {
  std::lock_guard<std::mutex> lock(mutex);
  *total = settings().memory;
  *available = *total - used[allocation_device()];
  return ACL_SUCCESS;
}

// Virtual addresses and physical memory apart, for torch_npu's expandable segments.
namespace {
struct Physical {
  size_t bytes;
  int device;
};
}  // namespace

EXPORT aclError aclrtReserveMemAddress(void **address, size_t bytes, size_t, void *hint, uint64_t) {
  void *room = mmap(hint, bytes + kLargeAlignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return failure(kOutOfMemory, "no %zu bytes of address space", bytes);
  *address = reinterpret_cast<void *>((uintptr_t(room) + kLargeAlignment - 1) & ~(kLargeAlignment - 1));
  return ACL_SUCCESS;
}

EXPORT aclError aclrtReleaseMemAddress(void *) { return ACL_SUCCESS; }

EXPORT aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t bytes, const aclrtPhysicalMemProp *, uint64_t) {
  if (forked()) return refuse_forked();
  std::lock_guard<std::mutex> lock(mutex);
  int device = allocation_device();
  if (aclError error = reserve(bytes, device)) return error;
  *handle = reinterpret_cast<aclrtDrvMemHandle>(new Physical{bytes, device});
  trace("aclrtMallocPhysical npu:%d, %zu bytes", device, bytes);
  return ACL_SUCCESS;
}

EXPORT aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  std::lock_guard<std::mutex> lock(mutex);
  Physical *physical = reinterpret_cast<Physical *>(handle);
  used[physical->device] -= physical->bytes;
  delete physical;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtMapMem(void *address, size_t bytes, size_t, aclrtDrvMemHandle, uint64_t) {
  void *mapped = mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  if (mapped == MAP_FAILED) return failure(kOutOfMemory, "the host has no %zu bytes to map", bytes);
  poison(address, bytes);
  std::lock_guard<std::mutex> lock(mutex);
  mappings[address] = bytes;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtUnmapMem(void *address) {
  std::lock_guard<std::mutex> lock(mutex);
  mappings.erase(address);
  return ACL_SUCCESS;
}
