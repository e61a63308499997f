/* A stand-in for the driver's library, with NVML's names and structures: STAND_IN_NVML_GPUS GPUs, each question of which
   takes STAND_IN_NVML_MS. What is a figure's alone is by the index of its GPU. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int given(const char *name) { return getenv(name) ? atoi(getenv(name)) : 0; }
static void wait_ms(void) { usleep(1000 * given("STAND_IN_NVML_MS")); }

int nvmlInit_v2(void) { wait_ms(); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = given("STAND_IN_NVML_GPUS"); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(uintptr_t)(index + 1); return 0; }
int nvmlDeviceGetUUID(void *gpu, char *uuid, unsigned length) {
  snprintf(uuid, length, "GPU-a%zu000000-1111-2222-3333-444444444444", (size_t)gpu);
  return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  *handle = (void *)(uintptr_t)3;
  return strcmp(uuid, "MIG-c7") != 0;
}
int nvmlDeviceGetUtilizationRates(void *gpu, unsigned *rates) { wait_ms(); rates[0] = 90 + (uintptr_t)gpu; return 0; }
int nvmlDeviceGetMemoryInfo(void *gpu, unsigned long long *memory) {
  const char *held = getenv("STAND_IN_NVML_HELD"); /* memory is in use while there is such a file */
  memory[0] = 80ull << 30, memory[2] = held && access(held, F_OK) ? 0 : (10ull * (uintptr_t)gpu) << 30;
  return 0;
}
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *milliwatt) { *milliwatt = 0; return 3; /* not supported */ }
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *degrees) {
  *degrees = sensor == 0 ? 60 + (uintptr_t)gpu : 999;
  return 0;
}
int nvmlDeviceGetClockInfo(void *gpu, int kind, unsigned *mhz) { *mhz = kind == 1 ? 1000 + (uintptr_t)gpu : 0; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *reasons) {
  *reasons = (uintptr_t)gpu == 2 ? 0x4 | 0x20 : 0x1; /* a power cap and heat; an idle GPU */
  return 0;
}
