// The settings of the emulated machine. Python reads them from the environment (settings.py).
#include "emulator.h"

#include <sstream>

namespace emulator {
namespace {

Settings read() {
  Settings read;
  Faults &faults = read.faults;
  std::string text = ask_python("machine");
  std::istringstream words(text);
  words >> read.devices >> read.memory >> read.poison >> faults.out_of_memory >> faults.timeout >> faults.die >>
      faults.die_rank >> read.soc;
  if (!words) read.problem = text;
  return read;
}

}  // namespace

const Settings &settings() {
  static const Settings once = read();
  return once;
}

}  // namespace emulator
