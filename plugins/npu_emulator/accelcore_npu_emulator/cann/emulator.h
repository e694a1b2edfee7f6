// What every part of the emulated CANN shares: settings, error messages, the trace, counters and the current device.
//
// Device memory is host memory, and every stream is synchronous: a call has done its work when it returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <acl/acl.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emulator {

constexpr int kMaxDevices = 64;
constexpr uint32_t kCubeCores = 24;
constexpr uint32_t kVectorCores = 48;

// Codes of CANN's runtime that torch_npu tells apart (acl/error_codes/rt_error_codes.h).
constexpr aclError kInvalidDevice = 107001;
constexpr aclError kNoContext = 107002;
constexpr aclError kOutOfMemory = 207001;

// A fault that the K-th event of its kind brings about; 0 means never.
struct Faults {
  uint64_t out_of_memory = 0;
  uint64_t timeout = 0;
  uint64_t die = 0;
  int die_rank = -1;
};

// The environment variables ACCEL_EMULATED_*, read once.
struct Settings {
  int devices = 0;
  std::string soc;
  size_t memory = 0;
  bool poison = false;
  Faults faults;
  std::string problem;  // what is wrong with the environment, if anything
};
const Settings &settings();

// Keeps the message for aclGetRecentErrMsg, traces it, and returns `code`.
aclError failure(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));

// One line a call, to the place that ACCEL_EMULATED_TRACE names.
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

void count_launch(const char *op);
void count_synchronize(const char *what);
void count_copy(const char *direction, uint64_t bytes);

int device_count();
int current_device();     // -1 where the thread has set none
int allocation_device();  // the current one, or the first

// A child that was forked from a process that had initialised the device; real drivers refuse it too.
bool forked();
aclError refuse_forked();

// Graph capture: whether one is active, and what is recorded on it.
enum class Tape { kBegin = 0, kEnd = 1, kExecute = 2, kDestroy = 3, kCopy = 4, kFill = 5 };
bool capturing();
bool capturing(aclrtStream stream);
aclError refuse_waiting(const char *what);  // for something, while a graph is captured
aclError record(Tape what, uint64_t a, uint64_t b = 0, uint64_t n = 0);

// A capture executes nothing on hardware. Here its kernels run, because their shapes must be known: afterwards all
// device memory is put back to what it was, and what the capture allocated is as fresh memory.
void save_memory();
void restore_memory();

// The answer of a function of accelcore_npu_emulator.bootstrap in this process's Python.
std::string ask_python(const char *function);

}  // namespace emulator
