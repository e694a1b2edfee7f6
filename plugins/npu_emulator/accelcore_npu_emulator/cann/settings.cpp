// The environment variables that shape the emulated machine.
#include "emulator.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace emulator {
namespace {

bool natural(const char *text, char **end, unsigned long long *value) {
  if (*text < '0' || *text > '9') return false;
  errno = 0;
  *value = strtoull(text, end, 10);
  return errno == 0;
}

bool read_count(const char *text, uint64_t *value) {
  char *end;
  unsigned long long number;
  if (!natural(text, &end, &number) || *end || number == 0) return false;
  *value = number;
  return true;
}

bool read_memory(const char *text, size_t *value) {
  char *end;
  unsigned long long number;
  if (!natural(text, &end, &number) || number == 0) return false;
  int shift;
  if (!*end) shift = 0;
  else if (!strcmp(end, "KiB")) shift = 10;
  else if (!strcmp(end, "MiB")) shift = 20;
  else if (!strcmp(end, "GiB")) shift = 30;
  else return false;
  if (number > (SIZE_MAX >> shift)) return false;
  *value = size_t(number) << shift;
  return true;
}

// Faults of operators (overflow, missing) are Python's; they are passed over here.
bool read_fault(const std::string &fault, Faults *faults) {
  size_t at = fault.find('@');
  if (at == std::string::npos) return false;
  std::string name = fault.substr(0, at), value = fault.substr(at + 1);
  if (name == "out_of_memory") return read_count(value.c_str(), &faults->out_of_memory);
  if (name == "timeout") return read_count(value.c_str(), &faults->timeout);
  if (name == "die") {
    char *end;
    unsigned long long rank;
    if (!natural(value.c_str(), &end, &rank) || *end != ':') return false;
    faults->die_rank = int(rank);
    return read_count(end + 1, &faults->die);
  }
  return name == "overflow" || name == "missing";
}

bool read_faults(const char *text, Faults *faults) {
  std::string rest = text;
  while (!rest.empty()) {
    size_t comma = rest.find(',');
    if (!read_fault(rest.substr(0, comma), faults)) return false;
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
  }
  return true;
}

Settings read() {
  Settings read;
  auto variable = [&](const char *name, auto parse) {
    const char *text = getenv(name);
    if (text && !parse(text)) read.problem = std::string(name) + "=" + text + " is not a value that it can have";
  };
  variable("ACCEL_EMULATED_DEVICES", [&](const char *text) {
    uint64_t devices = 0;
    if (!read_count(text, &devices) || devices > kMaxDevices) return false;
    read.devices = int(devices);
    return true;
  });
  variable("ACCEL_EMULATED_SOC", [&](const char *text) {
    read.soc = text;
    return !read.soc.empty();
  });
  variable("ACCEL_EMULATED_MEMORY", [&](const char *text) { return read_memory(text, &read.memory); });
  variable("ACCEL_EMULATED_POISON", [&](const char *text) {
    read.poison = !strcmp(text, "1") || !strcasecmp(text, "true");
    return read.poison || !strcmp(text, "0") || !strcasecmp(text, "false");
  });
  variable("ACCEL_EMULATED_FAULTS", [&](const char *text) { return read_faults(text, &read.faults); });
  return read;
}

}  // namespace

const Settings &settings() {
  static const Settings once = read();
  return once;
}

}  // namespace emulator
