// A fake libcuda.so.1 whose results are set by environment variables.
#include <cstdlib>

namespace {
int FromEnvironment(const char* name) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : 0;
}
}  // namespace

extern "C" {
int cuInit(unsigned) { return FromEnvironment("FAKE_CU_INIT"); }
int cuDriverGetVersion(int* version) {
  *version = FromEnvironment("FAKE_CU_VERSION");
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = FromEnvironment("FAKE_CU_COUNT");
  return FromEnvironment("FAKE_CU_COUNT_RESULT");
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
// FAKE_CU_CAPABILITY: 90 for sm_90.
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const int capability = FromEnvironment("FAKE_CU_CAPABILITY");
  if (attribute != 75 && attribute != 76) return 1;
  *value = attribute == 75 ? capability / 10 : capability % 10;
  return capability > 0 ? 0 : 3;  // CUDA_ERROR_NOT_INITIALIZED
}
int cuGetErrorName(int code, const char** name) {
  *name = code == 802 ? "CUDA_ERROR_SYSTEM_NOT_READY" : nullptr;
  return *name ? 0 : 1;
}
}
