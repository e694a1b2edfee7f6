// The legacy interface that executes one operator: its tensors are described in JSON to a handler in Python. torch_npu
// takes this way below its dispatcher for few operators, whose attributes do not matter here.
#include "emulator.h"

#include <atomic>

#include <acl/acl_op_compiler.h>

struct aclTensorDesc {
  aclDataType type;
  aclFormat format;
  std::vector<int64_t> dims;
  bool on_host = false;
};

struct aclDataBuffer {
  void *data;
  size_t bytes;
};

EXPORT aclTensorDesc *aclCreateTensorDesc(aclDataType type, int count, const int64_t *dims, aclFormat format) {
  return new aclTensorDesc{type, format, std::vector<int64_t>(dims, dims + (count > 0 ? count : 0)), false};
}

EXPORT void aclDestroyTensorDesc(const aclTensorDesc *desc) { delete desc; }
EXPORT aclDataType aclGetTensorDescType(const aclTensorDesc *desc) { return desc->type; }
EXPORT aclFormat aclGetTensorDescFormat(const aclTensorDesc *desc) { return desc->format; }
EXPORT size_t aclGetTensorDescNumDims(const aclTensorDesc *desc) { return desc->dims.size(); }

EXPORT aclError aclGetTensorDescDimV2(const aclTensorDesc *desc, size_t index, int64_t *size) {
  if (index >= desc->dims.size()) return ACL_ERROR_INVALID_PARAM;
  *size = desc->dims[index];
  return ACL_SUCCESS;
}

EXPORT void aclSetTensorDescName(aclTensorDesc *, const char *) {}

EXPORT aclError aclSetTensorFormat(aclTensorDesc *desc, aclFormat format) {
  desc->format = format;
  return ACL_SUCCESS;
}

EXPORT aclError aclSetTensorPlaceMent(aclTensorDesc *desc, aclMemType memory) {
  desc->on_host = memory != ACL_MEMTYPE_DEVICE;
  return ACL_SUCCESS;
}

EXPORT aclError aclSetTensorShape(aclTensorDesc *desc, int count, const int64_t *dims) {
  desc->dims.assign(dims, dims + (count > 0 ? count : 0));
  return ACL_SUCCESS;
}

EXPORT aclDataBuffer *aclCreateDataBuffer(void *data, size_t bytes) { return new aclDataBuffer{data, bytes}; }

EXPORT aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

namespace {

// Answers 0: done, 1: the operator is unknown, 2: it raised.
using Handler = int (*)(const char *op, const char *inputs, const char *outputs);
std::atomic<Handler> handler{nullptr};

std::string described(int count, const aclTensorDesc *const descs[], const aclDataBuffer *const buffers[]) {
  std::string text;
  for (int i = 0; i < count; i++) {
    static const aclTensorDesc absent{aclDataType(-1), ACL_FORMAT_ND, {}, false};
    const aclTensorDesc &desc = descs[i] ? *descs[i] : absent;
    const aclDataBuffer buffer = descs[i] && buffers[i] ? *buffers[i] : aclDataBuffer{nullptr, 0};
    std::string dims;
    for (int64_t size : desc.dims) dims += (dims.empty() ? "" : ",") + std::to_string(size);
    text += (i ? ",[" : "[") + std::to_string(desc.type) + ",[" + dims + "]," + std::to_string(uintptr_t(buffer.data)) +
            "," + std::to_string(buffer.bytes) + "," + (desc.on_host ? "true" : "false") + "]";
  }
  return "[" + text + "]";
}

aclError execute(const char *op, const std::string &inputs, const std::string &outputs) {
  if (emulator::forked()) return emulator::refuse_forked();
  emulator::trace("single operator %s %s -> %s", op, inputs.c_str(), outputs.c_str());
  emulator::count_launch(op);
  Handler call = handler;
  switch (call ? call(op, inputs.c_str(), outputs.c_str()) : 1) {
    case 0: return ACL_SUCCESS;
    case 1: return emulator::failure(ACL_ERROR_OP_NOT_FOUND, "npu operator %s is not emulated", op);
    default: return emulator::failure(ACL_ERROR_FAILURE, "npu operator %s raised (its traceback is on stderr)", op);
  }
}

std::string compile_options[64];

}  // namespace

EXPORT void emulator_set_operator_handler(Handler function) { handler = function; }

EXPORT aclError aclopCompileAndExecute(const char *op, int input_count, const aclTensorDesc *const inputs[],
                                       const aclDataBuffer *const input_data[], int output_count,
                                       const aclTensorDesc *const outputs[], aclDataBuffer *const output_data[],
                                       const aclopAttr *, aclopEngineType, aclopCompileType, const char *,
                                       aclrtStream) {
  return execute(op, described(input_count, inputs, input_data), described(output_count, outputs, output_data));
}

EXPORT aclError aclopCompileAndExecuteV2(const char *op, int input_count, aclTensorDesc *inputs[],
                                         aclDataBuffer *input_data[], int output_count, aclTensorDesc *outputs[],
                                         aclDataBuffer *output_data[], aclopAttr *, aclopEngineType,
                                         aclopCompileType, const char *, aclrtStream) {
  return execute(op, described(input_count, inputs, input_data), described(output_count, outputs, output_data));
}

EXPORT aclError aclSetCompileopt(aclCompileOpt option, const char *value) {
  if (size_t(option) < 64) compile_options[option] = value;
  return ACL_SUCCESS;
}

EXPORT size_t aclGetCompileoptSize(aclCompileOpt option) {
  return size_t(option) < 64 ? compile_options[option].size() + 1 : 0;
}

EXPORT aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
  if (size_t(option) >= 64 || compile_options[option].size() >= length) return ACL_ERROR_INVALID_PARAM;
  compile_options[option].copy(value, length);
  value[compile_options[option].size()] = 0;
  return ACL_SUCCESS;
}
