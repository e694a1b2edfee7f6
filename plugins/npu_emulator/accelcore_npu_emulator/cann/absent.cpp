// What torch_npu links against and the emulator does not have: kernels loaded as binaries, and the profiler.
#include <cstdio>

#include "emulator.h"

namespace {
aclError no_binaries() {
  return emulator::failure(ACL_ERROR_FEATURE_UNSUPPORTED, "device kernels in binary form are not emulated");
}

aclError no_shared_memory() {
  return emulator::failure(ACL_ERROR_FEATURE_UNSUPPORTED, "device memory that processes share is not emulated");
}

aclError no_shared_events() {
  return emulator::failure(ACL_ERROR_FEATURE_UNSUPPORTED, "events that processes share are not emulated");
}
}  // namespace

EXPORT aclError aclrtBinaryGetFunction(const aclrtBinHandle, const char *, aclrtFuncHandle *) { return no_binaries(); }
EXPORT aclError aclrtBinaryLoadFromData(const void *, size_t, const aclrtBinaryLoadOptions *, aclrtBinHandle *) {
  return no_binaries();
}
EXPORT aclError aclrtGetFunctionAddr(aclrtFuncHandle, void **, void **) { return no_binaries(); }
EXPORT aclError rtDevBinaryRegister() { return no_binaries(); }
EXPORT aclError rtFunctionRegister() { return no_binaries(); }
EXPORT aclError rtGetC2cCtrlAddr() { return no_binaries(); }
EXPORT aclError rtKernelLaunch() { return no_binaries(); }

EXPORT aclError aclrtIpcMemGetExportKey(void *, size_t, char *, size_t, uint64_t) { return no_shared_memory(); }
EXPORT aclError aclrtIpcMemImportByKey(void **, const char *, uint64_t) { return no_shared_memory(); }
EXPORT aclError aclrtIpcMemSetImportPid(const char *, int32_t *, size_t) { return no_shared_memory(); }
EXPORT aclError aclrtIpcMemClose(const char *) { return no_shared_memory(); }

EXPORT aclError aclrtIpcGetEventHandle(aclrtEvent, aclrtIpcEventHandle *) { return no_shared_events(); }
EXPORT aclError aclrtIpcOpenEventHandle(aclrtIpcEventHandle, aclrtEvent *) { return no_shared_events(); }

EXPORT int HcclCommInitAll() {
  return emulator::failure(ACL_ERROR_FEATURE_UNSUPPORTED,
                           "several NPUs in one process (DataParallel) are not emulated");
}

EXPORT aclError aclmdlRIDebugJsonPrint(aclmdlRI, const char *, uint32_t) {
  return emulator::failure(ACL_ERROR_FEATURE_UNSUPPORTED, "a captured graph as JSON is not emulated");
}

EXPORT aclError aclnnSleep() {
  return emulator::failure(ACL_ERROR_FEATURE_UNSUPPORTED, "npu operator aclnnSleep is not emulated");
}
EXPORT aclError aclnnSleepGetWorkspaceSize() { return aclnnSleep(); }

// The search for faults of the hardware in what ranks exchange, with NPU_ASD_ENABLE.
EXPORT aclError aclnnSilentCheck() {
  return emulator::failure(ACL_ERROR_FEATURE_UNSUPPORTED, "npu operator aclnnSilentCheck is not emulated");
}
EXPORT aclError aclnnSilentCheckGetWorkspaceSize() { return aclnnSilentCheck(); }

// torch_npu gives its caller a number alone.
EXPORT aclError aclrtDeviceTaskAbort(int32_t, uint32_t) {
  const char *why = "stopping a device is not emulated: what runs on it goes on";
  std::fprintf(stderr, "EMULATED: %s\n", why);
  return emulator::failure(ACL_ERROR_FEATURE_UNSUPPORTED, "%s", why);
}

// torch_npu's clone() and contiguous() look for this one to choose how they work, as on a device, and then copy through
// the dispatcher.
EXPORT aclError aclnnInplaceCopy() {
  return emulator::failure(ACL_ERROR_FEATURE_UNSUPPORTED, "npu operator aclnnInplaceCopy is not emulated");
}
EXPORT aclError aclnnInplaceCopyGetWorkspaceSize() { return aclnnInplaceCopy(); }

// torch_npu's profiler asks for this to begin with, and goes on without; what comes after it does nothing.
EXPORT void *aclprofCreateConfig() {
  std::fputs("EMULATED: torch_npu's profiler records nothing: a device's times are not emulated\n", stderr);
  return nullptr;
}
EXPORT int aclprofDestroyConfig() { return 0; }
EXPORT int MsprofGetHashId() { return 0; }
EXPORT int MsprofRegisterCallback() { return 0; }
EXPORT int MsprofReportAdditionalInfo() { return 0; }
EXPORT int MsprofReportApi() { return 0; }
EXPORT int MsprofReportCompactInfo() { return 0; }
EXPORT int MsprofSysCycleTime() { return 0; }
EXPORT int aclprofInit() { return 0; }
EXPORT int aclprofStart() { return 0; }
EXPORT int aclprofStop() { return 0; }
EXPORT int aclprofFinalize() { return 0; }
EXPORT void *aclprofCreateStepInfo() { return nullptr; }
EXPORT int aclprofGetStepTimestamp() { return 0; }
EXPORT void aclprofDestroyStepInfo() {}
