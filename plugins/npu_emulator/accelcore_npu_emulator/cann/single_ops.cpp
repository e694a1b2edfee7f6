// The legacy interface that executes one operator: tensors and attributes are described in JSON to a handler in
// Python. torch_npu takes this way below its dispatcher.
#include "emulator.h"

#include <atomic>
#include <map>

#include <acl/acl_op_compiler.h>

#include "json.h"

namespace json = emulator::json;

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

struct aclopAttr {
  std::map<std::string, std::string> values;  // name to JSON
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

EXPORT aclopAttr *aclopCreateAttr() { return new aclopAttr; }
EXPORT void aclopDestroyAttr(const aclopAttr *attributes) { delete attributes; }

namespace {

aclError set(aclopAttr *attributes, const char *name, std::string value) {
  attributes->values[name] = std::move(value);
  return ACL_SUCCESS;
}

const char *boolean(uint8_t value) { return value ? "true" : "false"; }
std::string integer(int64_t value) { return json::number(value); }
std::string real(float value) { return json::number(value); }

}  // namespace

EXPORT aclError aclopSetAttrBool(aclopAttr *attributes, const char *name, uint8_t value) {
  return set(attributes, name, boolean(value));
}

EXPORT aclError aclopSetAttrDataType(aclopAttr *attributes, const char *name, aclDataType value) {
  return set(attributes, name, integer(value));
}

EXPORT aclError aclopSetAttrInt(aclopAttr *attributes, const char *name, int64_t value) {
  return set(attributes, name, integer(value));
}

EXPORT aclError aclopSetAttrFloat(aclopAttr *attributes, const char *name, float value) {
  return set(attributes, name, real(value));
}

EXPORT aclError aclopSetAttrString(aclopAttr *attributes, const char *name, const char *value) {
  return set(attributes, name, json::quoted(value));
}

EXPORT aclError aclopSetAttrListBool(aclopAttr *attributes, const char *name, int count, const uint8_t *values) {
  return set(attributes, name, json::list(size_t(count), values, boolean));
}

EXPORT aclError aclopSetAttrListInt(aclopAttr *attributes, const char *name, int count, const int64_t *values) {
  return set(attributes, name, json::list(size_t(count), values, integer));
}

EXPORT aclError aclopSetAttrListFloat(aclopAttr *attributes, const char *name, int count, const float *values) {
  return set(attributes, name, json::list(size_t(count), values, real));
}

EXPORT aclError aclopSetAttrListListInt(aclopAttr *attributes, const char *name, int count, const int *lengths,
                                        const int64_t *const values[]) {
  std::vector<std::string> lists;
  for (int i = 0; i < count; i++) lists.push_back(json::list(size_t(lengths[i]), values[i], integer));
  return set(attributes, name, json::list(lists.size(), lists.data(), [](const std::string &text) { return text; }));
}

namespace {

// Answers 0: done, 1: the operator is unknown, 2: it raised.
using Handler = int (*)(const char *op, const char *inputs, const char *outputs, const char *attributes);
std::atomic<Handler> handler{nullptr};

std::string described(const aclTensorDesc *desc, const aclDataBuffer *buffer) {
  if (!desc) return "[-1,[],0,0,false]";
  return "[" + integer(desc->type) + "," + json::list(desc->dims.size(), desc->dims.data(), integer) + "," +
         std::to_string(buffer ? uintptr_t(buffer->data) : 0) + "," + std::to_string(buffer ? buffer->bytes : 0) + "," + boolean(desc->on_host) + "]";
}

std::string described(int count, const aclTensorDesc *const descs[], const aclDataBuffer *const buffers[]) {
  std::vector<std::string> tensors;
  for (int i = 0; i < count; i++) tensors.push_back(described(descs[i], buffers[i]));
  return json::list(tensors.size(), tensors.data(), [](const std::string &text) { return text; });
}

std::string described(const aclopAttr *attributes) {
  std::string text;
  if (attributes) {
    for (const auto &[name, value] : attributes->values) {
      text += (text.empty() ? "" : ",") + json::quoted(name) + ":" + value;
    }
  }
  return "{" + text + "}";
}

aclError execute(const char *op, const std::string &inputs, const std::string &outputs, const aclopAttr *attributes) {
  if (emulator::forked()) return emulator::refuse_forked();
  std::string options = described(attributes);
  emulator::trace("single operator %s %s -> %s %s", op, inputs.c_str(), outputs.c_str(), options.c_str());
  emulator::count_launch(op);
  Handler call = handler;
  switch (call ? call(op, inputs.c_str(), outputs.c_str(), options.c_str()) : 1) {
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
                                       const aclopAttr *attributes, aclopEngineType, aclopCompileType, const char *,
                                       aclrtStream) {
  return execute(op, described(input_count, inputs, input_data), described(output_count, outputs, output_data),
                 attributes);
}

EXPORT aclError aclopCompileAndExecuteV2(const char *op, int input_count, aclTensorDesc *inputs[],
                                         aclDataBuffer *input_data[], int output_count, aclTensorDesc *outputs[],
                                         aclDataBuffer *output_data[], aclopAttr *attributes, aclopEngineType,
                                         aclopCompileType, const char *, aclrtStream) {
  return execute(op, described(input_count, inputs, input_data), described(output_count, outputs, output_data),
                 attributes);
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
