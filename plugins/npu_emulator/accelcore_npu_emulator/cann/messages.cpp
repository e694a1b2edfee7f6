// HCCL's messages from one rank to another, through a mailbox for each pair of ranks.
#include <algorithm>
#include <cstring>

#include "communicator.h"

namespace emulator {
namespace {

struct Message {
  explicit Message(const HcclSendRecvItem &item)
      : sends(item.sendRecvType == HCCL_SEND),
        peer(int(item.remoteRank)),
        data(static_cast<char *>(item.buf)),
        count(item.count),
        type(item.dataType),
        bytes(item.count * element_size(item.dataType)) {}

  bool sends;
  int peer;
  char *data;
  uint64_t count;
  HcclDataType type;
  size_t bytes, done = 0;
  bool finished = false;
};

std::string text(const char *operation, uint64_t count, HcclDataType type, int peer) {
  const char *way = operation[4] == 'S' ? " to rank " : " from rank ";
  return Call{operation, count, type}.text() + way + std::to_string(peer);
}

// Moves one piece if the mailbox lets it; `moved` says whether it did. An empty message is one empty piece.
HcclResult advance(Communicator &group, Message *message, bool *moved) {
  Shared &shared = group.shared();
  int from = message->sends ? group.rank() : message->peer, to = message->sends ? message->peer : group.rank();
  bool full = shared.sent[from][to] != shared.received[from][to];
  *moved = full != message->sends;
  if (!*moved) return HCCL_SUCCESS;
  char *box = group.mailbox(from, to), *data = message->data + message->done;
  size_t bytes = std::min(kMailbox, message->bytes - message->done);
  Shared::Sent &sent = shared.messages[from][to];
  if (message->sends) {
    sent = {message->count, message->type};
    memcpy(box, data, bytes);
    shared.sent[from][to]++;
  } else {
    if (sent.count != message->count || sent.type != message->type) {
      return group.refuse_for_all(
          "rank " + std::to_string(from) + ": " + text("HcclSend", sent.count, sent.type, to) + "; rank " +
          std::to_string(to) + ": " + text("HcclRecv", message->count, message->type, from));
    }
    memcpy(data, box, bytes);
    shared.received[from][to]++;
  }
  message->done += bytes;
  message->finished = message->done == message->bytes;
  return HCCL_SUCCESS;
}

// All messages make progress together, so that no order of them can lock up; those of one pair keep their order.
HcclResult transfer(Communicator &group, const HcclSendRecvItem *items, uint32_t count) {
  std::vector<Message> messages(items, items + count);
  HcclResult error = HCCL_SUCCESS;
  HcclResult waited = group.wait([&] {
    int waiting = -1;
    bool busy[kMaxRanks][2] = {};
    for (Message &message : messages) {
      bool &taken = busy[message.peer][message.sends];
      for (bool moved = true; moved && !message.finished && !taken;) {
        error = advance(group, &message, &moved);
        if (error) return -1;
      }
      if (message.finished) continue;
      taken = true;
      waiting = message.peer;
    }
    return waiting;
  });
  return error ? error : waited;
}

// Between HcclGroupStart and HcclGroupEnd messages are only collected; collectives, which all ranks call in the same
// order, run at once.
thread_local int group_depth = 0;
thread_local std::vector<std::pair<Communicator *, HcclSendRecvItem>> group_items;

HcclResult end_group() {
  auto items = std::move(group_items);
  group_items.clear();
  while (!items.empty()) {
    Communicator *group = items.front().first;
    std::vector<HcclSendRecvItem> own;
    auto others = std::stable_partition(items.begin(), items.end(), [&](auto &item) { return item.first == group; });
    for (auto item = items.begin(); item != others; ++item) own.push_back(item->second);
    items.erase(items.begin(), others);
    if (HcclResult error = transfer(*group, own.data(), uint32_t(own.size()))) return error;
  }
  return HCCL_SUCCESS;
}

HcclResult one(void *data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm handle, HcclSendRecvType kind) {
  Communicator &group = *static_cast<Communicator *>(handle);
  if (HcclResult error = group.begin({kind == HCCL_SEND ? "HcclSend" : "HcclRecv", count, type})) return error;
  HcclSendRecvItem item = {kind, data, count, type, peer};
  if (group_depth == 0) return transfer(group, &item, 1);
  group_items.emplace_back(&group, item);
  return HCCL_SUCCESS;
}

}  // namespace
}  // namespace emulator

EXPORT HcclResult HcclSend(void *data, uint64_t count, HcclDataType type, uint32_t to, HcclComm handle, aclrtStream) {
  return emulator::one(data, count, type, to, handle, HCCL_SEND);
}

EXPORT HcclResult HcclRecv(void *data, uint64_t count, HcclDataType type, uint32_t from, HcclComm handle,
                           aclrtStream) {
  return emulator::one(data, count, type, from, handle, HCCL_RECV);
}

EXPORT HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t count, HcclComm handle, aclrtStream) {
  auto &group = *static_cast<emulator::Communicator *>(handle);
  if (HcclResult error = group.begin({"HcclBatchSendRecv", count})) return error;
  return emulator::transfer(group, items, count);
}

EXPORT HcclResult HcclGroupStart() {
  emulator::group_depth++;
  return HCCL_SUCCESS;
}

EXPORT HcclResult HcclGroupEnd() { return --emulator::group_depth == 0 ? emulator::end_group() : HCCL_SUCCESS; }
