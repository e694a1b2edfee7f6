// What the emulator tells: the last error, the trace and the counters.
#include "emulator.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <unistd.h>

namespace emulator {
namespace {

thread_local std::string last_failure;

std::string formatted(const char *format, va_list arguments) {
  va_list again;
  va_copy(again, arguments);
  std::string text(size_t(vsnprintf(nullptr, 0, format, arguments)), '\0');
  vsnprintf(text.data(), text.size() + 1, format, again);
  va_end(again);
  return text;
}

// -1 where nothing is traced. The file is opened for appending: each line is one write, so that the lines of several
// processes never mix.
int trace_file() {
  static const int file = [] {
    const char *path = getenv("ACCEL_EMULATED_TRACE");
    if (!path || !*path) return -1;
    return strcmp(path, "-") ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : STDERR_FILENO;
  }();
  return file;
}

struct Counters {
  std::mutex mutex;
  std::map<std::string, uint64_t> launches, synchronizations, copies, bytes;
};

Counters &counters() {
  static Counters *const all = new Counters;  // never destroyed: threads may count during the process's exit
  return *all;
}

}  // namespace

aclError failure(aclError code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  last_failure = "EMULATED: " + formatted(format, arguments);
  va_end(arguments);
  trace("error %d: %s", code, last_failure.c_str());
  return code;
}

void trace(const char *format, ...) {
  if (trace_file() < 0) return;
  va_list arguments;
  va_start(arguments, format);
  std::string line = "EMULATED npu [" + std::to_string(getpid()) + "] " + formatted(format, arguments) + "\n";
  va_end(arguments);
  if (write(trace_file(), line.data(), line.size()) < 0) return;  // a trace must not break what it watches
}

void count_launch(const char *op) {
  trace("launch %s", op);
  std::lock_guard<std::mutex> lock(counters().mutex);
  counters().launches[op]++;
}

void count_synchronize(const char *what) {
  trace("synchronize %s", what);
  std::lock_guard<std::mutex> lock(counters().mutex);
  counters().synchronizations[what]++;
}

void count_copy(const char *direction, uint64_t bytes) {
  trace("copy %s, %llu bytes", direction, (unsigned long long)bytes);
  std::lock_guard<std::mutex> lock(counters().mutex);
  counters().copies[direction]++;
  counters().bytes[direction] += bytes;
}

}  // namespace emulator

// These return 0 in a process that may not use the device: its kernels raise.
EXPORT int emulator_count_launch(const char *op) { return !emulator::forked() && (emulator::count_launch(op), 1); }
EXPORT int emulator_count_synchronize(const char *what) {
  return !emulator::forked() && (emulator::count_synchronize(what), 1);
}
EXPORT int emulator_count_copy(const char *direction, uint64_t bytes) {
  return !emulator::forked() && (emulator::count_copy(direction, bytes), 1);
}

EXPORT const char *aclGetRecentErrMsg() {
  return emulator::last_failure.empty() ? nullptr : emulator::last_failure.c_str();
}

// All counters as JSON; the names of operators and directions need no escapes. Returns the length that is needed;
// writes no more than `capacity` bytes.
EXPORT size_t emulator_counters(char *out, size_t capacity) {
  auto &all = emulator::counters();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto object = [](const std::map<std::string, uint64_t> &map) {
    std::string text;
    for (const auto &[name, n] : map) text += (text.empty() ? "\"" : ",\"") + name + "\":" + std::to_string(n);
    return "{" + text + "}";
  };
  std::string text = "{\"launches\":" + object(all.launches) + ",\"synchronizations\":" +
                     object(all.synchronizations) + ",\"copies\":" + object(all.copies) + ",\"bytes\":" +
                     object(all.bytes) + "}";
  snprintf(out, capacity, "%s", text.c_str());
  return text.size() + 1;
}
