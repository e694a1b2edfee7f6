// How a communicator is configured, by HcclCommConfig and by the environment.
#pragma once

#include <third_party/hccl/inc/hccl/hccl.h>

namespace emulator {

struct Waits {
  double connect = 120, execute = 300;  // seconds, for the others to join and to call; may be infinite
};

// Refuses what HCCL refuses, naming it; else says how long the communicator waits. `config` may be null.
HcclResult configure(const HcclCommConfig *config, Waits *waits);

}  // namespace emulator
