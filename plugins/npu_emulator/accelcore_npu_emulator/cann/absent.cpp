// What torch_npu links against and the emulator does not have: each says so, or does nothing. Without the headers of
// these functions: their arguments do not matter.
#include <cstdio>

#include <acl/acl_base.h>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define REFUSED(function, what) \
  EXPORT int function() { return emulator::failure(ACL_ERROR_FEATURE_UNSUPPORTED, what " not emulated"); }
#define IDLE(function) \
  EXPORT long function() { return 0; }

namespace emulator {
aclError failure(aclError code, const char *format, ...);
}

#define BINARIES "device kernels in binary form are"
REFUSED(aclrtBinaryGetFunction, BINARIES)
REFUSED(aclrtBinaryLoadFromData, BINARIES)
REFUSED(aclrtGetFunctionAddr, BINARIES)
REFUSED(rtDevBinaryRegister, BINARIES)
REFUSED(rtFunctionRegister, BINARIES)
REFUSED(rtGetC2cCtrlAddr, BINARIES)
REFUSED(rtKernelLaunch, BINARIES)

#define SHARED_MEMORY "device memory that processes share is"
REFUSED(aclrtIpcMemGetExportKey, SHARED_MEMORY)
REFUSED(aclrtIpcMemImportByKey, SHARED_MEMORY)
REFUSED(aclrtIpcMemSetImportPid, SHARED_MEMORY)
REFUSED(aclrtIpcMemClose, SHARED_MEMORY)
REFUSED(aclrtMemExportToShareableHandle, SHARED_MEMORY)
REFUSED(aclrtMemImportFromShareableHandle, SHARED_MEMORY)
REFUSED(aclrtMemSetPidToShareableHandle, SHARED_MEMORY)
REFUSED(aclrtIpcGetEventHandle, "events that processes share are")
REFUSED(aclrtIpcOpenEventHandle, "events that processes share are")

REFUSED(HcclCommInitAll, "several NPUs in one process (DataParallel) are")
REFUSED(aclmdlRIDebugJsonPrint, "a captured graph as JSON is")
REFUSED(aclnnSleep, "npu operator aclnnSleep is")
REFUSED(aclnnSleepGetWorkspaceSize, "npu operator aclnnSleep is")
// The search for faults of the hardware in what ranks exchange, with NPU_ASD_ENABLE.
REFUSED(aclnnSilentCheck, "npu operator aclnnSilentCheck is")
REFUSED(aclnnSilentCheckGetWorkspaceSize, "npu operator aclnnSilentCheck is")
// torch_npu's clone() and contiguous() look for this one to choose how they work, as on a device, and then copy through
// the dispatcher.
REFUSED(aclnnInplaceCopy, "npu operator aclnnInplaceCopy is")
REFUSED(aclnnInplaceCopyGetWorkspaceSize, "npu operator aclnnInplaceCopy is")

// Attributes of operators of the legacy interface (single_ops.cpp).
IDLE(aclopCreateAttr)
IDLE(aclopDestroyAttr)
IDLE(aclopSetAttrBool)
IDLE(aclopSetAttrDataType)
IDLE(aclopSetAttrInt)
IDLE(aclopSetAttrFloat)
IDLE(aclopSetAttrString)
IDLE(aclopSetAttrListBool)
IDLE(aclopSetAttrListInt)
IDLE(aclopSetAttrListFloat)
IDLE(aclopSetAttrListListInt)

// torch_npu gives its caller a number alone.
EXPORT int aclrtDeviceTaskAbort() {
  const char *why = "stopping a device is not emulated: what runs on it goes on";
  std::fprintf(stderr, "EMULATED: %s\n", why);
  return emulator::failure(ACL_ERROR_FEATURE_UNSUPPORTED, "%s", why);
}

// torch_npu's profiler asks for this to begin with, and goes on without; what comes after it does nothing.
EXPORT void *aclprofCreateConfig() {
  std::fputs("EMULATED: torch_npu's profiler records nothing: a device's times are not emulated\n", stderr);
  return nullptr;
}
IDLE(aclprofDestroyConfig)
IDLE(MsprofGetHashId)
IDLE(MsprofRegisterCallback)
IDLE(MsprofReportAdditionalInfo)
IDLE(MsprofReportApi)
IDLE(MsprofReportCompactInfo)
IDLE(MsprofSysCycleTime)
IDLE(aclprofInit)
IDLE(aclprofStart)
IDLE(aclprofStop)
IDLE(aclprofFinalize)
IDLE(aclprofCreateStepInfo)
IDLE(aclprofGetStepTimestamp)
IDLE(aclprofDestroyStepInfo)
