// What HCCL's public source of CANN 8.5 accepts of a configuration. What HCCL takes and does not heed, such as a name
// of an operator that it does not know, is taken here too.
#include "communicator.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <regex>
#include <string>

namespace emulator {
namespace {

#define ALGORITHMS "null|ring|pipeline|fullmesh|H-D_R|pairwise|NHR|NHR_V1|AHC|AHC_BROKE|NB|NA"
#define LEVEL "level[0-3]:(?:" ALGORITHMS ")"
#define LEVELS LEVEL "(?:;" LEVEL ")*"
#define OPERATOR "[^=/]+=" LEVELS

constexpr size_t kLongest = 1600;  // of the texts in HcclCommConfig

bool matches(const std::string &text, const char *pattern) {
  return text.size() <= kLongest && std::regex_match(text, std::regex(pattern));
}

std::string without_spaces(std::string text) {
  text.erase(std::remove(text.begin(), text.end(), ' '), text.end());
  return text;
}

HcclResult refuse(const std::string &name, const std::string &value, const std::string &expected) {
  constexpr size_t kShown = 60;
  std::string shown = value.size() > kShown ? value.substr(0, kShown) + "..." : value;
  failure(ACL_ERROR_INVALID_PARAM, "hccl refuses %s=\"%s\": give %s", name.c_str(), shown.c_str(), expected.c_str());
  return HCCL_E_PARA;
}

// Levels for all operators, or "allreduce=LEVELS/allgather=LEVELS"; each level once.
HcclResult check_algorithms(const char *name, const std::string &given) {
  static const std::regex twice("level([0-3]):[^/]*level\\1");
  std::string text = without_spaces(given);
  if (text.empty()) return HCCL_SUCCESS;
  if (matches(text, LEVELS "|" OPERATOR "(?:/" OPERATOR ")*") && !std::regex_search(text, twice)) return HCCL_SUCCESS;
  std::string levels = "level0:NA;level1:<algorithm>";
  return refuse(name, text,
                levels + " or <operator>=" + levels + "/<operator>=" + levels + "; algorithms are " ALGORITHMS);
}

HcclResult check_retries(const HcclCommConfig &config) {
  std::string levels = without_spaces(config.hcclRetryEnable);
  if (!matches(levels, "(?:[^,]+(?:,[^,]+){0,2})?")) return refuse("hcclRetryEnable", levels, "L1:0, L2:0");
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
