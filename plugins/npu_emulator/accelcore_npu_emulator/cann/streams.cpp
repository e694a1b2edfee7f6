// Streams and events. Work is done when its call returns, so that there is nothing to wait for; what a script waits
// for is counted all the same.
#include "emulator.h"

#include <array>
#include <atomic>
#include <ctime>
#include <unistd.h>

using emulator::kCubeCores;
using emulator::kVectorCores;

namespace {

// How many cores of each kind, by aclrtDevResLimitType.
using Cores = std::array<uint32_t, 2>;
constexpr Cores kCores = {kCubeCores, kVectorCores};

struct Stream {
  int id;
  uint32_t overflow;
  Cores cores;
};

// The stream whose limits hold in this thread; they slow nothing down here.
thread_local const Stream *t_limits = nullptr;

aclError limit(const Cores &cores, aclrtDevResLimitType type, uint32_t *value) {
  if (size_t(type) >= cores.size()) return emulator::failure(ACL_ERROR_INVALID_PARAM, "no kind of core: %d", int(type));
  *value = cores[size_t(type)];
  return ACL_SUCCESS;
}

struct Event {
  double milliseconds = 0;
  aclrtStream stream = nullptr;  // on which it was recorded last
};

std::atomic<int> streams{0};

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) * 1e3 + double(time.tv_nsec) * 1e-6;
}

aclError synchronize(const char *what, aclrtStream stream) {
  if (emulator::capturing(stream)) return emulator::refuse_waiting("a stream");
  emulator::count_synchronize(what);
  return emulator::forked() ? emulator::refuse_forked() : aclError(ACL_SUCCESS);
}

}  // namespace

EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t, uint32_t) {
  if (emulator::forked()) return emulator::refuse_forked();
  Stream *made = new Stream{streams++, 0, kCores};
  emulator::trace("aclrtCreateStream npu:%d -> stream %d", emulator::current_device(), made->id);
  *stream = made;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtCreateStream(aclrtStream *stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

EXPORT aclError aclrtDestroyStream(aclrtStream stream) {
  if (t_limits == stream) t_limits = nullptr;
  delete static_cast<Stream *>(stream);
  return ACL_SUCCESS;
}

EXPORT aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
EXPORT aclError aclrtSynchronizeStream(aclrtStream stream) { return synchronize("stream", stream); }
EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return synchronize("stream", stream); }

EXPORT aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus *status) {
  *status = ACL_STREAM_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
  *id = stream ? static_cast<Stream *>(stream)->id : -1;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
EXPORT aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue *) { return ACL_SUCCESS; }

EXPORT aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) {
  if (stream) static_cast<Stream *>(stream)->overflow = flag;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t *flag) {
  *flag = stream ? static_cast<Stream *>(stream)->overflow : 0;
  return ACL_SUCCESS;
}

// The default stream has no handle of its own, and no limits.
EXPORT aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t *value) {
  return limit(stream ? static_cast<Stream *>(stream)->cores : kCores, type, value);
}

EXPORT aclError aclrtSetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t value) {
  uint32_t most = 0;
  if (aclError error = limit(kCores, type, &most)) return error;
  if (!stream || !value || value > most) {
    return emulator::failure(ACL_ERROR_INVALID_PARAM, "a stream of its own may have 1 to %u of these cores, not %u",
                             most, value);
  }
  static_cast<Stream *>(stream)->cores[size_t(type)] = value;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtResetStreamResLimit(aclrtStream stream) {
  if (stream) static_cast<Stream *>(stream)->cores = kCores;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtUseStreamResInCurrentThread(aclrtStream stream) {
  t_limits = static_cast<Stream *>(stream);
  return ACL_SUCCESS;
}

EXPORT aclError aclrtUnuseStreamResInCurrentThread(aclrtStream) {
  t_limits = nullptr;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t *value) {
  return limit(t_limits ? t_limits->cores : kCores, type, value);
}

EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t) {
  *event = new Event;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) {
  return aclrtCreateEventExWithFlag(event, flag);
}

EXPORT aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event *>(event);
  return ACL_SUCCESS;
}

EXPORT aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  *static_cast<Event *>(event) = {now(), stream};
  return ACL_SUCCESS;
}

EXPORT aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
EXPORT aclError aclrtStreamWaitEvent(aclrtStream, aclrtEvent) { return ACL_SUCCESS; }
EXPORT aclError aclrtSynchronizeEvent(aclrtEvent event) {
  return synchronize("event", static_cast<Event *>(event)->stream);
}

EXPORT aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus *status) {
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus *status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
  *milliseconds = float(static_cast<Event *>(end)->milliseconds - static_cast<Event *>(start)->milliseconds);
  return ACL_SUCCESS;
}

EXPORT aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *microseconds) {
  *microseconds = uint64_t(static_cast<Event *>(event)->milliseconds * 1e3);
  return ACL_SUCCESS;
}

EXPORT aclError aclrtLaunchCallback(aclrtCallback callback, void *data, aclrtCallbackBlockType, aclrtStream) {
  callback(data);
  return ACL_SUCCESS;
}

EXPORT aclError aclrtLaunchHostFunc(aclrtStream, aclrtHostFunc function, void *data) {
  function(data);
  return ACL_SUCCESS;
}

EXPORT aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
EXPORT aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }

// torch_npu's callback thread asks for reports in a loop; callbacks ran already, so it only has to be kept from
// spinning.
EXPORT aclError aclrtProcessReport(int32_t timeout) {
  constexpr int kLongest = 50, kShortest = 1;  // milliseconds
  int wait = timeout < kShortest ? kShortest : timeout > kLongest ? kLongest : timeout;
  usleep(useconds_t(wait) * 1000);
  return ACL_ERROR_WAIT_CALLBACK_TIMEOUT;
}
