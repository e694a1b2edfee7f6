// Lets torch_npu be loaded beside torch's CUDA build.
//
// From torch 2.10 on, each device registers the names of its allocator's options, and torch refuses a name that is
// there already. The CUDA build and torch_npu share two names, so that a process would abort while it loads torch_npu.
// A process with an emulated NPU uses no GPU: the names become the NPU's. Only torch_npu loads this library: it is
// initialised after torch and before torch_npu. In a process that calls activate(), Python loads it at that point.
#include <dlfcn.h>
#include <string>
#include <unordered_set>

namespace {

using Names = std::unordered_set<std::string>;

#define KEYS "N3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev"

Names *registered_names() {
  void *torch = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!torch) return nullptr;
  // Later releases of torch have a function; 2.10 has a variable that all its libraries share.
  if (void *function = dlsym(torch, "_Z" KEYS)) return &reinterpret_cast<Names &(*)()>(function)();
  return static_cast<Names *>(dlsym(torch, "_ZZ" KEYS "E4keys"));
}

__attribute__((constructor)) void free_shared_names() {
  Names *names = registered_names();
  if (!names) return;
  for (const char *name : {"per_process_memory_fraction", "pinned_reserve_segment_size_mb"}) names->erase(name);
}

}  // namespace
