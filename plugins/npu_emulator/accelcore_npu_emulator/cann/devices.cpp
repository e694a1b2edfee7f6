// Devices: initialisation, the current device, what the chip can do.
#include "emulator.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <pthread.h>
#include <stdexcept>
#include <unistd.h>

namespace emulator {
namespace {

struct Context {
  int device;
};

thread_local int t_device = -1;
Context contexts[kMaxDevices];
std::atomic<bool> used[kMaxDevices];
std::atomic<bool> any_used{false};
std::atomic<bool> initialised{false};
std::atomic<bool> is_forked{false};
int64_t system_parameters[16];

// ASCEND_RT_VISIBLE_DEVICES: the devices to see, in ascending order, or none is seen. What follows an invalid entry is
// ignored.
std::vector<int> visible_devices() {
  std::vector<int> visible;
  const char *text = getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!text) {
    for (int device = 0; device < settings().devices; device++) visible.push_back(device);
    return visible;
  }
  while (*text >= '0' && *text <= '9') {
    char *end;
    long device = strtol(text, &end, 10);
    if (*end && *end != ',') break;
    if (!visible.empty() && device <= visible.back()) return {};
    if (device >= settings().devices) break;
    visible.push_back(int(device));
    if (!*end) break;
    text = end + 1;
  }
  return visible;
}

// Read anew until a device is used: a script may set the variable after it has asked for the number of devices.
const std::vector<int> &visible() {
  static std::vector<int> devices;
  static bool decided = false;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (!decided) devices = visible_devices();
  decided = decided || any_used;
  return devices;
}

bool exists(int device) { return device >= 0 && device < device_count(); }

// Whether overflow gives inf and NaN: 910B1 and later do, Ascend910A and the first parts called 910B saturate.
bool has_infinities() {
  const std::string &soc = settings().soc;
  auto begins = [&](const char *with) { return soc.rfind(with, 0) == 0; };
  return (begins("Ascend910B") && soc != "Ascend910B") || begins("Ascend910_9") || begins("Ascend950");
}

void remember_owner() {
  pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
}

// A library that is preloaded finds the function after its own in the global scope alone; torch_npu loads us locally.
void enter_global_scope() {
  Dl_info own;
  if (!dladdr(reinterpret_cast<void *>(&enter_global_scope), &own)) return;
  dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL);
}

}  // namespace

int device_count() { return int(visible().size()); }
int current_device() { return t_device; }
int allocation_device() { return t_device < 0 ? 0 : t_device; }

bool forked() { return is_forked; }

aclError refuse_forked() {
  return failure(ACL_ERROR_RT_CONTEXT_NULL,
                 "this process was forked from one that had initialised the NPU, and cannot use it; start it with the "
                 "'spawn' method");
}

}  // namespace emulator

using namespace emulator;

// What accelcore-npu asks any CANN for, to see whether it is an emulated one: how many devices it imitates.
EXPORT int accelcore_emulated_devices() { return settings().devices; }  // 0 if a setting is invalid

EXPORT aclError aclInit(const char *) {
  trace("aclInit");
  if (forked()) return refuse_forked();
  if (initialised) return ACL_ERROR_REPEAT_INITIALIZE;
  if (!settings().problem.empty()) return failure(ACL_ERROR_INVALID_PARAM, "%s", settings().problem.c_str());
  std::string problem = ask_python("start");
  if (!problem.empty()) return failure(ACL_ERROR_FAILURE, "%s", problem.c_str());
  remember_owner();
  enter_global_scope();
  initialised = true;
  return ACL_SUCCESS;
}

EXPORT aclError aclFinalize() {
  trace("aclFinalize");
  initialised = false;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtGetDeviceCount(uint32_t *count) {
  if (!settings().problem.empty()) return failure(ACL_ERROR_INVALID_PARAM, "%s", settings().problem.c_str());
  *count = uint32_t(device_count());
  return ACL_SUCCESS;
}

// The driver's own count, to which torch_npu applies ASCEND_RT_VISIBLE_DEVICES.
EXPORT int drvGetDevNum(uint32_t *count) {
  *count = uint32_t(settings().devices);
  return settings().problem.empty() ? 0 : ACL_ERROR_INVALID_PARAM;
}

EXPORT aclError aclrtSetDevice(int32_t device) {
  if (forked()) return refuse_forked();
  if (!exists(device)) return failure(kInvalidDevice, "there is no npu:%d, only %d devices", device, device_count());
  trace("aclrtSetDevice npu:%d (device %d of the machine)", device, visible()[size_t(device)]);
  t_device = device;
  used[device] = any_used = true;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtResetDevice(int32_t device) {
  trace("aclrtResetDevice %d", device);
  if (exists(device)) used[device] = false;
  if (t_device == device) t_device = -1;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtGetDevice(int32_t *device) {
  if (t_device < 0) return kNoContext;
  *device = t_device;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtGetCurrentContext(aclrtContext *context) {
  if (t_device < 0) return kNoContext;
  contexts[t_device].device = t_device;
  *context = &contexts[t_device];
  return ACL_SUCCESS;
}

EXPORT aclError aclrtSetCurrentContext(aclrtContext context) {
  if (context) t_device = static_cast<Context *>(context)->device;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
  if (flags) *flags = 0;
  if (active) *active = exists(device) && used[device];
  return ACL_SUCCESS;
}

EXPORT aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) {
  *can = 1;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }

EXPORT aclError aclrtDeviceGetBareTgid(int32_t *pid) {
  *pid = getpid();
  return ACL_SUCCESS;
}

// torch_npu asks for the chip before anything else, and would refuse a chip that it does not know in its own words.
EXPORT const char *aclrtGetSocName() {
  if (!settings().problem.empty()) throw std::runtime_error("EMULATED: " + settings().problem);
  return settings().soc.c_str();
}
EXPORT aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
EXPORT aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

EXPORT aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t *value) {
  switch (info) {
    case ACL_DEVICE_INFO_L2_SIZE: *value = int64_t(192) << 20; break;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = kVectorCores; break;
    default: *value = kCubeCores;
  }
  return ACL_SUCCESS;
}

EXPORT aclError aclrtGetDeviceUtilizationRate(int32_t, aclrtUtilizationInfo *rate) {
  rate->cubeUtilization = rate->vectorUtilization = rate->aicpuUtilization = rate->memoryUtilization = 0;
  return ACL_SUCCESS;
}

EXPORT aclError aclGetCannAttributeList(const aclCannAttr **list, size_t *count) {
  static const aclCannAttr attributes[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16, ACL_CANN_ATTR_JIT_COMPILE};
  *list = attributes;
  *count = sizeof attributes / sizeof *attributes;
  return ACL_SUCCESS;
}

EXPORT aclError aclGetCannAttribute(aclCannAttr attribute, int32_t *value) {
  *value = attribute != ACL_CANN_ATTR_JIT_COMPILE && has_infinities();
  return ACL_SUCCESS;
}

EXPORT aclError aclrtSynchronizeDevice() {
  if (capturing()) return refuse_waiting("the device");
  count_synchronize("device");
  return forked() ? refuse_forked() : aclError(ACL_SUCCESS);
}

EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

EXPORT aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }

EXPORT aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
EXPORT aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }

EXPORT aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t *actual) {
  if (actual) *actual = timeout;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  if (size_t(option) < 16) system_parameters[option] = value;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}

EXPORT aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
  *value = size_t(option) < 16 ? system_parameters[option] : 0;
  return ACL_SUCCESS;
}

EXPORT aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion *version) {
  memset(version, 0, sizeof *version);
  strcpy(version->version, "8.5.0");
  strcpy(version->majorVersion, "8");
  strcpy(version->minorVersion, "5");
  strcpy(version->releaseVersion, "0");
  return ACL_SUCCESS;
}

EXPORT aclError aclsysGetVersionStr(char *, char *version) {
  strcpy(version, "8.5.0");
  return ACL_SUCCESS;
}

EXPORT void aclAppLog(aclLogLevel, const char *, const char *, uint32_t, const char *, ...) {}
EXPORT aclError aclmdlInitDump() { return ACL_SUCCESS; }
EXPORT aclError aclmdlSetDump(const char *) { return ACL_SUCCESS; }
EXPORT aclError aclmdlFinalizeDump() { return ACL_SUCCESS; }
