// A CUDA driver without a device, for what launches kernels: it notes the last launch and its arguments.

#include <cuda.h>
#include <string.h>

static size_t sizes[256];
static int count;
static char arguments[1 << 16];
static size_t used;
static unsigned long long launches, handles = 1000, config[7];

// The bytes of each argument of the launches that follow.
void fake_expect(int given, const size_t *each) {
  count = given;
  memcpy(sizes, each, given * sizeof(size_t));
}

// Copies what the last launch was configured with, and its arguments; returns how many bytes these are.
size_t fake_last(unsigned long long *into, char *bytes) {
  memcpy(into, config, sizeof(config));
  memcpy(bytes, arguments, used);
  return used;
}

unsigned long long fake_launches(void) { return launches; }

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *given, CUfunction function, void **parameters, void **extra) {
  launches++;
  used = 0;
  for (int place = 0; place < count; place++) {
    memcpy(arguments + used, parameters[place], sizes[place]);
    used += sizes[place];
  }
  config[0] = given->gridDimX;
  config[1] = (unsigned long long)given->gridDimY << 32 | given->gridDimZ;
  config[2] = given->blockDimX;
  config[3] = given->sharedMemBytes;
  config[4] = (unsigned long long)given->hStream;
  config[5] = given->numAttrs ? given->attrs[0].id + 1 : 0;
  config[6] = (unsigned long long)function;
  return CUDA_SUCCESS;
}

// Whatever a map is made of.
CUresult CUDAAPI cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *dimensions,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  char *bytes = (char *)map;
  int kinds[] = {type, rank, swizzle, fill};
  memset(bytes, 0, sizeof(*map));
  memcpy(bytes, &address, 8);
  memcpy(bytes + 8, dimensions, 8 * rank);
  memcpy(bytes + 48, strides, 8 * (rank - 1));
  memcpy(bytes + 80, box, 4 * rank);
  memcpy(bytes + 104, kinds, sizeof(kinds));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)++handles;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)++handles;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = 232448;  // of shared memory, which is asked for
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
  *text = "an error of the fake driver";
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuFuncSetCacheConfig(CUfunction function, CUfunc_cache cache) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuCtxGetLimit(size_t *value, CUlimit limit) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  return CUDA_SUCCESS;
}
