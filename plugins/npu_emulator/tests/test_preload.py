"""Libraries that are preloaded, such as those that record what is allocated, stand before CANN's functions."""

import subprocess

HOOK = r"""
#include <dlfcn.h>
#include <cstdio>

extern "C" int aclrtMallocAlign32(void **address, size_t size, int policy) {
  auto next = reinterpret_cast<int (*)(void **, size_t, int)>(dlsym(RTLD_NEXT, "aclrtMallocAlign32"));
  puts(next ? "seen" : "nothing comes next");
  fflush(stdout);  // before what Python prints, which has a buffer of its own
  return next ? next(address, size, policy) : -1;
}
"""
# torch_npu comes first, as it may: other scripts of these tests import torch alone, or first.
SCRIPT = "import torch_npu, torch; print(torch.ones(3, device='npu').sum().item())"


def test_a_preloaded_function_sees_each_call_and_passes_it_on(emulated_process, tmp_path):
    source, hook = tmp_path / "hook.cpp", tmp_path / "hook.so"
    source.write_text(HOOK)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", hook, source, "-ldl"], check=True)
    done = emulated_process("-c", SCRIPT, LD_PRELOAD=str(hook))
    assert done.stdout.split() == ["seen", "3.0"], done.stderr
