// What the emulated CANN asks this process's Python: to register the host kernels, and for the settings, which it reads
// from the environment (settings.py). So an emulated process needs nothing but its environment, as with a real CANN: no
// import hook and no sitecustomize.
#include "emulator.h"

#include <dlfcn.h>
#include <sstream>

namespace emulator {
namespace {

// The interpreter is part of the process, not of this library's build: its functions are looked up by name.
template <class Function>
Function *look(const char *name) {
  return reinterpret_cast<Function *>(dlsym(RTLD_DEFAULT, name));
}

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

std::string ask_python(const char *function) {
  auto running = look<int()>("Py_IsInitialized");
  auto enter = look<int()>("PyGILState_Ensure");
  auto leave = look<void(int)>("PyGILState_Release");
  auto run = look<int(const char *, void *)>("PyRun_SimpleStringFlags");
  if (!running || !enter || !leave || !run || !running()) return "there is no Python in this process";
  char answer[4096] = "an error of Python, which is shown above";
  char code[200];
  snprintf(code, sizeof code, "__import__('accelcore_npu_emulator.bootstrap').bootstrap.answer('%s', %llu, %zu)",
           function, (unsigned long long)(uintptr_t(answer)), sizeof answer);
  int state = enter();
  run(code, nullptr);  // it prints an exception
  leave(state);
  return answer;
}

const Settings &settings() {
  static const Settings once = read();
  return once;
}

}  // namespace emulator
