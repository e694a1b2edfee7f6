// What HCCL's public source of CANN 8.5 accepts of a configuration. What HCCL takes and does not heed, such as a name
// of an operator that it does not know, is taken here too.
#include "communicator.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace emulator {
namespace {

using Texts = std::vector<std::string>;

constexpr char kAlgorithms[] =
    "null, ring, pipeline, fullmesh, H-D_R, pairwise, NHR, NHR_V1, AHC, AHC_BROKE, NB, NA";
constexpr size_t kLevels = 4, kRetryLevels = 3;

HcclResult refuse(const std::string &name, const std::string &value, const std::string &expected) {
  constexpr size_t kShown = 60;
  std::string shown = value.size() > kShown ? value.substr(0, kShown) + "..." : value;
  failure(ACL_ERROR_INVALID_PARAM, "hccl refuses %s=\"%s\": give %s", name.c_str(), shown.c_str(), expected.c_str());
  return HCCL_E_PARA;
}

// False where a part is empty: at the beginning, at the end or between.
bool split(const std::string &text, char at, Texts *parts) {
  for (size_t begin = 0; begin <= text.size();) {
    size_t end = std::min(text.find(at, begin), text.size());
    if (end == begin) return false;
    parts->push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return true;
}

bool is_algorithm(const std::string &name) {
  return (", " + std::string(kAlgorithms) + ", ").find(", " + name + ", ") != std::string::npos;
}

// "level0:NA;level1:ring": each level once.
bool are_levels(const std::string &text) {
  Texts levels;
  if (!split(text, ';', &levels) || levels.size() > kLevels) return false;
  bool seen[kLevels] = {};
  for (const std::string &level : levels) {
    size_t colon = level.find(':');
    if (colon != 6 || level.compare(0, 5, "level") || !is_algorithm(level.substr(7))) return false;
    size_t number = size_t(level[5]) - '0';
    if (number >= kLevels || seen[number]) return false;
    seen[number] = true;
  }
  return true;
}

// Levels for all operators, or "allreduce=LEVELS/allgather=LEVELS".
bool are_algorithms(const std::string &text) {
  Texts operators;
  if (!split(text, '/', &operators)) return false;
  for (const std::string &each : operators) {
    size_t equals = each.find('=');
    if (equals == std::string::npos && operators.size() > 1) return false;
    if (equals == 0 || !are_levels(equals == std::string::npos ? each : each.substr(equals + 1))) return false;
  }
  return true;
}

HcclResult check_algorithms(const char *name, std::string text) {
  text.erase(std::remove(text.begin(), text.end(), ' '), text.end());
  if (text.empty() || are_algorithms(text)) return HCCL_SUCCESS;
  std::string levels = "level0:NA;level1:<algorithm>";
  return refuse(name, text,
                levels + " or <operator>=" + levels + "/<operator>=" + levels + "; algorithms are " + kAlgorithms);
}

HcclResult check_retries(const HcclCommConfig &config) {
  std::string levels = config.hcclRetryEnable;
  levels.erase(std::remove(levels.begin(), levels.end(), ' '), levels.end());
  Texts parts;
  if (!levels.empty() && (!split(levels, ',', &parts) || parts.size() > kRetryLevels)) {
    return refuse("hcclRetryEnable", levels, "L1:0, L2:0");
  }
  if (!*config.hcclRetryParams) return HCCL_SUCCESS;
  unsigned count = 0, hold = 0, interval = 0;
  int read = sscanf(config.hcclRetryParams, "MaxCnt:%u, HoldTime:%u, IntervalTime:%u", &count, &hold, &interval);
  if (read == 3 && count >= 1 && count <= 10 && hold <= 60000 && interval <= 60000) return HCCL_SUCCESS;
  return refuse("hcclRetryParams", config.hcclRetryParams,
                "MaxCnt:<1 to 10>, HoldTime:<0 to 60000>, IntervalTime:<0 to 60000>");
}

// Atlas A2 and A3, which know strict determinism and a time without end.
bool recent_part() {
  const std::string &soc = settings().soc;
  return (soc.rfind("Ascend910B", 0) == 0 && soc != "Ascend910B") || soc.rfind("Ascend910_9", 0) == 0;
}

HcclResult check(const HcclCommConfig &config) {
  if (config.hcclBufferSize == 0) return refuse("hcclBufferSize", "0", "at least 1 (MiB)");
  bool strict = config.hcclDeterministic == 2;
  if (config.hcclDeterministic != HCCL_COMM_DETERMINISTIC_CONFIG_NOT_SET &&
      (config.hcclDeterministic > 2 || (strict && !recent_part()))) {
    return refuse("hcclDeterministic", std::to_string(config.hcclDeterministic),
                  recent_part() ? "0, 1 or 2 (strict)" : "0 or 1");
  }
  if (config.aclGraphZeroCopyEnable > 1) {
    return refuse("aclGraphZeroCopyEnable", std::to_string(config.aclGraphZeroCopyEnable), "0 or 1");
  }
  if (HcclResult error = check_algorithms("hcclAlgo", config.hcclAlgo)) return error;
  return check_retries(config);
}

// A time in seconds; 0 is one without end where the part knows that.
HcclResult read_time(const char *name, bool endless, double *time) {
  const char *text = getenv(name);
  if (!text) return HCCL_SUCCESS;
  char *end;
  double value = strtod(text, &end);
  bool sensible = end != text && !*end && std::isfinite(value);
  if (!sensible || value < 0 || (value == 0 && !endless)) {
    return refuse(name, text, endless ? "a number of seconds, 0 for no limit" : "a number of seconds above 0");
  }
  *time = value > 0 ? value : HUGE_VAL;
  return HCCL_SUCCESS;
}

}  // namespace

HcclResult configure(const HcclCommConfig *config, Waits *waits) {
  const char *algorithms = getenv("HCCL_ALGO");
  if (HcclResult error = check_algorithms("HCCL_ALGO", algorithms ? algorithms : "")) return error;
  if (HcclResult error = read_time("HCCL_CONNECT_TIMEOUT", false, &waits->connect)) return error;
  if (HcclResult error = read_time("HCCL_EXEC_TIMEOUT", recent_part(), &waits->execute)) return error;
  if (!config) return HCCL_SUCCESS;
  int32_t seconds = config->hcclExecTimeOut;  // HCCL ignores other values than these
  if (seconds > 0) waits->execute = seconds;
  else if (seconds == 0 && recent_part()) waits->execute = HUGE_VAL;
  return check(*config);
}

}  // namespace emulator
