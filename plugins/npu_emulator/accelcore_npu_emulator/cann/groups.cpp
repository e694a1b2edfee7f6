// HCCL's communicators: how they are made, asked and ended.
#include <cstring>

#include "communicator.h"

using namespace emulator;

namespace {

Communicator *group_of(HcclComm handle) { return static_cast<Communicator *>(handle); }

HcclResult join(uint32_t size, const HcclRootInfo *info, uint32_t rank, const HcclCommConfig *config, HcclComm *out) {
  if (forked()) {
    refuse_forked();
    return HCCL_E_UNAVAIL;
  }
  Waits waits;
  if (HcclResult error = configure(config, &waits)) return error;
  Root root;
  memcpy(&root, info->internal, sizeof root);
  Communicator *group = nullptr;
  HcclResult result = Communicator::join(int(size), int(rank), root, std::to_string(root.key), waits, &group);
  *out = group;
  return result;
}

}  // namespace

EXPORT HcclResult HcclGetRootInfo(HcclRootInfo *info) {
  Root root;
  memset(info, 0, sizeof *info);
  HcclResult result = make_root(&root);
  memcpy(info->internal, &root, sizeof root);
  return result;
}

EXPORT HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo *info, uint32_t rank, HcclComm *out) {
  return join(size, info, rank, nullptr, out);
}

EXPORT HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo *info, uint32_t rank,
                                             const HcclCommConfig *config, HcclComm *out) {
  return join(size, info, rank, config, out);
}

EXPORT HcclResult HcclCreateSubCommConfig(HcclComm *parent, uint32_t size, uint32_t *ranks, uint64_t id, uint32_t rank,
                                          HcclCommConfig *config, HcclComm *out) {
  Waits waits;
  if (HcclResult error = configure(config, &waits)) return error;
  Communicator *group = nullptr;
  HcclResult result = group_of(*parent)->split(int(size), ranks, id, int(rank), waits, &group);
  *out = group;
  return result;
}

EXPORT HcclResult HcclCommDestroy(HcclComm handle) {
  delete group_of(handle);
  return HCCL_SUCCESS;
}

EXPORT uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_COMM_NAME + 1; }

EXPORT HcclResult HcclGetCommAsyncError(HcclComm, HcclResult *result) {
  *result = HCCL_SUCCESS;  // an error is returned by the call that meets it
  return HCCL_SUCCESS;
}

EXPORT HcclResult HcclGetCommName(HcclComm handle, char *name) {
  strcpy(name, group_of(handle)->name().substr(0, COMM_NAME_MAX_LENGTH - 1).c_str());
  return HCCL_SUCCESS;
}

EXPORT HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
