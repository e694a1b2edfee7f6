// Graph capture. The tape is kept in Python, where the kernels are; here is the protocol.
#include "emulator.h"

#include <atomic>

namespace {

using Handler = int (*)(int what, uint64_t a, uint64_t b, uint64_t n);

std::atomic<Handler> handler{nullptr};
std::atomic<uint64_t> active{0};  // the graph that is being captured
std::atomic<aclrtStream> origin{nullptr};  // the stream on which it is captured
std::atomic<uint64_t> graphs{0};

uint64_t id_of(aclmdlRI graph) { return reinterpret_cast<uintptr_t>(graph); }
aclmdlRI graph_of(uint64_t id) { return reinterpret_cast<aclmdlRI>(uintptr_t(id)); }

}  // namespace

namespace emulator {

bool capturing() { return active != 0; }
bool capturing(aclrtStream stream) { return capturing() && stream == origin; }

aclError refuse_waiting(const char *what) {
  return failure(ACL_ERROR_FAILURE, "the host cannot wait for %s while a graph is being captured", what);
}

aclError record(Tape what, uint64_t a, uint64_t b, uint64_t n) {
  Handler call = handler;
  if (call && call(int(what), a, b, n) == 0) return ACL_SUCCESS;
  return failure(ACL_ERROR_FAILURE, "graph %llu: the %s failed", (unsigned long long)a,
                 what == Tape::kExecute ? "replay" : "capture");
}

}  // namespace emulator

using namespace emulator;

EXPORT void emulator_set_graph_handler(Handler function) { handler = function; }

EXPORT aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode) {
  if (capturing()) return failure(ACL_ERROR_FAILURE, "a graph is being captured already");
  uint64_t id = ++graphs;
  trace("capture graph %llu", (unsigned long long)id);
  if (aclError error = record(Tape::kBegin, id)) return error;
  save_memory();
  origin = stream;
  active = id;
  return ACL_SUCCESS;
}

EXPORT aclError aclmdlRICaptureGetInfo(aclrtStream, aclmdlRICaptureStatus *status, aclmdlRI *graph) {
  *status = capturing() ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
  if (graph) *graph = graph_of(active);
  return ACL_SUCCESS;
}

EXPORT aclError aclmdlRICaptureEnd(aclrtStream, aclmdlRI *graph) {
  uint64_t id = active.exchange(0);
  *graph = graph_of(id);
  if (!id) return failure(ACL_ERROR_FAILURE, "no graph is being captured");
  restore_memory();
  return record(Tape::kEnd, id);
}

EXPORT aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *) { return ACL_SUCCESS; }

EXPORT aclError aclmdlRIExecuteAsync(aclmdlRI graph, aclrtStream) {
  count_launch("graph replay");
  return record(Tape::kExecute, id_of(graph));
}

EXPORT aclError aclmdlRIDestroy(aclmdlRI graph) { return record(Tape::kDestroy, id_of(graph)); }

EXPORT aclError aclmdlRIGetId(aclmdlRI graph, uint32_t *id) {
  *id = uint32_t(id_of(graph));
  return ACL_SUCCESS;
}

EXPORT aclError aclmdlRIDebugPrint(aclmdlRI) { return ACL_SUCCESS; }
