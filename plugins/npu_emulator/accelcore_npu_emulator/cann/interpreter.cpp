// aclInit asks this process's Python to register the host kernels, and to read the settings before. So an emulated
// process needs nothing but its environment, as with a real CANN: no import hook and no sitecustomize.
#include "emulator.h"

#include <dlfcn.h>

namespace emulator {
namespace {

// The interpreter is part of the process, not of this library's build: its functions are looked up by name.
struct Python {
  using Object = void;
  int (*ensure)();
  void (*release)(int);
  Object *(*import)(const char *);
  Object *(*call)(Object *, const char *, const char *, ...);
  Object *(*text)(Object *);
  const char *(*utf8)(Object *);
  void (*fetch)(Object **, Object **, Object **);
  void (*clear)();
  void (*forget)(Object *);
  int (*running)();

  bool find() {
    return look(&running, "Py_IsInitialized") && look(&ensure, "PyGILState_Ensure") &&
           look(&release, "PyGILState_Release") && look(&import, "PyImport_ImportModule") &&
           look(&call, "PyObject_CallMethod") && look(&text, "PyObject_Str") && look(&utf8, "PyUnicode_AsUTF8") &&
           look(&fetch, "PyErr_Fetch") && look(&clear, "PyErr_Clear") && look(&forget, "Py_DecRef");
  }

  std::string string(Object *object) {
    const char *read = object ? utf8(object) : nullptr;
    return read ? read : "an error that cannot be shown";
  }

  std::string error() {
    Object *kind = nullptr, *value = nullptr, *traceback = nullptr;
    fetch(&kind, &value, &traceback);
    Object *shown = value ? text(value) : nullptr;
    std::string message = string(shown);
    clear();
    for (Object *object : {shown, kind, value, traceback}) forget(object);
    return message;
  }

 private:
  template <class Function>
  static bool look(Function **function, const char *name) {
    *function = reinterpret_cast<Function *>(dlsym(RTLD_DEFAULT, name));
    return *function != nullptr;
  }
};

// The message of a function of bootstrap, which is empty when all is well.
std::string run(Python &python, const char *function) {
  void *module = python.import("accelcore_npu_emulator.bootstrap");
  if (!module) return python.error();
  void *message = python.call(module, function, nullptr);
  std::string problem = message ? python.string(message) : python.error();
  python.forget(message);
  python.forget(module);
  return problem;
}

}  // namespace

std::string ask_python(const char *function) {
  Python python;
  if (!python.find() || !python.running()) return "there is no Python in this process to run the host kernels";
  int state = python.ensure();
  std::string problem = run(python, function);
  python.release(state);
  return problem;
}

}  // namespace emulator
